"""The pages' command lines for several hosts, and the Slurm script, run over the hosts of a test bed.

`HOST`, the number of ranks and the names of programs are replaced; the flags of a small run are appended, and the last
value of a flag counts. Every training run must end with the weights of a run on one host.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.faults import FLAGS, lost_steps
from benchmarks.hosts import INTERFACE, TestBed, why_not
from ringspan.runtime.files import read_journal
from ringspan.train.metrics import METRICS
from tests.ranks import starts_processes
from tests.slurm import Slurm, why_no_slurm
from tests.test_docs import PAGES, ROOT, blocks_of

missing = why_not()
pytestmark = [starts_processes, pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=f"no test bed: {missing}")]

SCRIPT = ROOT / "examples/train.sbatch"
SMALL = (*FLAGS, "--preset", "quick", "--warmup", "20", "--dtype", "float32", "--timeout", "20")
VERIFY = ("--pattern", "256x1,1024x4", "--tokens", "4k")
ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def commands() -> Iterator[tuple[str, str]]:
    """The commands of all pages that start torchrun on several hosts."""
    for page in PAGES:
        for block in blocks_of(page, "sh"):
            for command in block.replace("\\\n", " ").splitlines():
                if "--nnodes" in command:
                    yield page.name, re.sub(r"\s+", " ", command)


@pytest.fixture
def bed() -> Iterator[TestBed]:
    with TestBed(hosts=2) as bed:
        yield bed


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], bytes]:
    """The weights of a run on one host, by number of ranks and size of the rings."""

    @cache
    def run(ranks: int, ring: int) -> bytes:
        out = tmp_path_factory.mktemp("one_host")
        torchrun = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", "-m", "ringspan", "train"]
        command = [*torchrun, *SMALL, "--ring", str(ring), "--out", str(out)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **ENVIRONMENT})
        return weights_of(out)

    return run


def weights_of(out: Path) -> bytes:
    return (out / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize(("page", "command"), list(commands()))
def test_the_command_of_a_page_runs(
    page: str, command: str, bed: TestBed, wanted: Callable[[int, int], bytes], tmp_path: Path
) -> None:
    out, ring = tmp_path / "out", 2 if "--ring" in command else 4
    flags: tuple[str, ...] = ()
    if "ringspan train" in command:
        flags = (*SMALL, "--ring", str(ring), "--out", str(out))
    elif "ringspan verify" in command:
        flags = (*VERIFY, "--out", str(out))
    else:
        (program,) = re.findall(r"\S+\.py", command)
        (tmp_path / program).write_text(blocks_of(ROOT / "README.md", "python ring")[0])
    command = command.replace("HOST:", f"{bed.hosts[0].name}:")
    command = re.sub(r"--nproc-per-node=\d+", "--nproc-per-node=2", command)
    start, *loop = command.split("; do ")
    command = "; do ".join([f"{start} {shlex.join(flags)}", *loop])
    environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": INTERFACE}
    outputs = bed.run(["sh", "-c", f"cd {tmp_path} && {command}"], environment)
    if "ringspan train" in command:
        assert weights_of(out) == wanted(4, ring)
    elif "ringspan verify" in command:
        assert "PASS" in outputs[0]
    else:
        assert sum(output.count(" of 10,000 rows") for output in outputs) == 4


@pytest.fixture
def slurm(bed: TestBed, tmp_path: Path) -> Iterator[Slurm]:
    with Slurm(bed, tmp_path) as cluster:
        yield cluster


needs_slurm = pytest.mark.skipif(bool(why_no_slurm()), reason=f"no Slurm: {why_no_slurm()}")


class BatchRun:
    """A job of the Slurm script, of two nodes with one rank each."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.out = slurm, folder / "out"
        options = ["--nodes=2", "--cpus-per-task=1", f"--chdir={folder}"]
        environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": INTERFACE}
        self.job = slurm.submit(options, SCRIPT, *SMALL, "--out", str(self.out), environment=environment)
        self.log = folder / f"ringspan-{self.job}.log"

    def wait_for_step(self, number: int) -> None:
        self.slurm.wait_for(lambda: f"step {number}:" in self.text(), 120)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def finish(self) -> None:
        self.slurm.wait_for(lambda: self.slurm.state(self.job) in {"COMPLETED", "FAILED"}, 240)
        assert self.slurm.state(self.job) == "COMPLETED", self.text()

    def repeated_steps(self) -> int:
        return lost_steps([line["number"] for line in read_journal(self.out / METRICS) if "number" in line])


@needs_slurm
def test_a_job_that_is_interrupted_continues_where_it_stopped(
    slurm: Slurm, wanted: Callable[[int, int], bytes], tmp_path: Path
) -> None:
    run = BatchRun(slurm, tmp_path)
    run.wait_for_step(6)
    slurm.run("scancel", "--signal=INT", run.job)  # what --signal does before the time limit
    run.finish()
    done = int(re.findall(r"Interrupted after step (\d+) of 24", run.text())[0])
    assert f"Resuming from step {done} " in run.text()
    assert run.repeated_steps() == 0
    assert weights_of(run.out) == wanted(2, 2)


@needs_slurm
def test_a_job_continues_when_a_node_has_lost_its_power(
    slurm: Slurm, wanted: Callable[[int, int], bytes], tmp_path: Path
) -> None:
    run = BatchRun(slurm, tmp_path)
    run.wait_for_step(6)
    node = slurm.bed.hosts[1]
    slurm.power_off(node)
    slurm.wait_for(lambda: slurm.state(run.job) == "PENDING", 60)
    slurm.power_on(node)
    run.finish()
    assert "Resuming from step" in run.text()
    assert weights_of(run.out) == wanted(2, 2)
