"""Atomic writes and journals, also after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringspan.runtime.files import Journal, atomic_path, read_journal, write_atomic


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "settings.json"
    path.write_text("old")
    write_atomic(path, "new", durable=durable)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("unique", [True, False])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, unique: bool) -> None:
    path = tmp_path / "settings.json"
    path.write_text("old")

    def write_half() -> None:
        with atomic_path(path, unique=unique) as temporary:
            temporary.write_text("half of the n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [True, False])
def test_a_journal_drops_a_torn_line_and_continues(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "run/steps.jsonl"
    assert read_journal(path) == []
    journal = Journal(path, durable=durable)
    journal.append({"step": 0})
    journal.append({"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2')
    assert read_journal(path) == [{"step": 0}, {"step": 1}]
    Journal(path).append({"step": 2})
    assert read_journal(path) == [{"step": 0}, {"step": 1}, {"step": 2}]


@pytest.mark.parametrize(
    "content", [b"no JSON\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"], ids=["text", "bytes", "deeply nested"]
)
def test_a_whole_line_that_is_not_json_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.txt"):
        read_journal(path)
