"""Reports from trials with known values: tables, pictures, Markdown and HTML."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import ringspan as rs
from benchmarks.results import QUICK_SCALE, SUITE, make_results_page, results_parts
from benchmarks.suite import write_docs
from ringspan.tools.bench import report
from ringspan.tools.bench.cases import BenchCase
from ringspan.tools.bench.ladder import TrialStore, run_cases
from ringspan.tools.bench.report import idle_rings, terminal_tables
from ringspan.tools.bench.summaries import summarize
from ringspan.tools.bench.trials import Trial, TrialLimits
from ringspan.tools.pages import Page, Picture, Table, rich_table
from tests.tools.bench.examples import ROOMY, case, measured


def cells_of(page: Page, title: str) -> list[list[str]]:
    (table,) = [part for part in page.parts if isinstance(part, Table) and part.title == title]
    breakable = str.maketrans({"\N{NO-BREAK SPACE}": " ", "\N{NON-BREAKING HYPHEN}": "-"})
    return [[cell.translate(breakable) for cell in row] for row in table.rows]


def test_the_report_of_a_run(tmp_path: Path) -> None:
    trials = [
        *(measured(case(ranks=ranks), number, seconds=4.0 / ranks) for ranks in (1, 2) for number in (1, 2)),
        Trial(case("all_gather", ranks=2, full=True), 1, "out of memory", ROOMY, "rank 1 needed more"),
        Trial(case("all_gather", tokens=512, ranks=2, full=True), 1, "not tried", ROOMY, "256 tokens: out of memory"),
    ]
    page = report.make_page(trials, "ringspan bench")
    assert page.sentence == (
        "256 tokens (64x1,256x4, causal, 2 heads of 16, float32), forward and backward, in 2.00 s on 2 processes, "
        "2.00 times the speed of one process, with 1 MiB on the largest rank. A token reaches all 256 tokens; branches "
        "of 256 rows cross ranks."
    )
    speed = cells_of(page, "Speed")
    assert speed[2] == [
        "ringspan", "dilated", "256", "2", "0.500 s (0.500 - 0.500)", "1.50 s (1.50 - 1.50)", "2.00 s (2.00 - 2.00)",
        "128", "2.00 x (2.00 - 2.00)", "0.00", "2",
    ]  # fmt: skip
    (failure,) = cells_of(page, "What did not run, and why")[1:]
    assert failure == [
        "all-gather", "full", "2", "256; 1 longer not tried", "out of memory", "rank 1 needed more"
    ]  # fmt: skip
    paths = report.write_report(page, {"trials": []}, tmp_path)
    html = paths["html"].read_text()
    assert "data:image/svg+xml;base64," in html
    assert "http" not in html.replace("http-equiv", "")
    assert (tmp_path / "figures/throughput.png").stat().st_size > 10_000
    assert "(figures/memory.png)" in paths["markdown"].read_text()


def test_a_report_of_failures_only() -> None:
    page = report.make_page(
        [Trial(case(), 1, "refused", ROOMY, "planned to need 9 MiB; 1 MiB allowed")], "ringspan bench"
    )
    assert page.sentence == "Nothing was measured. The last table gives the reasons."
    assert cells_of(page, "What did not run, and why")[1][-2:] == [
        "refused",
        "planned to need 9 MiB; 1 MiB allowed",
    ]


def disturbed_report(*, rounds: int, disturbed: int) -> Page:
    """One process and two. Other programs keep half a core busy in the disturbed rounds, which take twice as long."""
    trials = [
        measured(case(ranks=ranks), number, (8.0 if number <= disturbed else 4.0) / ranks, foreign=0.5)
        if number <= disturbed
        else measured(case(ranks=ranks), number, 4.0 / ranks)
        for ranks in (1, 2)
        for number in range(1, rounds + 1)
    ]
    return report.make_page(trials, "ringspan bench")


def test_disturbed_times_are_marked_and_never_headlined(tmp_path: Path) -> None:
    page = disturbed_report(rounds=3, disturbed=3)
    assert " s on 2 processes" not in page.sentence
    assert "times the speed" not in page.sentence
    assert "all times are marked" in page.sentence
    for row in cells_of(page, "Speed")[1:]:
        times = [*row[4:8], *filter(None, row[8:9])]
        assert all(cell.endswith("†") for cell in times), row
        assert row[-1] == "3 (3 disturbed)"
    assert cells_of(page, "Longest length")[1][4].endswith("†")
    (throughput,) = [part for part in page.parts if isinstance(part, Picture) and part.name == "throughput"]
    labels = throughput.figure.axes[0].get_legend_handles_labels()[1]
    assert labels.count("disturbed by other programs") == 1
    assert "†" in report.write_report(page, {}, tmp_path)["html"].read_text()
    trials = [measured(case(ranks=ranks), 1, 8.0, foreign=0.5) for ranks in (1, 2)]
    (terminal,) = terminal_tables(summarize(trials))
    assert all(cell.endswith("†") for cell in terminal.rows[2][2:6])


def test_disturbed_rounds_do_not_count_if_there_are_others() -> None:
    page = disturbed_report(rounds=3, disturbed=1)
    assert "in 2.00 s on 2 processes, 2.00 times the speed of one process" in page.sentence
    one, two = cells_of(page, "Speed")[1:]
    assert (one[6], two[6]) == ("4.00 s (4.00 - 4.00)", "2.00 s (2.00 - 2.00)")
    assert (two[8], two[-1]) == ("2.00 x (2.00 - 2.00)", "3 (1 disturbed)")
    (throughput,) = [part for part in page.parts if isinstance(part, Picture) and part.name == "throughput"]
    assert "disturbed by other programs" not in throughput.figure.axes[0].get_legend_handles_labels()[1]


def test_speed_up_needs_a_round_that_is_undisturbed_on_both_sides() -> None:
    trials = [
        measured(case(ranks=1), 1, 9.0, foreign=0.5),
        measured(case(ranks=1), 2, 4.0),
        measured(case(ranks=2), 1, 2.0),
        measured(case(ranks=2), 2, 3.0, foreign=0.5),
    ]
    page = report.make_page(trials, "ringspan bench")
    assert "in 2.00 s on 2 processes, with" in page.sentence
    assert "speed-ups are marked" in page.sentence
    assert cells_of(page, "Speed")[2][8].endswith("†")


def test_a_ring_that_sends_nothing_is_named() -> None:
    short = replace(case(tokens=1024, ranks=2), pattern=rs.Dilated((64, 256), (1, 4)))
    page = report.make_page([replace(measured(short), sent_bytes=(0, 0))], "ringspan bench")
    assert "nothing sent by the busiest. No branch crosses ranks, so nothing is sent" in page.sentence
    assert cells_of(page, "Reach and bytes sent")[1] == [
        "64x1,256x4", "1,024", "2", "contiguous", "256", "none", "nothing", "0.0 MiB"
    ]  # fmt: skip
    (sentence,) = idle_rings(summarize([measured(short)]))
    assert sentence.startswith("1,024 tokens on 2 ranks: No branch crosses ranks")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, Path]:
    """The suite `results` with known values: time and memory are proportional to tokens / ranks; masks do not fit."""

    def answer(what: BenchCase, number: int, limits: TrialLimits, threads: int) -> Trial:
        if what.implementation == "sdpa_mask":
            return Trial(what, number, "out of memory", limits, "rank 0 needed more")
        share = what.tokens / what.ranks
        found = measured(what, number, share / 100, peak=int(share * 2**14))
        return replace(found, limits=limits, sent_bytes=(3 * 2**20,) * what.ranks if what.ranks > 1 else ())

    root = tmp_path_factory.mktemp("suite")
    store = TrialStore(root / "trials.jsonl", threads=1)
    parts = results_parts(replace(QUICK_SCALE, memory_bytes=2**33))
    trials = {part.name: list(run_cases(part.cases, part.settings, store, run=answer)) for part in parts}
    page = make_results_page(trials, QUICK_SCALE, "a machine")
    write_docs(page, root, SUITE.page)
    return page, root


def test_the_results_page_has_every_table(suite: tuple[Page, Path]) -> None:
    _, root = suite
    text = (root / "docs/results.md").read_text()
    for title in (
        "Memory by ring size",
        "One process against two",
        "Longest sequence and throughput",
        "Forward and backward at 512 tokens",
        "4,096 tokens",
        "What did not run, and why",
    ):
        assert f"## {title}\n" in text
    for name in ("memory", "two", "longest"):
        assert f"(figures/results_{name}.png)" in text
        assert (root / f"docs/figures/results_{name}.png").stat().st_size > 10_000


def test_the_results_page_shows_the_measured_values(suite: tuple[Page, Path]) -> None:
    page, _ = suite
    memory = cells_of(page, "Memory by ring size")
    full = [row for row in memory if row[:3] == ["512", "full", "2"]]
    assert [*full[0][4:7], full[0][8]] == ["4 MiB"] * 4  # between them: one that may not be installed
    two = cells_of(page, "One process against two")
    ours = [row for row in two if row[:3] == ["512", "dilated", "ringspan"]]
    assert ours[0][7:10] == ["5.12 s", "2.56 s", "2.00 x"]
    long = cells_of(page, "4,096 tokens")
    assert [row[:2] + row[4:8] for row in long[1:]] == [
        ["float32", "1", "41.0 s", "100", "", ""],
        ["float32", "2", "20.5 s", "200", "2.00 x", "3.0 MiB"],
    ]
    assert page.sentence.startswith(
        "4,096 tokens (64x1,256x4,1024x16,4096x64, causal), forward and backward, in 20.5 s on 2 processes, 2.00 times "
        "the speed of one process, with 32 MiB on the largest rank and 3.0 MiB sent by the busiest. A token reaches "
        "all 4,096 tokens; branches of 4,096 rows cross ranks. All trials run"
    )
    setting = {row[0]: row[1] for row in cells_of(page, "How it was measured")}
    assert "256 tokens 64x1,256x4; 512 tokens 64x1,256x4,512x8" in setting["dilated"]
    assert setting["measured"].startswith("dilated: ")
    one = cells_of(page, "Forward and backward at 512 tokens")
    assert ["dilated", "1", "torch SDPA with a mask", "out of memory"] in [row[:4] for row in one]


def test_parts_share_their_trials(suite: tuple[Page, Path]) -> None:
    """A case that two tables show is measured once."""
    store = TrialStore(suite[1] / "trials.jsonl", threads=1)
    lines = (suite[1] / "trials.jsonl").read_text().splitlines()
    assert len(lines) == len(store)


def test_tables_print_brackets_literally() -> None:
    remedy = "ring_attention_pytorch is not installed: pip install 'ringspan[peers]'"
    table = Table("missing", [["reason"], [remedy]])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(rich_table(table))
    assert remedy in console.export_text()
