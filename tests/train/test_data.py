"""Which files are read: text files in a folder, any file given by name; every skipped file is recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ringspan.train.data import RECORD, Corpus, Selection

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    for name, content in {
        "b.txt": "naïve text\n".encode() * 20_000,  # the second block starts inside a character
        "a.md": b"text",
        "picture.png": PICTURE,
        "picture.txt": PICTURE,  # the suffix does not matter
        "latin.txt": "naïve".encode("latin-1"),
        "tail.txt": b"text " * 40_000 + PICTURE,
        "empty.txt": b"",
        ".git/HEAD": b"ref: refs/heads/main",
        ".hidden": b"secret",
        "deeper/c": b"more text",
        "earlier/run.lock": b" " * 1024,
        "earlier/metrics.jsonl": b'{"number": 0}',
    }.items():
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (data / "broken").symlink_to(data / "nowhere")
    (data / "linked").symlink_to(data / "deeper")
    (data / "same.txt").symlink_to(data / "a.md")
    return data


def test_text_files_in_a_folder_are_selected(folder: Path) -> None:
    found = Selection.of([folder])
    assert [Path(file.path).relative_to(folder).as_posix() for file in found.files] == ["a.md", "b.txt", "deeper/c"]
    assert found.bytes == len(Corpus(found)) == sum(file.bytes for file in found.files)
    skipped = {Path(entry.path).relative_to(folder).as_posix(): entry.reason for entry in found.skipped}
    assert skipped == {
        ".git": "hidden",
        ".hidden": "hidden",
        "broken": "missing",
        "earlier": "run of ringspan train",
        "empty.txt": "empty",
        "latin.txt": "binary or not UTF-8",
        "linked": "linked folder",
        "picture.png": "binary or not UTF-8",
        "picture.txt": "binary or not UTF-8",
        "same.txt": "repeated",
        "tail.txt": "binary or not UTF-8",
    }
    read, left_out = found.lines()
    assert read == f"Text: 3 file(s), {found.bytes:,} bytes: a.md, b.txt, deeper/c in {folder}"
    assert "4 binary or not UTF-8 (latin.txt, picture.png, picture.txt, tail.txt in " in left_out


def test_a_file_given_by_name_is_read_regardless_of_its_content(folder: Path) -> None:
    found = Selection.of([folder / "picture.png", folder, folder / "a.md"])
    assert [Path(file.path).name for file in found.files] == ["picture.png", "a.md", "b.txt", "c"]
    assert [Path(entry.path).name for entry in found.skipped if entry.reason == "repeated"][-2:] == ["same.txt", "a.md"]


def test_the_error_for_a_folder_without_text_lists_its_content(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"no text in .*/nothing: there are no files"):
        Selection.of([tmp_path / "nothing"])
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(PICTURE)
    with pytest.raises(ValueError, match=r"no text in .*/pictures: 1 binary or not UTF-8 \(a.png in .*\)"):
        Selection.of([tmp_path / "pictures"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: not a regular file"):
        Selection.of([folder, tmp_path / "pipe"])


def test_a_run_reads_the_files_it_started_with(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    data = (str(folder),)
    selected = Selection.of_run(run, data)
    selected.write(run)
    assert json.loads((run / RECORD).read_text())["skipped"]
    (folder / "later.txt").write_text("came later")
    assert Selection.of_run(run, data) == selected
    assert len(Selection.of_run(run, (str(folder / "later.txt"),)).files) == 1  # other data was given
    text = (folder / "a.md").read_bytes()
    for other, size in ((text + b"!", "5 bytes"), (b"tixt", "4 bytes"), (b"", "empty")):
        (folder / "a.md").write_bytes(other)
        with pytest.raises(ValueError, match=rf"a.md has changed .*4 bytes then, {size} now"):
            Selection.of_run(run, data)
    (folder / "a.md").write_bytes(text)
    assert Selection.of_run(run, data) == selected
    for damaged in ("", "[]", "{}", '{"data": 1}', '{"data": [], "files": [1], "skipped": []}'):
        (run / RECORD).write_text(damaged)
        with pytest.raises(ValueError, match=r"data.json: not a record"):
            Selection.of_run(run, data)
