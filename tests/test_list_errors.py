"""The listing of error messages finds texts wherever they are written."""

from pathlib import Path

from tests.list_errors import Message, all_messages, messages

SOURCE = """
REFUSAL = "a text of its own"

def _foreign(path):
    return f"{path} is not ours"

def check(n):
    if n < 0:
        raise ValueError(f"n={n}: must be " + ("at least 0" if n else "0"))
    if n > 1:
        raise ValueError(REFUSAL) from None
    raise OSError(_foreign(n))
"""


def test_texts_are_found_wherever_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text(SOURCE)
    assert messages(tmp_path / "source.py") == [
        Message(9, "ValueError", "n={n}: must be [at least 0 / 0]"),
        Message(11, "ValueError", "a text of its own"),
        Message(12, "OSError", "{path} is not ours"),
    ]


def test_the_whole_source_is_listed() -> None:
    assert sum(map(len, all_messages().values())) > 300
