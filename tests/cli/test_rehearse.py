"""`ringspan rehearse`: the page, the JSON document, and errors for invalid values."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringspan.cli.app import app
from tests.ranks import shares_processes
from tests.traces import read_trace

pytestmark = shares_processes(__name__)

SMALL = ["--tokens", "64k", "--heads", "2", "--head-dim", "16", "--threads", "1"]


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["rehearse", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def test_the_page() -> None:
    page = " ".join(run(*SMALL, "--ranks", "128", "--rank", "17").split())
    for words in (
        "65,536 tokens over 128 ranks",
        "17 (requested)",
        "A token reaches all 65,536 tokens; branches of 2,048, 8,192, 32,768, 65,536 rows cross ranks.",
        "which equal the plan",
        "at 25 GB/s and 20 µs per hop",
        "Extrapolated: a step of 128",
    ):
        assert words in page


def test_the_json_document_and_a_trace(tmp_path: Path) -> None:
    slow = ["--bandwidth", "1e8", "--node-bandwidth", "4e7", "--ranks-per-node", "4", "--routing", "by-node"]
    path = tmp_path / "trace.json"
    result = CliRunner().invoke(
        app, ["rehearse", *SMALL, "--ranks", "16", "--backward", *slow, "--json", "--trace", str(path)]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["routing"] == "relay by nodes of 4"
    assert found["bytes_as_planned"] is True
    reasons = ", ".join(rank["reason"] for rank in found["rehearsed"])
    assert all(word in reasons for word in ("first", "middle", "last", "worst"))
    for rank in found["rehearsed"]:
        assert rank["measured"]["working_seconds"] > 0
        assert rank["computed"]["waiting_seconds"] >= 0
        assert rank["counted"].keys() == {"forward", "backward"}
    slowest = max(r["measured"]["working_seconds"] + r["computed"]["waiting_seconds"] for r in found["rehearsed"])
    assert found["extrapolated"]["step_seconds"] >= slowest
    trace = read_trace(path, whole=False)
    assert trace.names == {rank["rank"]: f"rank {rank['rank']} (rehearsed)" for rank in found["rehearsed"]}
    for rank in found["rehearsed"]:
        spans, number = trace.spans(rank["rank"]), rank["rank"]
        waited = sum(e["dur"] for e in spans if e["name"].startswith("wait")) / 1e6
        assert waited >= rank["computed"]["waiting_seconds"] > 0
        worked = sum(e["dur"] for e in spans if e["name"].startswith("tile")) / 1e6
        assert 0 < worked <= rank["measured"]["working_seconds"]
        passes = [e["dur"] for e in spans if e["name"] in ("forward", "backward")]
        assert sum(passes) / 1e6 <= rank["measured"]["working_seconds"] + rank["computed"]["waiting_seconds"] + 1e-6
        sent = sum(counted["bytes_sent"] for counted in rank["counted"].values())
        assert sum(e["args"]["bytes"] for e in trace.spans(number, "sends")) == sent


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "4", "--rank", "4"], "4: must be in 0 .. 3"),
        (["--tokens", "1e12", "--ranks", "2"], "a rank needs"),
        (["--routing", "by-node"], "--ranks-per-node"),
        (["--routing", "thrown"], "routing='thrown'"),
        (["--bandwidth", "0"], "bandwidth=0.0: must be positive"),
        (["--layout", "round"], "layout='round'"),
        (["--dtype", "int8"], "'int8': must be"),
    ],
)
def test_invalid_values_raise(arguments: list[str], words: str) -> None:
    answer = " ".join(run(*arguments, status=2).replace("│", " ").split())
    assert words in answer
