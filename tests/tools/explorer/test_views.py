"""The data of the explorer's views equals the oracle and `rs.plan`, and needs no torch."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ringspan as rs
from ringspan.geometry import keys_seen
from ringspan.tools.explorer.baselines import all_gather, dense_work, plain_ring
from ringspan.tools.explorer.settings import ExplorerSettings
from ringspan.tools.explorer.site import write_modules
from ringspan.tools.explorer.views import VIEWS, answer

CASES: list[dict[str, Any]] = [
    {},
    dict(pattern="window 3 right 2 + 16x2", causal=False, tokens="50", ranks="3", layout="contiguous"),
    dict(pattern="8x1,32x4 blocked shift 3", lengths="20,1,7,30", layout="balanced", kv_heads="2"),
    dict(pattern="full", ranks="6", routing="by-node", ranks_per_node="3", heads="1", kv_heads="1", dtype="float64"),
    dict(pattern="window 4 dilation 2", tokens="17", ranks="5", routing="direct"),
    dict(pattern="4x1,16x4", order="hilbert", grid="4x6", causal=False),
    dict(pattern="8x1,16x2 + window 3", ranks="6", head_ranks="2", heads="8", kv_heads="2", optimize="none"),
    dict(pattern="full", ranks="8", head_ranks="4", heads="8", kv_heads="2", routing="by-node", ranks_per_node="4"),
]


def ask(view: str, settings: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer(json.dumps({"view": view, "settings": settings, **arguments})))
    assert "error" not in found, found
    return found


def refusal_of(settings: dict[str, Any]) -> str:
    """The library's error for these settings; empty if they are possible."""
    try:
        _ = ExplorerSettings.of(settings).ring
    except ValueError as error:
        return str(error)
    return ""


def random_settings(seed: int) -> dict[str, Any]:
    """Settings that a person might type; some are impossible."""
    draw = random.Random(seed)
    tokens = draw.choice([24, 60, 64, 100, 257, 1000])
    length = draw.choice([4, 8, 10, 32])
    pairs = f"{length}x{draw.choice([1, 2])},{length * draw.choice([2, 4])}x{draw.choice([2, 4, 5])}"
    window = f"window {draw.choice([0, 3, 9])}" + draw.choice(["", " right 4", " dilation 3"])
    kv_heads = draw.choice([1, 2, 3, 4])
    settings: dict[str, Any] = dict(
        pattern=draw.choice(["full", pairs, pairs + " blocked", pairs + " shift 5", window, f"{window} + {pairs}"]),
        tokens=str(tokens),
        causal=draw.random() < 0.5,
        ranks=str(draw.choice([1, 2, 3, 4, 7, 8, 12])),
        layout=draw.choice(["contiguous", "zigzag", "balanced"]),
        head_ranks=draw.choice(["1", "1", "2"]),
        optimize=draw.choice(["auto", "none"]),
        routing=draw.choice(["relay", "direct", "by-node"]),
        ranks_per_node=str(draw.choice([1, 2, 4])),
        heads=str(kv_heads * draw.choice([1, 2])) if draw.random() < 0.9 else "5",
        kv_heads=str(kv_heads),
        head_dim=str(draw.choice([8, 64])),
        dtype=draw.choice(["float64", "float32", "bfloat16", "float16"]),
    )
    if draw.random() < 0.3:
        settings["lengths"] = draw.choice(["20,30,14", "5*9,100", "1,1,200"])
    return settings


