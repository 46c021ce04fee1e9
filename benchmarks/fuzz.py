"""Damaged checkpoints, settings, models and heartbeats: each is refused with one message, or still valid.

Every way of running code that Python's audit hooks report is forbidden meanwhile, and every case has a time limit. The
suite fails on a hang, a traceback, or code that runs.
"""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from typer.testing import CliRunner

from benchmarks.suite import ROOT, Measuring, Page, Results, Rows, Suite, Table
from ringspan.cli.app import app
from ringspan.models import LongNet, LongNetConfig
from ringspan.runtime.files import checksum
from ringspan.runtime.launch import run_local_ranks
from ringspan.runtime.settings import RunError
from ringspan.train.checkpoint import MANIFEST, read_manifest, write_manifest
from ringspan.train.config import TrainSettings
from ringspan.train.trainer import Trainer
from ringspan.train.watchdog import Heartbeat, find_stragglers, read_heartbeats, write_heartbeat

CODE_RUNS = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"}
LONGEST = 20  # seconds for a case, on a busy machine
LONGEST_MESSAGE = 2000
ODD: list[Any] = [
    None,
    "many",
    "",
    -1,
    0,
    2**50,
    2**70,
    1e308,
    1e-320,
    [],
    {},
    [1],
    ["a"],
    True,
    0.5,
    [[[]]],
    "\\u0000",
    "../..",
]
ODD += [float("nan"), float("inf"), -0.0, [2**40], [0], [-1], {"a": 1}, "1", 7, 1000003]


Damage = AbstractContextManager[None]


@dataclass
class FuzzResult:
    """Outcomes of damaged files of one kind: error messages, files that were still valid, and defects."""

    kind: str
    messages: list[str] = field(default_factory=list)
    whole: int = 0
    defects: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return len(self.messages) + self.whole + len(self.defects)

    def try_reading(self, number: int, read: Callable[[], str]) -> None:
        """Read a damaged file. ``read`` returns the error message, or an empty string if the file is accepted."""
        try:
            with limited():
                message = read()
        except BaseException as error:  # anything but a plain error message is a defect
            self.defects.append(f"{self.kind} {number}: {type(error).__name__}: {error}")
            return
        if "Traceback" in message or len(message) > LONGEST_MESSAGE:
            self.defects.append(f"{self.kind} {number}: {message[:LONGEST_MESSAGE]}")
        elif message:
            self.messages.append(message)
        else:
            self.whole += 1


