"""`ringspan stream`: a run with its spot check, resumed after an interruption, and its exit status."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringspan.cli.app import app
from ringspan.tools.demonstration import whole_sequence_pattern

SMALL = ["--tokens", "32k", "--heads", "2", "--head-dim", "8", "--anywhere", "200"]


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["stream", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def test_the_page_and_the_folder(tmp_path: Path) -> None:
    page = " ".join(run(*SMALL, "--out", str(tmp_path)).split())
    for words in (
        "32,768 tokens, 256x1,32768x128, causal, 2 heads of 8, float32:",
        "GiB of 4 GiB.",
        "sampled positions are right",
        "at most 1.50% of all positions are wrong",
    ):
        assert words in page
    result = json.loads((tmp_path / "result.json").read_text())
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["finished"] for line in log] == list(range(1, result["shards"] + 1))
    assert result["peak_bytes"] >= max(line["peak_bytes"] for line in log)


def test_the_json_document_and_the_same_checksum_again(tmp_path: Path) -> None:
    digests = []
    for folder in ("a", "a", "b"):
        result = CliRunner().invoke(app, ["stream", *SMALL, "--out", str(tmp_path / folder), "--json"])
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["proof"]["holds"] is True
        assert all(stratum["covered"] for stratum in found["proof"]["strata"])
        digests.append(found["digest"])
    assert len(set(digests)) == 1
    assert len((tmp_path / "a/log.jsonl").read_text().splitlines()) == found["shards"], "nothing was computed twice"


def test_a_wrong_result_fails(tmp_path: Path) -> None:
    """Change a kept value in the progress file: the page and the exit status must report it."""
    run(*SMALL, "--out", str(tmp_path))
    progress = tmp_path / "progress.jsonl"
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    kept = next(entry for line in lines[1:] for entry in line["record"]["kept"] if entry[0] == "out")
    kept[3][0][0] += 0.01
    progress.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "sampled positions are WRONG" in run(*SMALL, "--out", str(tmp_path), status=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "many"], "'many': must be a whole number"),
        (["--budget", "1k"], "budget_bytes=1,024"),
        (["--pattern", "2048"], "'2048'"),
        (["--heads", "3", "--kv-heads", "2"], "the KV heads must divide the query heads"),
    ],
)
def test_invalid_values_raise(tmp_path: Path, arguments: list[str], words: str) -> None:
    answer = " ".join(run(*arguments, "--out", str(tmp_path), status=2).replace("│", " ").split())
    assert words in answer


def test_default_patterns_select_256_rows_per_segment() -> None:
    for tokens in (100, 256, 2**13, 2**20, 2**30):
        pattern = whole_sequence_pattern(tokens)
        assert pattern.segment_lengths[-1] == tokens
        if tokens >= 256:
            pairs = zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
            assert {w // r for w, r in pairs} == {256}