@pytest.mark.parametrize("settings", CASES, ids=lambda case: str(case.get("pattern")))
@pytest.mark.parametrize("cell", [1, 3])
def test_cells_hold_the_multiplicities_of_the_definition(settings: dict[str, Any], cell: int) -> None:
    chosen = ExplorerSettings.of(settings)
    plan, head = chosen.ring, int(chosen.kv_heads) - 1
    rows = plan.layout.rows
    dense = [[0] * rows for _ in range(rows)]
    for query in range(rows):
        for seen in keys_seen(
            plan.pattern, plan.documents, query, kv_head=head, kv_heads=plan.sizes.kv_heads, causal=plan.causal
        ):
            for key in seen:
                dense[query][key] += 1
    start = [0]
    for length in plan.documents.lengths:
        start.append(start[-1] + length)
    for query in range(0, rows, 7):  # the definition itself
        first = max(one for one in start[:-1] if one <= query)
        stop = start[start.index(first) + 1]
        for key in range(rows):
            sees = plan.pattern.sees(
                query - first, key - first, head=head, kv_heads=plan.sizes.kv_heads, causal=plan.causal
            ) if first <= key < stop else 0  # fmt: skip
            assert dense[query][key] == sees
    found = ask("matrix", settings, top=1, left=2, cell=cell, count=9, head=head)
    for line, (a, b) in zip(found["counts"], found["lines"], strict=True):
        for count, (c, d) in zip(line, found["columns"], strict=True):
            assert count == sum(sum(row[c:d]) for row in dense[a:b])
    branches = range(len(plan.pattern.branches(rows, plan.sizes.kv_heads)))
    parts = [ask("matrix", settings, top=1, left=2, cell=cell, count=9, head=head, branch=i) for i in branches]
    assert found["counts"] == [
        [sum(cells) for cells in zip(*lines, strict=True)]
        for lines in zip(*(part["counts"] for part in parts), strict=True)
    ]


@pytest.mark.parametrize("settings", CASES, ids=lambda case: str(case.get("pattern")))
def test_hops_together_are_the_plan(settings: dict[str, Any]) -> None:
    plan = ExplorerSettings.of(settings).ring
    hops = [ask("hop", settings, number=0)]
    hops += [ask("hop", settings, number=number) for number in range(1, hops[0]["hops"])]
    for rank in range(plan.layout.ring_size):
        assert sum(hop["computed"][str(rank)]["pairs"] for hop in hops) == plan.work(rank)
        moves = [move for hop in hops for move in (*hop["moves"], *hop["heads"])]
        assert sum(move["bytes"] for move in moves if move["from"] == rank) == plan.bytes_sent(rank)
        assert sum(move["bytes"] for move in moves if move["to"] == rank) == plan.bytes_received(rank)


@pytest.mark.parametrize("settings", CASES, ids=lambda case: str(case.get("pattern")))
def test_messages_hold_rows_of_their_owner(settings: dict[str, Any]) -> None:
    plan = ExplorerSettings.of(settings).ring
    held = {
        rank: {row for span in plan.layout.spans(rank) for row in range(span.start, span.stop)}
        for rank in range(plan.layout.ring_size)
    }
    for number in range(ask("hop", settings, number=0)["hops"]):
        by_head = [ask("hop", settings, number=number, head=head)["moves"] for head in range(plan.sizes.kv_heads)]
        for moves in zip(*by_head, strict=True):
            rows = [range(*place) for move in moves for place in move["places"]]
            assert sum(map(len, rows)) == moves[0]["rows"]
            shard = moves[0]["owner"] - moves[0]["owner"] % plan.head_ranks
            owners = range(shard, shard + plan.head_ranks)
            assert {row for some in rows for row in some} <= set().union(*(held[owner] for owner in owners))


@pytest.mark.parametrize("settings", CASES, ids=lambda case: str(case.get("pattern")))
def test_every_row_is_held_once_and_keys_are_where_they_are_held(settings: dict[str, Any]) -> None:
    chosen = ExplorerSettings.of(settings)
    found = ask("holdings", settings)
    rows = [row for rank, start, stop in found["spans"] for row in range(start, stop)]
    assert rows == list(range(chosen.rows))
    owner = {row: rank for rank, start, stop in found["spans"] for row in range(start, stop)}
    for query in (0, chosen.rows // 2, chosen.rows - 1):
        seen = ask("keys", settings, query=query, head=0)
        keys = [owner[key] for first, stop, step in seen["keys"] for key in range(first, stop, step)]
        assert seen["rank"] == owner[query]
        assert seen["held"] == [[rank, keys.count(rank)] for rank in sorted(set(keys))]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("rows", "ranks"), [(64, 4), (61, 5), (7, 3), (16, 1), (12, 2)])
