"""The benchmark of networks: its cases, its predictions, and what its page says of results."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import parse_rate, why_not
from benchmarks.networks import BEDS, HOSTS, broken, cells, measured_break_even, planned_break_even, report
from benchmarks.networks_ranks import LINKS, TOKENS, Case, cases, names
from benchmarks.suite import ROOT, Results
from ringspan.planning.cost import traffic
from tests.ranks import starts_processes

RATES = ("100mbit", "1gbit")
SMALL = {name: n // 8 for name, n in TOKENS.items()}


def stored(path: Path, slower: float = 1.0) -> Results:
    """Results in which every ring takes the time of its plan, times ``slower``, and waits for nothing."""
    results = Results(path)
    link = dict(bandwidth=1e9, latency=1e-4, copying=0.0)
    for bed, ranks_per_host in BEDS.items():
        results.add(bed, dict(inside=link, across=link), LINKS)
        for name in TOKENS:
            results.add(bed, dict(seconds=[0.05], flops=1e10, tokens=SMALL), f"alone, {name}")
        for item in names(ranks_per_host, RATES)[1 + len(TOKENS) :]:
            ranks = HOSTS * ranks_per_host
            value: dict[str, Any] = dict(seconds=[1.0], waits=[[[0.0, 0.0]] * ranks], sent=[[0, 0]], tokens=SMALL)
            results.add(bed, value | dict(rehearsed=[[1.0, 0.0, 0.0]] * ranks), item)
    for cell in cells(results):
        item, ranks = f"{cell.rate}, {cell.case}", HOSTS * cell.ranks_per_host
        found = cell.found | dict(seconds=[slower * cell.planned], rehearsed=[[cell.planned, 0.0, 0.0]] * ranks)
        results.add(f"{HOSTS} x {cell.ranks_per_host}", found | dict(sent=[[cell.sent()[1], 0]]), item)
    return results


def test_two_ranks_send_the_same_by_every_routing_and_four_do_not() -> None:
    case = Case("full", "zigzag", "relay")
    for ranks_per_host, different in ((1, 1), (2, 3)):
        plans = [
            replace(case, routing=name).plan(HOSTS, ranks_per_host, SMALL) for name in ("relay", "direct", "by node")
        ]
        sent = {(traffic(plan, ranks_per_host, backward=True).across, str(plan.rank(0).hops)) for plan in plans}
        assert len(sent) == different
    assert (len(cases(1)), len(cases(2))) == (4, 12)


def test_a_page_of_perfect_predictions(tmp_path: Path) -> None:
    results = stored(tmp_path / "networks.jsonl")
    assert broken(results) == ""
    page = report(results)
    assert "differ by 0% (median), at most 0%" in page.sentence
    tables = [part for part in page.parts if hasattr(part, "rows")]
    assert {len(table.rows) - 1 for table in tables} >= {len(RATES) * len(cases(n)) for n in BEDS.values()}


def test_a_wrong_prediction_breaks_the_promise(tmp_path: Path) -> None:
    found = broken(stored(tmp_path / "networks.jsonl", slower=1.3))
    assert "planned: -23% for 2 x 2, 1 Gbit/s, dilated, zigzag, by node" in found


def test_a_rank_that_waits_where_links_keep_up_breaks_the_promise(tmp_path: Path) -> None:
    results = stored(tmp_path / "networks.jsonl")
    kept = next(cell for cell in cells(results) if cell.ranks_per_host == 1 and cell.hidden[0].is_asked)
    assert kept.hidden[0].measured == 1
    waits = [[[kept.link_seconds[0] / 2, 0.0]] * 2]
    results.add("2 x 1", kept.found | dict(waits=waits), f"{kept.rate}, {kept.case}")
    assert f"50% hidden, planned {kept.hidden[0].planned:.0%}: forward of 2 x 1" in broken(results)


def test_break_even_rates(tmp_path: Path) -> None:
    cell = next(cell for cell in cells(stored(tmp_path / "networks.jsonl")) if cell.case.pattern == "full")
    fast = replace(cell.rates, node_bandwidth=parse_rate("10gbit") / 8)
    cell = replace(cell, alone=1.5 * cell.planned_at(fast))
    at = planned_break_even(cell)
    assert cell.planned_at(replace(fast, node_bandwidth=at / 8)) == pytest.approx(cell.alone, rel=1e-2)
    assert planned_break_even(replace(cell, alone=0.0)) == float("inf")
    # Linear in the time of a byte: 2 seconds at 100 Mbit/s, 0.2 at 1 Gbit/s, so 0.8 at 250 Mbit/s.
    curve = [
        replace(cell, rate=rate, alone=0.8, found=cell.found | dict(seconds=[seconds]))
        for rate, seconds in (("100mbit", 2.0), ("1gbit", 0.2))
    ]
    assert measured_break_even(curve) == "250 Mbit/s"
    assert measured_break_even([replace(one, alone=3.0) for one in curve]) == "below 100 Mbit/s"
    assert measured_break_even([replace(one, alone=0.1) for one in curve]) == "not up to 1 Gbit/s"


@starts_processes
@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"no test bed: {why_not()}")
def test_a_quick_run_measures_every_item(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "networks", "--quick", "--root", str(tmp_path)]
    (tmp_path / "docs").mkdir()
    subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)  # may miss its promises
    results = Results(tmp_path / "benchmarks/results/networks.jsonl")
    for bed, ranks_per_host in BEDS.items():
        assert list(results[bed]) == names(ranks_per_host, ("300mbit", "1gbit", "10gbit"))
    for cell in cells(results):
        sent, planned = cell.sent()
        assert 1 <= sent / planned < 1.1
        assert cell.measured > 0
