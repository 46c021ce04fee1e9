"""The command `ringspan verify`: its output, its exit status, its report; alone and under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from ringspan.cli.app import app
from tests.ranks import shares_processes

pytestmark = [shares_processes(__name__), pytest.mark.timeout(900)]
SMALL = ["--pattern", "128x1,512x8", "--tokens", "2k"]
ROOT = Path(__file__).parent.parent.parent


def ringspan(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ringspan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_stdout_is_json_only(tmp_path: Path) -> None:
    done = ringspan("verify", *SMALL, "--ranks", "2", "--json", "--out", str(tmp_path))
    found = json.loads(done.stdout)
    checks = {check["name"]: check["verdict"] for check in found["checks"]}
    assert checks["the gradients are exact"] == "pass"
    assert set(found["measurements"]) == {"1", "2"}
    assert json.loads((tmp_path / "verify.json").read_text()) == found
    assert "<h1>" in (tmp_path / "verify.html").read_text()
    assert done.returncode == found["status"] == (1 if "FAIL" in checks.values() else 0)
    # The report names what was run: the pattern itself at its length, and its own rates in shorter segments.
    assert "up to 2,052 tokens" in found["sentence"]
    text = (tmp_path / "verify.md").read_text()
    assert "128x1,512x8 runs unchanged at 2,052 tokens" in text
    assert "| 128x1,512x8, 2,048 tokens, 4 heads x 64, float32 |" in text
    assert "x4" not in text


def test_a_ring_of_one_is_incomplete(tmp_path: Path) -> None:
    done = ringspan("verify", *SMALL, "--ranks", "1", "--out", str(tmp_path))
    assert done.returncode == 3
    assert "INCOMPLETE:" in done.stdout
    assert "PASS" not in done.stdout


def test_a_faulty_ring_exits_with_status_1_and_its_reason(tmp_path: Path) -> None:
    target = "tests.tools.verify.faulty:raises"
    done = ringspan("verify", "--attention", target, "--ranks", "1", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "FAIL:" in done.stdout
    assert "rank 0 of 1 raised NotImplementedError: not on this device" in (tmp_path / "verify.md").read_text()


def test_verifies_the_ranks_of_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ringspan"]
    command += ["verify", *SMALL, "--json", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    found = json.loads(done.stdout)
    assert "torchrun" in found["where"]
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    assert verdicts["the output is exact"] == verdicts["bytes sent are as expected"] == "pass"


def test_an_interrupt_ends_it_cleanly(tmp_path: Path) -> None:
    interrupt_after_start("verify", "--ranks", "2", "--out", str(tmp_path))


def interrupt_after_start(*arguments: str) -> None:
    """Interrupt a command as soon as it has child processes: it ends with status 130, and so do they."""
    command = [sys.executable, "-m", "ringspan", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    family = psutil.Process(process.pid)
    while process.poll() is None and not family.children():
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    children = family.children(recursive=True)
    assert children
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in output + errors
    _, alive = psutil.wait_procs(children, timeout=300)
    assert not alive


def test_an_acceptance_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    done = CliRunner().invoke(app, ["verify", "--acceptance"], env={"COLUMNS": "400"})
    assert done.exit_code == 1
    assert "run it without torchrun" in done.output


@pytest.mark.slow
def test_an_acceptance_from_end_to_end(tmp_path: Path) -> None:
    arguments = ["verify", "--acceptance", "--device", "cpu", "--ranks", "2", "--quick", "--json"]
    done = ringspan(*arguments, "--out", str(tmp_path))
    found = json.loads(done.stdout)
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    assert all(step["outcome"] == "finished" for step in found["steps"]), found["steps"]
    assert verdicts["runs at full size"] == "not measured"
    for name in ("kernel reference is exact", "kernel cpu_flash is exact", "a ring of 2 trains as one rank"):
        assert verdicts[name] == "pass", found["checks"]
    assert done.returncode == found["status"] != 0
    (folder,) = tmp_path.iterdir()
    assert "<h1>" in (folder / "acceptance.html").read_text()
    with tarfile.open(folder / "acceptance.tar.gz") as archive:
        names = {Path(name).relative_to(folder.name) for name in archive.getnames()}
    wanted = ["acceptance.html", "acceptance.json", "environment.json", "results/ring-2-full.json", "logs/verify.log"]
    assert {*map(Path, [*wanted, "verify/verify.json", "train-2-float64/metrics.jsonl"])} <= names
    assert not [name for name in names if name.suffix == ".safetensors"]


def test_an_interrupt_ends_an_acceptance_and_its_step(tmp_path: Path) -> None:
    interrupt_after_start("verify", "--acceptance", "--device", "cpu", "--out", str(tmp_path))
