"""`ringspan rehearse`: figures under what they are, one document, and answers to what cannot be."""

import json

import pytest
from typer.testing import CliRunner

from ringspan.cli.app import app
from tests.ranks import starts_processes

pytestmark = starts_processes

SMALL = ["--tokens", "64k", "--heads", "2", "--dim", "16", "--threads", "1"]


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["rehearse", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def test_a_page_for_people() -> None:
    page = " ".join(run(*SMALL, "--ranks", "128", "--rank", "17").split())
    for words in (
        "65,536 tokens over 128 ranks",
        "17 (asked for)",
        "A token reaches all 65,536 tokens; segments of 2,048, 8,192, 32,768, 65,536 cross ranks.",
        "Measured here: work and memory. Counted: bytes, exactly those of the plan.",
        "Computed: waiting, at 25 GB/s and 20 µs a hop.",
        "Extrapolated: a step of all 128 ranks takes",
    ):
        assert words in page


def test_one_document() -> None:
    result = CliRunner().invoke(
        app,
        ["rehearse", *SMALL, "--ranks", "16", "--backward", "--ranks-per-node", "4", "--routing", "nodes", "--json"],
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "4", "--rank", "4"], "4: must lie in 0 .. 3"),
        (["--tokens", "1e12", "--ranks", "2"], "a rank needs"),
        (["--routing", "nodes"], "--routing nodes needs to know them: give --ranks-per-node"),
        (["--routing", "thrown"], "routing='thrown': must be 'relay' or 'direct', or ByNode"),
        (["--bandwidth", "0"], "bandwidth=0.0: a rate is more than 0"),
        (["--layout", "round"], "layout='round'"),
        (["--dtype", "int8"], "'int8': must be"),
    ],
)
def test_bad_values_are_answered(arguments: list[str], words: str) -> None:
    answer = " ".join(run(*arguments, status=2).replace("│", " ").split())
    assert words in answer