def attempt(
    kind: str, rounds: int, read: Callable[[], str], damage: Callable[[int, random.Random], Damage]
) -> FuzzResult:
    """Damage a file, read it, and restore it, repeatedly. The intact file must be accepted before and after."""
    found = FuzzResult(kind)
    for number in range(rounds):
        assert number % 50 or not read(), f"{kind}: the intact file is refused: {read()}"
        with damage(number, random.Random(number)):
            found.try_reading(number, read)
    assert not read(), f"{kind}: the intact file is refused: {read()}"
    return found


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: Any) -> NoReturn:
        raise TimeoutError(f"took longer than {LONGEST} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def forbid_code() -> None:
    """From here on, unpickling by name and starting processes raise an error in this process."""

    def forbid(event: str, arguments: Any) -> None:
        if event in CODE_RUNS:
            raise AssertionError(f"code was run: {event} {arguments}")

    sys.addaudithook(forbid)


def mutated(content: bytes, chance: random.Random, within: int) -> bytes:
    """A copy with random damage in its first ``within`` bytes."""
    start = chance.randrange(min(within, len(content)))
    stop = min(len(content), start + chance.randint(1, 40))
    noise = chance.randbytes(stop - start)
    flipped = bytes([content[start] ^ 1 << chance.randrange(8)])
    return chance.choice(
        [
            content[:start],
            content[:start] + content[stop:],
            content[:start] + noise + content[stop:],
            content[:start] + noise + content[start:],
            content[:start] + flipped + content[start + 1 :],
            content[:start] + b"9" + content[start + 1 :],
            content[:start] + content[start:stop] + content[start:],
        ]
    )


def with_another_value(text: bytes, chance: random.Random) -> bytes:
    """JSON with one value replaced by an invalid one."""
    values = json.loads(text)
    place = chance.choice([values, *(inner for inner in values.values() if isinstance(inner, dict) and inner)])
    place[chance.choice(list(place))] = chance.choice(ODD)
    return json.dumps(values).encode()


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A JSON file with damaged bytes or an invalid value."""
    return mutated(content, chance, len(content)) if chance.random() < 0.5 else with_another_value(content, chance)


def fuzz(settings: TrainSettings, rounds: int) -> list[FuzzResult]:
    """Damage every kind of file that a run reads, ``rounds`` times each. A run of two steps writes them first."""
    trainer = Trainer(settings)
    trainer.run()
    run = Path(settings.out)
    write_heartbeat(run, Heartbeat(0, "node", 6, 3, "forward", 1.0, "parcels of hop 2", (1,), 6.0, 0.5, 2**20))
    forbid_code()
    checkpoint = trainer.checkpoints.path_of(trainer.checkpoints.steps()[-1])
    return [
        *fuzz_checkpoint(trainer, checkpoint, rounds),
        fuzz_settings(run / "settings.json", rounds),
        fuzz_model(run / "model", rounds),
        fuzz_heartbeats(run, rounds),
    ]


def fuzz_checkpoint(trainer: Trainer, folder: Path, rounds: int) -> Iterator[FuzzResult]:
    (part,) = (path for path in folder.iterdir() if path.name != MANIFEST)
    manifest, stored = folder / MANIFEST, read_manifest(folder)
    header = 8 + int.from_bytes(part.read_bytes()[:8], "little")

    written = {path: path.read_bytes() for path in (manifest, part)}

    def load() -> str:
        return refusal(trainer.load, RunError)

    def load_what_was_written() -> str:
        said = load()
        if not said:  # checksums accept nothing else
            assert part.read_bytes() == written[part], "another part was read"
            assert json.loads(manifest.read_bytes()) == json.loads(written[manifest]), "another manifest was read"
        return said

    @contextmanager
    def hostile(number: int, chance: random.Random) -> Iterator[None]:
        with changed(part, mutated(part.read_bytes(), chance, header)), changed(manifest, manifest.read_bytes()):
            files = {part.name: (part.stat().st_size, checksum(part))}
            write_manifest(folder, dataclasses.replace(stored, files=files))
            yield

    def anywhere(path: Path) -> Callable[[int, random.Random], Damage]:
        return lambda _, chance: changed(path, mutated(written[path], chance, len(written[path])))

    for kind, path in (("a checkpoint's manifest", manifest), ("a checkpoint's part", part)):
        yield attempt(kind, rounds, load_what_was_written, anywhere(path))
    yield attempt("a part's header, with a manifest that matches", rounds, load, hostile)


def fuzz_settings(path: Path, rounds: int) -> FuzzResult:
    """Through the command, which predicts the memory of a run with these settings."""

    def dry_run() -> str:
        done = CliRunner().invoke(app, ["train", "--config", str(path), "--dry-run", "--json"])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code:
            return done.output
        found = TrainSettings.read(path)
        assert TrainSettings.from_json(found.to_json()) == found, "settings do not survive a round trip"
        return ""

    content = path.read_bytes()
    kind = "settings, by `ringspan train --config`"
    return attempt(kind, rounds, dry_run, lambda _, chance: changed(path, damaged(content, chance)))


def fuzz_model(folder: Path, rounds: int) -> FuzzResult:
    weights, config = folder / "model.safetensors", folder / "config.json"
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")

    def damage(number: int, chance: random.Random) -> Damage:
        if number % 2:
            return changed(weights, mutated(weights.read_bytes(), chance, header))
        return changed(config, damaged(config.read_bytes(), chance))

    kind = "a trained model, its weights or its config.json"
    return attempt(kind, rounds, lambda: refusal(lambda: LongNet.from_pretrained(folder), OSError, ValueError), damage)


def fuzz_heartbeats(run: Path, rounds: int) -> FuzzResult:
    """Heartbeats are read during a run; invalid ones are skipped."""
    path = run / "heartbeats/rank-00000.json"
    content = path.read_bytes()

    def look() -> str:
        heartbeats = read_heartbeats(run, 1)
        find_stragglers(heartbeats)
        return "" if heartbeats else "skipped"

    kind = "a heartbeat (skipped; the run continues)"
    return attempt(kind, rounds, look, lambda _, chance: changed(path, damaged(content, chance)))


def refusal(read: Callable[[], Any], *kinds: type[Exception]) -> str:
    """The error message of a failed read; empty if it succeeds."""
    try:
        read()
    except kinds as error:
        return str(error)
    return ""


@contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    """Replace the content of a file inside the block."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def files(run: Measuring) -> list[dict[str, Any]]:
    rounds = 20 if run.size == "quick" else int(run.options["rounds"])
    model = LongNetConfig.named("nano", patterns=("16x1,128x4", "16x1,128x4 shift 8"))
    settings = TrainSettings(model=model, data=(str(ROOT / "src"),), tokens=256, steps=2, out=str(run.folder))
    (found,) = run_local_ranks(1, fuzz, settings, rounds, timeout_seconds=60.0 + 6 * rounds * LONGEST)
    return [
        dict(kind=each.kind, tried=each.tried, refused=len(each.messages), whole=each.whole, defects=each.defects)
        for each in found
    ]


def broken(results: Results) -> str:
    defects = [defect for kind in results["files"] for defect in kind["defects"]]
    return "\n".join(["Some damaged files were not refused with a message:", *defects]) if defects else ""


def report(results: Results) -> Page:
    kinds = results["files"]
    defects = sum(len(kind["defects"]) for kind in kinds)
    sentence = (
        f"{sum(kind['tried'] for kind in kinds)} damaged files: bytes are cut off, removed, inserted, flipped or "
        "repeated, and in JSON values are also replaced by invalid ones. Some files stay valid, for example if a digit "
        f"of a learning rate changes or a space is repeated. Each case had {LONGEST} seconds, and an audit hook "
        f"watched for unpickling by name, forks and new processes. Hangs, tracebacks and code that ran: **{defects}**."
    )
    rows: Rows = [["damaged", "files", "refused with a message", "still valid", "hangs, tracebacks, code that ran"]]
    rows += [[k["kind"], str(k["tried"]), str(k["refused"]), str(k["whole"]), str(len(k["defects"]))] for k in kinds]
    return Page(
        "Damaged files",
        sentence,
        "python -m benchmarks fuzz",
        f"Machine: {results.machine}",
        [Table("Outcomes", rows)],
    )


SUITE = Suite(
    "docs/faults.md",
    {"files": files},
    report,
    marker="benchmarks.fuzz",
    broken=broken,
    options={"rounds": "100"},
    long_options={"rounds": "500"},
)
