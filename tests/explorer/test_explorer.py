"""The explorer in Chromium: numbers, controls, links, exports, errors, keyboard, themes, and no network."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ringspan.tools.explorer.settings import ExplorerSettings
from ringspan.tools.explorer.views import answer
from tests.explorer.page import VIEWS, Explorer, fragment
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


@pytest.mark.parametrize(("select", "value", "changed"), [("#head", "1", {"matrix"}), ("#branch", "1", {"matrix"})])
def test_head_and_branch(explorer: Explorer, select: str, value: str, changed: set[str]) -> None:
    was = explorer.drawn()
    explorer.page.select_option(select, value)
    explorer.wait()
    assert {name for name in VIEWS if explorer.drawn()[name] != was[name]} == changed


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
    page.fill("#first", "64")
    page.fill("#second", "8")
    page.click("#add")
    explorer.wait()
    assert page.input_value("[name=pattern]") == "8x1,32x4,64x8"
    page.select_option("#kind", "window")
    page.click("#add")
    explorer.wait()
    assert page.input_value("[name=pattern]") == "8x1,32x4,64x8 + window 64 right 8"
    page.click("#terms button[aria-label='Remove 32x4']")
    explorer.wait()
    assert page.input_value("[name=pattern]") == "8x1,64x8 + window 64 right 8"
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
    assert page.inner_text("#hop-text") == "hop 1 of 3"
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
        dict(lengths="3,,4"), dict(order="hilbert", grid="4xa"), dict(pattern="window -1"),
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
            content = path.read_bytes()
            assert content[:8] == b"\x89PNG\r\n\x1a\n"
            size = [int.from_bytes(content[i : i + 4], "big") for i in (16, 20)]
            assert size == [int(2 * width), int(2 * height)]


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


def test_loading_moves_nothing(browser: Any, home: str) -> None:
    with Explorer(browser, home, viewport=dict(width=1400, height=900)) as explorer:
        explorer.context.add_init_script(
            "window.shifts = 0; new PerformanceObserver(list => { for (const one of list.getEntries()) "
            "if (!one.hadRecentInput) window.shifts += one.value; }).observe({type: 'layout-shift', buffered: true});"
        )
        explorer.open()
        assert explorer.page.evaluate("window.shifts") < 0.1  # what Web Vitals calls good
