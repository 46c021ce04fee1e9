"""`ringspan plan`: it reports the numbers of `rs.plan`, is quick, and imports torch only to measure or draw."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
import torch
from typer.testing import CliRunner

import ringspan as rs
from ringspan.cli.app import app
from ringspan.geometry import Documents
from ringspan.layout import Layout
from ringspan.planning import plan_rank
from ringspan.planning.breakeven import break_even, speedup
from ringspan.planning.timing import ASSUMED_RATES, rank_times, ring_time
from tests.traces import read_trace

PATTERN = rs.Dilated((2048, 8192, 32768), (1, 4, 16))
SHORT = ["--pattern", "2048x1,8192x4,32768x16"]
HUGE = ["--tokens", "1e9", "--ranks", "10000", "--rank", "17"]


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def run_json(*arguments: str) -> dict:  # type: ignore[type-arg]
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_windows_report_their_halo() -> None:
    """A rank receives the rows before its own: 1,023 of each KV head, on a zigzag ring for each of its two spans."""
    found = run_json("--pattern", "window 1023", "--tokens", "64k", "--kv-heads", "2", "--no-measure")
    ranks = {name: layout["ranks"] for name, layout in found["layouts"].items()}
    assert [rank["halo_rows"] for rank in ranks["contiguous"]] == [0, 1023, 1023, 1023]
    assert [rank["halo_rows"] for rank in ranks["zigzag"]] == [1023, 2046, 2046, 1023]
    assert ranks["contiguous"][0]["sent_forward"] == 1023 * 2 * 2 * 64 * 4
    assert found["advice"]["layout"] == "contiguous"
    page = run("--pattern", "window 1023", "--tokens", "64k", "--no-measure")
    assert "halo rows received" in page
    assert "reaches at most 1,024 of 65,536 tokens; branches of 1,024 rows cross ranks." in page
    assert "halo" not in run("--tokens", "64k", "--no-measure")


def test_a_sum_of_patterns_with_counts_like_32k(tmp_path: Path) -> None:
    pattern = "Window 511 right 1k dilation 2 + 4k x4, 64k x64 blocked"
    found = run_json("--pattern", pattern, "--tokens", "256k", "--no-measure", "--draw", str(tmp_path))
    assert found["pattern"] == "window 511 right 1024 dilation 2 + 4096x4,65536x64 blocked"
    plan = rs.plan(
        rs.Window(511, 1024, 2) + rs.Dilated((4096, 65536), (4, 64), "blocked"), 2**18, ring_size=4, causal=True
    )
    zigzag = found["layouts"]["zigzag"]["ranks"]
    assert [rank["sent_forward"] for rank in zigzag] == [plan.bytes_sent(rank) for rank in range(4)]
    assert [rank["halo_rows"] for rank in zigzag] == [510, 1020, 1020, 510], "only rows of the window"
    assert len(found["pictures"]) == 10


def test_a_predicted_trace_takes_the_time_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    page = run("--tokens", "32k", "--layout", "zigzag", "--no-measure", "--trace", str(path))
    assert f"Trace: {path}" in page
    found = read_trace(path)
    plan = rs.plan(PATTERN, 32768, ring_size=4, layout="zigzag", causal=True)
    plan = replace(plan, costs=ASSUMED_RATES.costs)
    assert found.names == {rank: f"rank {rank} (predicted)" for rank in range(4)}
    for rank, spent in rank_times(plan, ASSUMED_RATES).items():
        work, waits = found.spans(rank, "compute", "forward"), found.spans(rank, "compute", "wait")
        work += found.spans(rank, "compute", "backward")
        assert sum(e["dur"] for e in work) / 1e6 == pytest.approx(spent.work, abs=1e-9 * len(work))
        assert sum(e["dur"] for e in waits) / 1e6 == pytest.approx(spent.waiting + spent.latency, abs=1e-9 * len(waits))
        assert max(e["ts"] + e["dur"] for e in work + waits) / 1e6 == pytest.approx(spent.total, abs=1e-8)
        assert sum(e["args"]["pairs"] for e in work) == 2 * plan.work(rank)
        sent = sum(e["args"]["bytes"] for e in found.spans(rank, "sends"))
        assert sent == plan.bytes_sent(rank) + plan.bytes_sent(rank, backward=True)
    alone = tmp_path / "alone.json"
    run(*HUGE, "--no-measure", "--trace", str(alone))
    assert {e["pid"] for e in read_trace(alone, whole=False).events} == {17}
    assert "--trace" in run("--no-measure", "--trace", "/dev/null/trace.json", status=2)


@pytest.mark.parametrize("options", [(), ("--no-causal", "--routing", "direct", "--batch", "2", "--dtype", "bfloat16")])
def test_numbers_are_those_of_the_plan(options: tuple[str, ...]) -> None:
    found = run_json("--no-measure", "--kv-heads", "2", "--tokens", "32k", *options)
    for layout in ("contiguous", "zigzag"):
        plan = rs.plan(
            PATTERN,
            32768,
            ring_size=4,
            layout=layout,  # type: ignore[arg-type]
            causal=not options,
            routing="direct" if options else "relay",
            kv_heads=2,
            batch=2 if options else 1,
            dtype=torch.bfloat16 if options else torch.float32,
            device="cuda",
        )
        ranks = found["layouts"][layout]["ranks"]
        assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
        for rank in ranks:
            i = rank["rank"]
            assert rank["rows"] == plan.rank(i).rows
            assert rank["tiles"] == len(plan.rank(i).tiles)
            assert rank["sent_forward"] == plan.bytes_sent(i)
            assert rank["sent_backward"] == plan.bytes_sent(i, backward=True)
            assert rank["work"] == plan.work(i)
            assert rank["memory_forward"]["rows"] == plan.memory(i).rows
            assert rank["memory_backward"]["parcels"] == plan.memory(i, backward=True).parcels
        assert sum(rank["share"] for rank in ranks) == pytest.approx(4)
    dtype = torch.bfloat16 if options else torch.float32
    advice = rs.best_layout(PATTERN, 32768, 4, causal=not options, kv_heads=2, dtype=dtype)
    assert found["advice"]["layout"] == advice.layout


def test_terminal_output() -> None:
    page = run("--no-measure", "--tokens", "32k")
    assert "32,768 tokens over 4 ranks, 2048x1,8192x4,32768x16, causal, 8 heads of 64, float32" in page
    for line in (
        "tiles",
        "hops",
        "parcels received",
        "sent forward, MiB",
        "work, 1 = even share",
        "memory backward",
    ):
        assert line in page
    assert "contiguous: each rank" in page
    assert "zigzag: each rank" in page
    assert f"Layout: {rs.best_layout(PATTERN, 32768, 4, causal=True)}." in page


def test_a_sample_of_a_large_ring_is_shown() -> None:
    page = run("--no-measure", "--tokens", "1M", "--ranks", "100", "--layout", "contiguous")
    assert "64 ranks, an even sample of 100" in page
    for place in ("0 first", " middle", "99 last", "busiest"):
        assert place in page
    assert "Layout:" not in page, "a single layout needs no comparison"


def test_one_rank_of_ten_thousand_is_planned_alone() -> None:
    plan_rank.cache_clear()
    page = run(*HUGE, "--no-measure")
    assert "Rank 17 of 10,000" in page
    assert plan_rank.cache_info().misses <= 3, "the rank under both layouts, and the work of one device"
    plan_rank.cache_clear()
    found = run_json(*HUGE, *SHORT, "--flops", "1e14", "--bandwidth", "25e9")
    assert found["break_even"]["contiguous"]["pays"]
    assert plan_rank.cache_info().misses < 400


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_rank_of_ten_thousand_is_planned_in_milliseconds(layout: str) -> None:
    whole = Layout(layout, 10**9, 10_000)  # type: ignore[arg-type]
    spent = []
    for rank in (0, 17, 5000, 9999):
        plan_rank.cache_clear()
        start = time.process_time()
        plan_rank(PATTERN, Documents((10**9,)), whole, rank, 8, True)
        spent.append(time.process_time() - start)
    assert max(spent) < 2  # milliseconds; hours, if it grew with the length or the ring


def test_break_even_is_that_of_the_model() -> None:
    found = run_json("--tokens", "64k", *SHORT, "--flops", "1e14", "--bandwidth", "25e9")
    rates = replace(ASSUMED_RATES, flops=1e14, bandwidth=25e9)
    assert found["rates"]["sources"] == {"flops": "given", "bandwidth": "given", "latency": "assumed"}
    for layout, answer in found["break_even"].items():
        plan = rs.plan(PATTERN, 65536, ring_size=4, layout=layout, causal=True, device="cuda")
        assert answer["length"] == break_even(plan, rates).length
        assert answer["speedup_at_tokens"] == pytest.approx(speedup(plan, rates))


def test_break_even_is_one_sentence() -> None:
    page = run("--flops", "1e14", "--bandwidth", "25e9", "--latency", "1e-5")
    assert "a ring of 4 is faster than one device from about" in page
    assert "1e+05 GFLOP/s per device (given), 25 GB/s (given), 10 µs per hop (given)" in page
    hopeless = run("--pattern", "2048x64", "--flops", "1e15", "--bandwidth", "1", "--latency", "0", "--ranks", "3")
    assert "a ring of 3 is never faster than one device up to 1,073,741,823 tokens" in hopeless
    assert "for parcels" in hopeless
    assert "a ring of" not in run("--ranks", "1", "--flops", "1e14", "--bandwidth", "25e9")


def test_two_kinds_of_links() -> None:
    nodes = ["--pattern", "full", "--ranks", "8", "--ranks-per-node", "4", "--flops", "1e14", "--bandwidth", "2e11"]
    found = run_json(*nodes, "--node-bandwidth", "5e9", "--no-measure")
    rates = replace(ASSUMED_RATES, flops=1e14, bandwidth=2e11, node_bandwidth=5e9)
    assert found["rates"]["node_bandwidth"] == 5e9
    layout = found["advice"]["layout"]
    for routing in ("relay", "direct", rs.ByNode(4)):
        plan = rs.plan(rs.Full(), 2**17, ring_size=8, layout=layout, causal=True, routing=routing, device="cuda")  # type: ignore[arg-type]
        assert found["routings"][str(routing)]["total"] == pytest.approx(ring_time(plan, rates, 4).total)
    page = run(*nodes, "--node-bandwidth", "5e9", "--no-measure", "--routing", "by-node")
    assert "routing: relay by nodes of 4" in page
    assert "Routing between nodes, by the time in the model: relay by nodes of 4" in page
    assert "5 GB/s between nodes (given)" in page
    assert run_json("--no-measure")["routings"] == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--node-bandwidth", "1e9"], "--ranks-per-node"),
        (["--ranks", "6", "--ranks-per-node", "4"], "must divide the 6 ranks"),
        (["--routing", "by-node"], "add --ranks-per-node"),
        (["--ranks-per-node", "2", "--node-bandwidth", "0"], "node_bandwidth=0.0"),
    ],
)
def test_bad_nodes(arguments: list[str], words: str) -> None:
    assert words in run("--no-measure", *arguments, status=2)


def test_missing_rates_are_measured_here() -> None:
    found = run_json("--tokens", "4k", "--ranks", "2")
    rates, sources = found["rates"], found["rates"]["sources"]
    assert all("measured here" in source for source in sources.values())
    assert 1e8 < rates["flops"] < 1e13
    assert 1e6 < rates["bandwidth"] < 1e12
    assert 1e-7 < rates["latency"] < 1


def test_figures_are_written(tmp_path: Path) -> None:
    found = run_json("--no-measure", "--tokens", "32k", "--draw", str(tmp_path / "pictures"))
    stems = ["who_sees_what"]
    stems += [f"{what}_{layout}" for layout in ("contiguous", "zigzag") for what in ("who_computes_what", "schedule")]
    assert sorted(Path(path).name for path in found["pictures"]) == sorted(
        f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")
    )
    for path in map(Path, found["pictures"]):
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["plan", "--help"], ["plan", "--no-measure"], ["plan", "--flops", "1e14", "--bandwidth", "25e9"]],
    ids=" ".join,
)
def test_torch_is_not_imported(arguments: list[str]) -> None:
    script = f"""
