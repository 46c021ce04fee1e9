"""What `ringspan plan` claims: patterns that span the sequence, one recommended layout, and figures of the plan."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ringspan as rs
from ringspan.cli.app import app
from ringspan.planning.breakeven import speedup
from ringspan.planning.timing import ASSUMED_RATES, ring_time

CLUSTER = ["--flops", "1e14", "--bandwidth", "25e9"]
RATES = replace(ASSUMED_RATES, flops=1e14, bandwidth=25e9, latency=20e-6)
BORDERED = ["--tokens", "1M", "--ranks", "8", "--pattern", "2048x1,8192x4,32768x16", "--no-measure"]


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return " ".join(result.output.replace("│", " ").split())


def run_json(*arguments: str) -> dict:  # type: ignore[type-arg]
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_the_default_pattern_spans_the_sequence_and_uses_the_ring() -> None:
    found = run_json("--tokens", "1M", "--ranks", "8", "--no-measure")
    assert found["pattern"].endswith(",1048576x512")
    for layout in found["layouts"].values():
        assert sum(rank["sent_forward"] for rank in layout["ranks"]) > 0
        assert layout["reach"]["longest"] == 2**20
        assert layout["reach"]["crossing"][-1] == 2**20
    page = run("--tokens", "1M", "--ranks", "8", "--no-measure")
    assert "A token reaches all 1,048,576 tokens" in page


def test_output_says_when_no_segment_crosses_ranks() -> None:
    page = run(*BORDERED)
    assert "No branch crosses ranks, so nothing is sent" in page
    assert "a token reaches at most 32,768 of 1,048,576 tokens" in page
    found = run_json(*BORDERED)
    assert [layout["reach"]["crossing"] for layout in found["layouts"].values()] == [[], []]


def test_reach_is_exact_for_the_layout() -> None:
    """A segment as long as a shard fits a contiguous span, and is cut where a rank holds two."""
    found = run_json("--tokens", "1M", "--ranks", "8", "--pattern", "131072x1", "--no-measure")
    crossing = {name: layout["reach"]["crossing"] for name, layout in found["layouts"].items()}
    assert crossing == {"contiguous": [], "zigzag": [131072]}


@pytest.mark.parametrize(("pattern", "tokens", "ranks"), [("full", "1M", 8), ("2048x1,8192x4,32768x16", "32k", 4)])
def test_one_recommendation_with_the_numbers_of_that_layout(pattern: str, tokens: str, ranks: int) -> None:
    setting = ["--pattern", pattern, "--tokens", tokens, "--ranks", str(ranks), *CLUSTER]
    found = run_json(*setting)
    kind = rs.Full() if pattern == "full" else rs.Dilated((2048, 8192, 32768), (1, 4, 16))
    plans = {
        name: rs.plan(kind, found["tokens"], ring_size=ranks, layout=name, causal=True, device="cuda")  # type: ignore[arg-type]
        for name in ("contiguous", "zigzag")
    }
    fastest = min(plans, key=lambda name: ring_time(plans[name], RATES).total)
    assert found["advice"]["layout"] == fastest
    assert rs.best_layout(kind, found["tokens"], ranks, causal=True, rates=RATES).layout == fastest
    assert list(found["break_even"]) == [fastest]
    assert found["break_even"][fastest]["speedup_at_tokens"] == pytest.approx(speedup(plans[fastest], RATES))
    page = run(*setting)
    (advised,) = re.findall(r"Layout: (\w+)", page)
    (timed,) = re.findall(r"as fast \((\w+)\)", page)
    assert advised == timed == fastest


def test_warns_of_unselected_rows_like_the_library() -> None:
    page = run("--pattern", "2048x2,8192x4", "--no-measure")
    assert "selects row 0 of KV head 1" in page
    (warning,) = run_json("--pattern", "2048x2,8192x4", "--no-measure")["warnings"]
    pattern = rs.Dilated((2048, 8192), (2, 4))
    with pytest.warns(UserWarning, match="selects row 0 of KV head 1") as caught:
        rs.attention(*torch.ones(3, 1, 9000, 8, 8), pattern=pattern)
    assert str(caught[0].message) == warning
    assert run_json("--no-measure")["warnings"] == []


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/null/pictures"])
def test_unwritable_figures_are_a_one_line_error(place: str) -> None:
    said = run("--no-measure", "--tokens", "4k", "--draw", place, status=2)
    assert "--draw" in said
    assert place in said
    assert "Traceback" not in said


def test_a_file_instead_of_the_figure_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    assert "taken" in run("--no-measure", "--tokens", "4k", "--draw", str(tmp_path / "taken"), status=2)


def test_the_docs_example_is_what_the_command_prints() -> None:
    page = (Path(__file__).parent.parent.parent / "docs/planning.md").read_text()
    command, example = re.search(r"`ringspan plan (.*?)` prints .*?```text\n(.*?)```", page, re.S).groups()  # type: ignore[union-attr]
    result = CliRunner().invoke(app, ["plan", *command.split()], env={"COLUMNS": "200"})
    printed = [line.rstrip() for line in result.output.splitlines()]
    assert [line for line in example.splitlines() if line not in printed] == []