def test_a_plain_ring_is_the_plan_of_full_attention(layout: Any, rows: int, ranks: int) -> None:
    options: dict[str, Any] = dict(ring_size=ranks, layout=layout, heads=4, kv_heads=2, head_dim=8, dtype="bfloat16")
    plan, full = (rs.plan(pattern, rows, **options) for pattern in (rs.Window(2), rs.Full()))
    causal = rs.plan(rs.Full(), rows, causal=True, **options)
    for rank in range(ranks):
        found = plain_ring(plan, rank)
        assert found.sent == full.bytes_sent(rank)
        assert found.parcels == full.memory(rank).parcels
        assert found.work == full.work(rank)
        assert dense_work(causal, rank) == causal.work(rank)
        row = 2 * 2 * 8 * 2  # K and V of two KV heads
        assert all_gather(plan, rank).parcels == (rows - plan.layout.rows_of(rank)) * row


@pytest.mark.parametrize("settings", [*CASES, *(random_settings(seed) for seed in range(20))], ids=str)
def test_the_lines_of_python_give_the_numbers_shown(settings: dict[str, Any]) -> None:
    chosen, refusal = ExplorerSettings.of(settings), refusal_of(settings)
    if refusal:
        assert json.loads(answer(json.dumps({"view": "overview", "settings": settings}))) == {"error": refusal}
        return
    names: dict[str, Any] = {}
    exec(ask("overview", settings)["python"], names)
    assert names["plan"] == chosen.ring
    shown = ask("costs", settings, ranks=list(chosen.ring.sample))["ranks"]
    for name in ("work", "sent", "memory"):
        assert {rank["rank"]: rank[name] for rank in shown} == names[name]


@pytest.mark.parametrize(
    ("settings", "stem"),
    [
        (dict(pattern="8x0"), r"dilation_rates\[0\]=0"),
        (dict(pattern="sideways"), "'sideways' must be full"),
        (dict(tokens="many"), "tokens: 'many': must be a whole number"),
        (dict(ranks="0"), "ranks: '0': must be a whole number of at least 1"),
        (dict(heads="5", kv_heads="2"), "heads=5, kv_heads=2"),
        (dict(layout="spiral"), "layout='spiral'"),
        (dict(routing="mail"), "routing='mail'"),
        (dict(dtype="int3"), "dtype='int3'"),
        (dict(order="hilbert", grid="8x0"), "grid: '0'"),
        (dict(order="random"), "order='random'"),
        (dict(lengths="3,x"), "lengths: 'x'"),
        (dict(colour="red"), "colour='red': must be one of the settings"),
        (dict(head_ranks="3"), "head_ranks=3, but the ring has 4 ranks"),
        (dict(head_ranks="4", heads="6", kv_heads="6"), "6 query heads over 4 head ranks"),
        (dict(optimize="always"), "optimize='always'"),
        (dict(lengths="1*1e15"), "too large for the page"),
    ],
)
def test_impossible_settings_are_answered_with_the_error(settings: dict[str, Any], stem: str) -> None:
    found = json.loads(answer(json.dumps({"view": "overview", "settings": settings})))
    assert list(found) == ["error"]
    with pytest.raises(ValueError, match=stem):
        raise ValueError(found["error"])


def test_the_archive_runs_alone_and_without_torch(tmp_path: Path) -> None:
    write_modules(tmp_path / "ringspan.zip")
    script = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1])\n"
        "from ringspan.tools.explorer import views\n"
        "import ringspan, json; assert sys.argv[1] in ringspan.__file__\n"
        f"for settings in {CASES!r}:\n"
        "    arguments = dict(overview={}, holdings={}, costs={}, hop=dict(number=0), keys=dict(query=1, head=0),\n"
        "        matrix=dict(top=0, left=0, cell=1, count=8, head=0), grid=dict(query=1, head=0))\n"
        "    for view, more in arguments.items():\n"
        "        found = json.loads(views.answer(json.dumps(dict(view=view, settings=settings, **more))))\n"
        "        assert 'error' not in found, found\n"
        "print(sorted(arguments))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, str(tmp_path / "ringspan.zip")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(sorted(VIEWS))


def test_equal_sources_give_equal_archives(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_modules(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
