"""Invalid arguments exit with status 2 and name the value, the rule and the way out."""

import pytest
from typer.testing import CliRunner

from ringspan.cli.app import app


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench --tokens 8k..4k", ["the first length must not be longer than the last"]),
        ("bench --memory plenty", ["must be a number of bytes, such as 8GiB or 512MiB"]),
        ("bench --layout round", ["must be 'contiguous' or 'zigzag', or 'best'"]),
        ("bench --dtype int8", ["must be float32, bfloat16, float16 or float64"]),
        ("bench --pattern 2048", ["say full, or SEGMENTxRATE pairs"]),
        ("bench --suite everything", ["must be results"]),
        ("bench --quick", ["say which, such as --suite results"]),
        ("bench --suite results --tokens 4k", ["leave out --tokens, or --suite"]),
        ("bench --tokens 128 --ranks 1 --out /proc/nowhere", ["--out", "/proc/nowhere: must be a folder that can be"]),
        ("bench --suite results --quick --out /proc/nowhere", ["--out", "/proc/nowhere: must be a folder that can"]),
        ("bench hilbert --quick --out /proc/nowhere", ["--out", "/proc/nowhere: must be a folder that can be written"]),
        ("stream --tokens 1k --out /proc/nowhere", ["--out", "/proc/nowhere: must be a folder that can be written"]),
        ("evaluate /no/such/run", ["settings.json"]),
        ("plan --tokens many", ["--tokens", "'many': must be a whole number"]),
        ("plan --ranks 0", ["--ranks", "'0': must be a whole number of at least 1"]),
        ("plan --pattern 2048", ["--pattern", "'2048': say full, or SEGMENTxRATE pairs"]),
        ("plan --rank 4", ["--rank", "4: must be a rank of the ring, 0 .. 3", "--ranks 4"]),
        ("plna", ["No such command 'plna'", "did you mean 'plan'"]),
        ("dance", ["No such command 'dance'", "verify"]),
        ("plan --layout round", ["--layout", "'round': must be 'contiguous' or 'zigzag', or both"]),
        ("plan --routing thrown", ["routing='thrown': must be 'relay' or 'direct'"]),
        ("plan --dtype int8", ["dtype='int8': must be one of float64, float32, bfloat16, float16"]),
        ("plan --heads 6 --kv-heads 4", ["the KV heads must divide the query heads"]),
        ("plan --flops 0", ["flops=0.0: a rate is more than 0"]),
        ("plan --bandwidth -1", ["bandwidth=-1.0: a rate is more than 0"]),
        ("train --preset huge", ["must be one of quick"]),
        ("train --heads 3", ["must divide width=64"]),
        ("train /no/such/folder --preset quick", ["no such file or folder"]),
        ("verify --attention nowhere:f", ["No module named 'nowhere'"]),
        ("verify --pattern 2048", ["SEGMENTxRATE"]),
        ("verify --layout round", ["'round'"]),
        ("verify --dtype int8", ["float64"]),
        ("verify --ranks two", ["whole number"]),
        (f"verify --into {__file__}", ["--into", "needs one line '<!-- ringspan verify -->'"]),
    ],
)
def test_invalid_values_are_refused_with_the_way_out(command: str, words: list[str]) -> None:
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    said = " ".join(result.stderr.replace("│", " ").split())
    for word in words:
        assert word in said
