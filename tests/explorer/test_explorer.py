"""The explorer in Chromium: numbers, controls, links, exports, errors, keyboard, themes, and no network."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib import image

from ringspan.tools.explorer.settings import ExplorerSettings
from ringspan.tools.explorer.views import answer
from tests.explorer.page import SHIFTS, VIEWS, Explorer, fragment
from tests.tools.explorer.test_views import random_settings, refusal_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("explorer")]

PLACES = "() => [...document.querySelectorAll('#ring .packet')].map(one => one.getAttribute('transform')).join()"
ALL = {"matrix", "ring", "holdings", "costs"}
GRID: dict[str, Any] = dict(order="hilbert", grid="8x8", causal=False, pattern="16x1,64x4", layout="contiguous")


@pytest.mark.parametrize("seed", range(50))
def test_numbers_are_those_of_the_plan(explorer: Explorer, seed: int) -> None:
    settings = random_settings(seed)
    explorer.show(**settings)
    assert explorer.error() == refusal_of(settings)
    if explorer.error():
        return
    plan = ExplorerSettings.of(settings).ring
    ranks = range(plan.layout.ring_size)
    assert explorer.costs() == {
        rank: dict(
            rank=rank,
            work=plan.work(rank),
            sent=plan.bytes_sent(rank),
            received=plan.bytes_received(rank),
            sentBackward=plan.bytes_sent(rank, backward=True),
            memory=plan.memory(rank).total,
            memoryBackward=plan.memory(rank, backward=True).total,
        )
        for rank in ranks
    }


@pytest.mark.parametrize(
    ("before", "control", "value", "changed"),
    [
        ({}, "pattern", "window 5", {"matrix", "ring", "costs"}),
        ({}, "causal", False, {"matrix", "ring", "costs"}),
        ({}, "tokens", "48", ALL),
        ({}, "lengths", "20,30", ALL),
        ({}, "ranks", "3", ALL),
        ({}, "layout", "contiguous", ALL),
        (dict(pattern="full", ranks="6", hop=3), "routing", "direct", {"ring", "costs"}),
        (dict(pattern="full", ranks="4", routing="by-node"), "ranks_per_node", "4", {"ring", "costs"}),
        (dict(heads="8", kv_heads="8"), "head_ranks", "2", {"matrix", "ring", "holdings", "costs"}),
        (dict(pattern="16x1,32x1", causal=False), "optimize", "none", {"ring", "costs"}),
        ({}, "heads", "8", {"ring", "costs"}),
        ({}, "kv_heads", "2", {"ring", "costs"}),
        ({}, "head_dim", "32", {"ring", "costs"}),
        ({}, "dtype", "float32", {"ring", "costs"}),
        (GRID, "order", "row_major", {"grid"}),
        (GRID, "grid", "4x16", {"grid"}),
    ],
)
def test_each_control_changes_its_views(
    explorer: Explorer, before: dict[str, Any], control: str, value: Any, changed: set[str]
) -> None:
    explorer.show(**before)
    was = explorer.drawn()
    field = explorer.page.locator(f"#controls [name={control}]")
    if isinstance(value, bool):
        field.set_checked(value)
    elif field.evaluate("field => field.tagName") == "SELECT":
        field.select_option(value)
    else:
        field.fill(value)
    explorer.page.wait_for_timeout(400)  # typing settles
    explorer.wait()
    assert explorer.error() == ""
    now = explorer.drawn()
    assert {name for name in VIEWS if now[name] != was[name]} == changed
    assert explorer.settings()[control] == str(value).lower()


@pytest.mark.parametrize(("select", "value"), [("#head", "1"), ("#branch", "1")])
def test_head_and_branch(explorer: Explorer, select: str, value: str) -> None:
    explorer.show(query=24)
    was, moves = explorer.drawn(), explorer.page.inner_html("#moves")
    explorer.page.select_option(select, value)
    explorer.wait()
    now = explorer.drawn()
    assert now["matrix"] != was["matrix"]
    assert (explorer.page.inner_html("#moves") != moves) == (select == "#head")  # which rows of the head are sent


def test_a_query_and_a_rank_are_shown_in_all_views(explorer: Explorer) -> None:
    explorer.show(**GRID)
    was = explorer.drawn()
    explorer.page.focus("#matrix")
    explorer.page.keyboard.press("End")
    explorer.wait()
    chosen = explorer.drawn()
    assert {name for name in VIEWS if chosen[name] != was[name]} == {"matrix", "ring", "holdings", "grid"}
    explorer.page.click("#costs [data-rank='2']")
    explorer.wait()
    followed = explorer.drawn()
    assert {name for name in VIEWS if followed[name] != chosen[name]} == set(VIEWS)
    assert explorer.page.inner_text("#ring-text").startswith("Rank 2 computes ")
    assert explorer.page.input_value("#rank") == "2"
    explorer.page.focus("#rank")
    explorer.page.keyboard.press("ArrowDown")  # also without a mouse
    explorer.wait()
    assert explorer.settings()["rank"] == "3"


def test_a_hop_is_marked_in_the_matrix(explorer: Explorer) -> None:
    explorer.show(pattern="full", layout="contiguous")
    assert explorer.page.locator("#blocks rect").count() == 0
    explorer.page.click("#forward")
    explorer.wait()
    assert explorer.page.locator("#blocks rect").count() == 3  # causal: rank r with the keys of rank r - 1


def test_examples_and_the_builder(explorer: Explorer) -> None:
    page = explorer.page
    names = page.eval_on_selector_all("#preset option[value]:not([value=''])", "options => options.map(o => o.value)")
    assert len(names) >= 8
    for name in names:
        page.select_option("#preset", name)
        explorer.wait()
        assert explorer.error() == "", name
        assert page.input_value("#preset") == name
    explorer.show()
    page.click("#terms button[aria-label='Add a segment length and rate']")
    steps: list[tuple[str, str, str]] = [
        ("fill", "[aria-label='Segment length of branch 3']", "64"),
        ("fill", "[aria-label='Rate of branch 3']", "8"),
        ("select_option", "[aria-label='Head offsets']", "blocked"),
        ("fill", "[aria-label='Shift']", "4"),
        ("click", "#add-window", ""),
        ("fill", "[aria-label='Window: rows to the right']", "2"),
        ("fill", "[aria-label='Window: dilation']", "3"),
        ("click", "button[aria-label='Remove 32x4']", ""),
        ("click", "#add-full", ""),
        ("click", "button[aria-label='Remove full']", ""),
    ]
    texts = [
        *("8x1,32x4,64x16", "8x1,32x4,64x8", "8x1,32x4,64x8 blocked", "8x1,32x4,64x8 blocked shift 4"),
        *("8x1,32x4,64x8 blocked shift 4 + window 7", "8x1,32x4,64x8 blocked shift 4 + window 7 right 2"),
        "8x1,32x4,64x8 blocked shift 4 + window 7 right 2 dilation 3",
        "8x1,64x8 blocked shift 4 + window 7 right 2 dilation 3",
        "8x1,64x8 blocked shift 4 + window 7 right 2 dilation 3 + full",
        "8x1,64x8 blocked shift 4 + window 7 right 2 dilation 3",
    ]
    for (act, where, value), text in zip(steps, texts, strict=True):
        getattr(page, act)(where, *([value] if value else []))
        page.wait_for_function("text => document.querySelector('[name=pattern]').value === text", arg=text)
        explorer.wait()
        assert explorer.error() == ""
    page.click("#reset")
    explorer.wait()
    assert explorer.settings() == {}


def test_pointing_at_a_query_shows_its_keys(explorer: Explorer) -> None:
    drawn = explorer.page.locator("#matrix svg")
    unit = drawn.bounding_box()["width"] / 666
    drawn.hover(position=dict(x=300 * unit, y=(26 + 37.5 * 10) * unit))  # row 37 of 64
    explorer.page.wait_for_function("document.querySelector('#readout').textContent.startsWith('Query 37 ')")
    explorer.wait()
    found = json.loads(answer(json.dumps(dict(view="keys", settings={}, query=37, head=0))))
    count = sum(len(range(*keys)) for keys in found["keys"])
    words = explorer.page.inner_text("#readout")
    assert f"on rank {found['rank']}," in words
    assert f"sees {count} keys" in words
    assert explorer.page.locator("#marks .mark").count() == 1


def test_the_keyboard_chooses_and_zooms(explorer: Explorer) -> None:
    explorer.show(tokens="1000", pattern="full")
    page = explorer.page
    page.focus("#matrix")
    for key in ("End", "ArrowUp", "+"):
        page.keyboard.press(key)
        explorer.wait()
    assert explorer.settings()["query"] == str(999 - 16)  # a cell has 16 rows
    assert explorer.settings()["cell"] == "8"
    page.keyboard.press("-")
    explorer.wait()
    assert "cell" not in explorer.settings()


def test_links_restore_the_page(explorer: Explorer, browser: Any, home: str) -> None:
    link = dict(
        pattern="window 3 + 16x2", tokens="200", ranks="5", query=50, head=1, hop=1, rank=2, cell=2, top=3, left=4
    )
    explorer.show(**link)
    with Explorer(browser, home) as again:
        again.open(explorer.page.url)
        assert again.settings() == {name: str(value) for name, value in link.items()}
        assert again.drawn() == explorer.drawn()
        assert again.page.inner_text("#readout") == explorer.page.inner_text("#readout")


def test_the_ring_plays_pauses_and_steps(explorer: Explorer) -> None:
    explorer.show(pattern="full", ranks="4")
    page = explorer.page
    page.click("#forward")
    explorer.wait()
    assert explorer.settings()["hop"] == "1"
    assert page.inner_text("#hop-text") == "1 of 3"
    page.click("#back")
    explorer.wait()
    page.click("#play")
    before = page.evaluate(PLACES)
    page.wait_for_timeout(500)
    assert page.evaluate(PLACES) != before
    page.wait_for_function("new URLSearchParams(location.hash.slice(1)).get('hop') === '1'")
    page.click("#play")
    page.wait_for_timeout(100)
    paused = page.evaluate(PLACES)
    page.wait_for_timeout(300)
    assert page.evaluate(PLACES) == paused


def test_the_messages_of_a_hop_are_listed(explorer: Explorer) -> None:
    settings = dict(pattern="full", ranks="4", heads="4")
    explorer.show(hop=2, **settings)
    listed = explorer.page.eval_on_selector_all(
        "#moves tr", "rows => rows.slice(1).map(row => [...row.cells].slice(0, 4).map(cell => cell.textContent))"
    )
    found = json.loads(answer(json.dumps(dict(view="hop", settings=settings, number=2))))
    names = ("from", "to", "owner", "rows")
    assert listed == [[f"{move[name]:,}" for name in names] for move in found["moves"]] != []


def test_reduced_motion_moves_nothing(browser: Any, home: str) -> None:
    with Explorer(browser, home, reduced_motion="reduce") as explorer:
        explorer.open("pattern=full")
        before = explorer.page.evaluate(PLACES)
        assert before
        explorer.page.click("#play")
        explorer.page.wait_for_timeout(600)
        assert explorer.page.evaluate(PLACES) == before


@pytest.mark.parametrize(
    "settings",
    [
        dict(pattern="8x0"), dict(tokens="0"), dict(heads="5", kv_heads="3"), dict(ranks="no"),
        dict(lengths="3,,4"), dict(order="hilbert", grid="4xa"), dict(pattern="window -1"), dict(head_ranks="3"),
        dict(optimize="always"), dict(layout="spiral"), dict(routing="by-node", ranks_per_node="0"),
    ],
    ids=fragment,
)  # fmt: skip
def test_impossible_settings_show_the_librarys_error(explorer: Explorer, settings: dict[str, Any]) -> None:
    explorer.show(**settings)
    assert explorer.error() == refusal_of(settings) != ""
    explorer.show()
    assert explorer.error() == ""


@pytest.mark.parametrize("view", VIEWS)
def test_exports_are_pictures(explorer: Explorer, view: str, tmp_path: Path) -> None:
    explorer.show(**GRID)
    for kind in ("SVG", "PNG"):
        with explorer.page.expect_download() as download:
            explorer.page.click(f"[data-export={view}] button:has-text('{kind}')")
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        assert path.name == f"ringspan-{view}.{kind.lower()}"
        width, height = explorer.page.eval_on_selector(
            f"#{view} svg", "drawn => [drawn.viewBox.baseVal.width, drawn.viewBox.baseVal.height]"
        )
        if kind == "SVG":
            root = ElementTree.parse(path).getroot()
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert [float(root.get(name, "0")) for name in ("width", "height")] == [width, height]
            assert not re.search(r"class=|var\(", path.read_text())
            assert len({shape.get("fill") for shape in root.iter()}) > 3  # colours are in the file
        else:
            pixels = image.imread(path)
            assert pixels.shape[:2] == (int(2 * height), int(2 * width))
            assert len({tuple(colour) for colour in pixels[::4, ::4].reshape(-1, pixels.shape[2])}) > 3  # not blank


def test_copied_python_gives_the_numbers_shown(browser: Any, home: str) -> None:
    with Explorer(browser, home, permissions=["clipboard-read", "clipboard-write"]) as explorer:
        explorer.open(
            fragment(dict(pattern="window 3 + 16x2 shift 4", ranks="6", routing="by-node", ranks_per_node="3"))
        )
        explorer.page.click("#python")
        copied = explorer.page.evaluate("() => navigator.clipboard.readText()")
        names: dict[str, Any] = {}
        exec(copied, names)
        shown = explorer.costs()
        for name in ("work", "sent", "memory"):
            assert names[name] == {rank: row[name] for rank, row in shown.items()}
        explorer.page.click("#link")
        assert explorer.page.evaluate("() => navigator.clipboard.readText()") == explorer.page.url


HOSTILE = "<img src=x onerror=window.bad=1>"


@pytest.mark.parametrize(
    "link",
    [
        *(fragment({name: HOSTILE}) for name in ("pattern", "tokens", "layout", "dtype", "grid", "lengths", HOSTILE)),
        *(fragment({name: "9" * 400}) for name in ("tokens", "ranks", "query", "hop", "cell", "pattern", "heads")),
        fragment(dict(query=999999999, head=-7, branch=99, hop=-3, rank=10**14, cell=-4, top=10**9, left=-1)),
        fragment(dict(tokens="1e300", head_dim="1e300", ranks="1")),
        fragment(dict(lengths="1*1e15")),
        fragment(dict(order="hilbert", grid="99999x99999")),
        fragment(dict(pattern=",".join(f"{i}x1" for i in range(1, 60)))),
        "%E0%A4%A&&==&#&pattern", "__proto__=1&constructor=2&pattern=full",
    ],
)  # fmt: skip
def test_hostile_links_neither_inject_nor_stop_the_page(explorer: Explorer, link: str) -> None:
    explorer.follow(link)
    assert explorer.page.evaluate("window.bad") is None
    assert explorer.page.locator("main img, #controls img").count() == 0
    explorer.show()
    assert explorer.error() == ""
    assert len(explorer.costs()) == 4


def test_a_plan_that_takes_too_long_is_given_up(explorer: Explorer) -> None:
    explorer.follow(fragment(dict(pattern="1x1,1x1", tokens="64", lengths="1*3e7")))
    assert explorer.error().startswith(("No answer within 15 seconds", "MemoryError"))
    explorer.show(ranks="3")
    assert explorer.error() == ""
    assert len(explorer.costs()) == 3


def test_loaded_results_are_text(browser: Any, home: str) -> None:
    with Explorer(browser, home) as explorer:
        rows = [["check", HOSTILE], *([[HOSTILE, str(i)] for i in range(3000)])]
        explorer.page.route("**/result.json", lambda route: route.fulfill(json=dict(title=HOSTILE, rows=rows)))
        explorer.open(f"{home}?result")
        explorer.page.wait_for_selector("#measured tr")
        assert HOSTILE in explorer.page.inner_text("#measured h2")
        assert explorer.page.locator("#measured img").count() == 0
        assert explorer.page.locator("#measured tr").count() == 1 + 1000
        assert explorer.page.evaluate("window.bad") is None


@pytest.mark.parametrize("content", ["{", "[]", '{"title": 3, "rows": 4}', '{"title": 3, "rows": [null, 1]}'])
def test_a_broken_result_is_an_error(browser: Any, home: str, content: str) -> None:
    with Explorer(browser, home) as explorer:
        explorer.page.route("**/result.json", lambda route: route.fulfill(body=content))
        explorer.open(f"{home}?result")
        assert explorer.error().startswith("result.json")


def test_no_request_leaves_the_server_and_none_is_needed_later(browser: Any, home: str) -> None:
    with Explorer(browser, home) as explorer:
        explorer.open()
        assert all(url.startswith((home, "data:", "blob:")) for url in explorer.requests)
        explorer.context.set_offline(True)
        explorer.show(pattern="window 9", ranks="5")
        assert len(explorer.costs()) == 5


def test_a_large_ring_is_sampled_and_answers_soon(explorer: Explorer) -> None:
    settings = dict(pattern="2048x1,8192x4,32768x16,131072x64,1048576x512", tokens="1M", ranks="1024")
    explorer.show(layout="contiguous", **settings)
    explorer.page.wait_for_function("document.querySelectorAll('#numbers tr[data-rank]').length === 64")
    explorer.wait()
    plan = ExplorerSettings.of(dict(layout="contiguous", **settings)).ring
    assert [*explorer.costs()] == list(plan.sample)
    assert all(row["sent"] == plan.bytes_sent(rank) for rank, row in explorer.costs().items())
    assert "8 of 1,024 ranks" in explorer.drawn()["ring"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_screen(browser: Any, home: str, scheme: str, width: int) -> None:
    with Explorer(browser, home, viewport=dict(width=width, height=844), color_scheme=scheme) as explorer:
        explorer.open(fragment(GRID))
        assert explorer.page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
        dark = explorer.page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
        assert dark == (scheme == "dark")


def test_the_theme_of_the_documentation_is_followed(browser: Any, home: str) -> None:
    with Explorer(browser, home, color_scheme="light") as explorer:
        explorer.context.add_init_script("localStorage.getItem('theme') ?? localStorage.setItem('theme', 'dark')")
        explorer.open()
        assert explorer.page.get_attribute("html", "data-theme") == "dark"
        explorer.page.click("#theme")
        assert explorer.page.evaluate("localStorage.getItem('theme')") == "auto"


def test_controls_and_figures_have_names(explorer: Explorer) -> None:
    explorer.show(**GRID)
    unnamed = explorer.page.eval_on_selector_all(
        "button, input, select, svg[role=img]",
        "all => all.filter(one => !(one.labels?.length || one.getAttribute('aria-label') || one.textContent.trim()))"
        ".map(one => one.outerHTML)",
    )
    assert unnamed == []


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("settings", [{}, GRID], ids=["text", "grid"])
def test_loading_moves_nothing(browser: Any, home: str, width: int, settings: dict[str, Any]) -> None:
    with Explorer(browser, home, viewport=dict(width=width, height=844)) as explorer:
        explorer.context.add_init_script(SHIFTS)
        explorer.open(fragment(settings))
        assert explorer.page.evaluate("window.shifts") < 0.1  # what Web Vitals calls good
