"""Invalid arguments exit with status 2 and name the value, the rule and the way out."""

import pytest
from typer.testing import CliRunner

from ringspan.cli.app import app


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench --tokens 8k..4k", ["8k..4k", "first length"]),
        ("bench --memory plenty", ["plenty", "bytes", "8GiB"]),
        ("bench --layout round", ["contiguous", "zigzag", "best"]),
        ("bench --dtype int8", ["int8", "float32"]),
        ("bench --pattern 2048", ["SEGMENTxRATE"]),
        ("bench --quick", ["a study only"]),
        ("bench --tokens 128 --ranks 1 --out /proc/nowhere", ["--out", "/proc/nowhere"]),
        ("bench hilbert --quick --out /proc/nowhere", ["--out", "/proc/nowhere"]),
        ("stream --tokens 1k --out /proc/nowhere", ["--out", "/proc/nowhere"]),
        ("evaluate /no/such/run", ["settings.json"]),
        ("plan --tokens many", ["--tokens", "'many': must be a whole number"]),
        ("plan --ranks 0", ["--ranks", "'0': must be a whole number of at least 1"]),
        ("plan --pattern 2048", ["--pattern", "'2048'", "SEGMENTxRATE"]),
        ("plan --pattern 2048x0", ["--pattern", "dilation_rates[0]=0"]),
        ("plan --pattern window", ["'window'", "'window N'"]),
        ("plan --pattern window+2048x1", ["'window'", "'window N'"]),
        ("plan --rank 4", ["--rank", "4: must be a rank of the ring, 0 .. 3", "--ranks 4"]),
        ("plna", ["No such command 'plna'", "did you mean 'plan'"]),
        ("dance", ["No such command 'dance'", "verify"]),
        ("plan --layout round", ["--layout", "'round'", "zigzag", "all"]),
        ("plan --routing thrown", ["routing='thrown'", "relay", "direct"]),
        ("plan --dtype int8", ["int8", "bfloat16"]),
        ("plan --heads 6 --kv-heads 4", ["divide"]),
        ("plan --flops 0", ["flops=0.0", "positive"]),
        ("plan --bandwidth -1", ["bandwidth=-1.0", "positive"]),
        ("train --preset huge", ["must be one of quick"]),
        ("train --heads 3", ["must divide width=64"]),
        ("train /no/such/folder --preset quick", ["no such file or folder"]),
        ("verify --attention nowhere:f", ["No module named 'nowhere'"]),
        ("verify --pattern 2048", ["SEGMENTxRATE"]),
        ("verify --attention ringspan.tools.peers:all_gather --pattern full", ["--pattern", "function.pattern"]),
        ("verify --layout round", ["'round'"]),
        ("verify --dtype int8", ["float64"]),
        ("verify --ranks two", ["whole number"]),
        (f"verify --into {__file__}", ["--into", "needs one line '<!-- ringspan verify -->'"]),
        ("verify --acceptance --pattern full", ["--pattern", "does not apply to --acceptance"]),
        ("verify --acceptance --device tpu", ["'tpu'", "must be one of auto, cpu, cuda"]),
        (f"verify --acceptance --into {__file__}", ["--into", "'<!-- ringspan verify --acceptance -->'"]),
        ("verify --device cpu", ["--device", "without --acceptance"]),
        ("verify --quick", ["--quick", "without --acceptance"]),
    ],
)
def test_invalid_values_are_refused_with_the_way_out(command: str, words: list[str]) -> None:
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    said = " ".join(result.stderr.replace("│", " ").split())
    for word in words:
        assert word in said