import sys
from ringspan.cli.app import app
try:
    app({arguments!r}, prog_name="ringspan")
except SystemExit as end:
    assert not end.code, end.code
heavy = {{"torch", "matplotlib", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = child("-c", script)
    assert done.returncode == 0, done.stderr


def cpu_seconds(*arguments: str) -> float:
    """CPU time of a Python process: the least of three."""
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert child(*arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent)


@pytest.mark.parametrize(
    ("arguments", "imports"), [(["--help"], "rich, typer"), (["doctor", "--help"], "rich, torch, typer")], ids=str
)
def test_help_takes_little_cpu_time(arguments: list[str], imports: str) -> None:
    """Compared with the imports that it needs, so that a slow machine does not matter."""
    assert cpu_seconds("-m", "ringspan", *arguments) < 3 * cpu_seconds("-c", f"import {imports}")


def test_ctrl_c_ends_everything_quietly() -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "ringspan", "plan"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    me = psutil.Process(command.pid)
    while command.poll() is None and len(me.children()) < 2:
        time.sleep(0.05)
    assert command.poll() is None, command.communicate()
    workers = me.children(recursive=True)
    assert len(workers) >= 2, "no measuring process was started"
    os.killpg(command.pid, signal.SIGINT)  # to all processes, as a terminal does
    _, errors = command.communicate()
    assert command.returncode == 130
    assert "Interrupted." in errors
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not alive
