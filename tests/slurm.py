"""Slurm on the hosts of a test bed: a controller on the first, and munge and a node daemon on each.

The daemons are those of Debian's packages slurm-wlm and munge, and end with the test bed.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.hosts import Host, TestBed

DAEMONS = ("munged", "slurmctld", "slurmd")
NODE_LOST_SECONDS = 10  # SlurmdTimeout
START_SECONDS = 60

# Requeued jobs wait until the credentials of their last start have expired. Nodes that were down return on their own.
# Nodes may claim more CPUs than this machine has.
_CONFIGURATION = """
ClusterName=cluster
SlurmctldHost={controller}
SlurmUser=root
AuthInfo=cred_expire=10
ReturnToService=2
SlurmdTimeout={node_lost}
KillWait=5
SlurmdParameters=config_overrides
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/controller.pid
SlurmctldLogFile={folder}/controller.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
NodeName={nodes} CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""

# In the mount namespace of a host: munge has one socket at a fixed path.
_START_MUNGE = """
mount -t tmpfs none /run
mkdir /run/munge
exec munged --force --key-file="$0" --log-file=/run/munge/log --seed-file=/run/munge/seed
"""


def why_no_slurm() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    missing = [daemon for daemon in DAEMONS if shutil.which(daemon) is None]
    return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge" if missing else ""


class Slurm:
    """A cluster of all hosts of a test bed, as a context manager. Commands run on the first host."""

    def __init__(self, bed: TestBed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        self._key = folder / "munge.key"
        self._key.write_bytes(bytes(range(128)))
        self._key.chmod(0o600)
        configuration = folder / "slurm.conf"
        names = ",".join(host.name for host in bed.hosts)
        values = dict(controller=bed.hosts[0].name, nodes=names, folder=folder, node_lost=NODE_LOST_SECONDS)
        configuration.write_text(_CONFIGURATION.format(**values))
        self.environment = {"SLURM_CONF": str(configuration)}
        self._daemons: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Slurm:
        try:
            for host in self.bed.hosts:
                self.power_on(host)
            self._daemon(self.bed.hosts[0], "slurmctld", "-D")
            self.wait_for(lambda: self.run("sinfo", "--noheader", "--format=%T").split() == ["idle"], START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.bed.hosts:
            host.kill()
        for daemon in self._daemons:
            daemon.wait()

    def power_off(self, host: Host) -> None:
        host.cut()
        host.kill()

    def power_on(self, host: Host) -> None:
        host.mend()
        host.run(["sh", "-c", _START_MUNGE, str(self._key)])
        self._daemon(host, "slurmd", "-D", "-N", host.name)

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Run a command on the first host and return its stdout."""
        return self.bed.hosts[0].run(command, {**self.environment, **(environment or {})})

    def submit(self, options: Sequence[str], script: Path, *arguments: str, environment: Mapping[str, str]) -> str:
        """Submit a batch script and return the number of its job."""
        return self.run("sbatch", "--parsable", *options, str(script), *arguments, environment=environment).strip()

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = [f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log"))]
                raise TimeoutError("\n".join([f"not within {seconds:g} s", *logs]))
            time.sleep(0.2)

    def _daemon(self, host: Host, *command: str) -> None:
        self._daemons.append(host.start(command, self.environment, subprocess.DEVNULL, subprocess.DEVNULL))
