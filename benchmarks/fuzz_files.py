"""Files with something wrong in them, and what ringspan says to each: a sentence, or nothing if they still are files.

Every way of running code that Python can report is forbidden meanwhile, and every case has a time limit.
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

from ringspan.cli.app import app
from ringspan.models import LongNet
from ringspan.runtime.files import checksum
from ringspan.runtime.settings import RunError
from ringspan.train.checkpoint import MANIFEST, read_manifest, write_manifest
from ringspan.train.config import TrainSettings
from ringspan.train.trainer import Trainer
from ringspan.train.watchdog import Beat, read_beats, stragglers, write_beat

CODE_RUNS = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"}
LONGEST = 20  # seconds that a case may take, on a busy machine
LONGEST_SENTENCE = 2000
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
class Found:
    """What was said to damaged files of one kind: sentences, how many still were files, and defects."""

    kind: str
    sentences: list[str] = field(default_factory=list)
    whole: int = 0
    defects: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return len(self.sentences) + self.whole + len(self.defects)

    def note(self, number: int, read: Callable[[], str]) -> None:
        """Read a damaged file: ``read`` returns the sentence that it was refused with, or nothing."""
        try:
            with limited():
                sentence = read()
        except BaseException as error:  # whatever it is, it is not a sentence
            self.defects.append(f"{self.kind} {number}: {type(error).__name__}: {error}")
            return
        if "Traceback" in sentence or len(sentence) > LONGEST_SENTENCE:
            self.defects.append(f"{self.kind} {number}: {sentence[:LONGEST_SENTENCE]}")
        elif sentence:
            self.sentences.append(sentence)
        else:
            self.whole += 1


def attempt(kind: str, rounds: int, read: Callable[[], str], damage: Callable[[int, random.Random], Damage]) -> Found:
    """Damage a file, read it, put it back, again and again. What is not damaged must be read, before and after."""
    found = Found(kind)
    for number in range(rounds):
        assert number % 50 or not read(), f"{kind}: refused as it was written: {read()}"
        with damage(number, random.Random(number)):
            found.note(number, read)
    assert not read(), f"{kind}: refused as it was written: {read()}"
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
    """From here on, nothing in this process may be unpickled by name, or started."""

    def forbid(event: str, arguments: Any) -> None:
        if event in CODE_RUNS:
            raise AssertionError(f"code was run: {event} {arguments}")

    sys.addaudithook(forbid)


def mutated(content: bytes, chance: random.Random, within: int) -> bytes:
    """A copy with something wrong in its first ``within`` bytes."""
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
    """JSON with a value in one place that has no business there."""
    values = json.loads(text)
    place = chance.choice([values, *(inner for inner in values.values() if isinstance(inner, dict) and inner)])
    place[chance.choice(list(place))] = chance.choice(ODD)
    return json.dumps(values).encode()


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A JSON file with wrong bytes, or with a wrong value."""
    return mutated(content, chance, len(content)) if chance.random() < 0.5 else with_another_value(content, chance)


def fuzz(settings: TrainSettings, rounds: int) -> list[Found]:
    """Damage every kind of file that a run reads, ``rounds`` times each; a run of two steps writes them first."""
    trainer = Trainer(settings)
    trainer.run(lambda step: None)
    run = Path(settings.out)
    trainer.save_model(run / "model")
    write_beat(run, Beat(0, "node", 6, 3, "forward", 1.0, "parcels of hop 2", (1,), 6.0, 0.5, 2**20))
    forbid_code()
    checkpoint = trainer.checkpoints.path_of(trainer.checkpoints.steps()[-1])
    return [
        *fuzz_checkpoint(trainer, checkpoint, rounds),
        fuzz_settings(run / "settings.json", rounds),
        fuzz_model(run / "model", rounds),
        fuzz_heartbeats(run, rounds),
    ]


def fuzz_checkpoint(trainer: Trainer, folder: Path, rounds: int) -> Iterator[Found]:
    (part,) = (path for path in folder.iterdir() if path.name != MANIFEST)
    manifest, stored = folder / MANIFEST, read_manifest(folder)
    header = 8 + int.from_bytes(part.read_bytes()[:8], "little")

    written = {path: path.read_bytes() for path in (manifest, part)}

    def load() -> str:
        return refusal(trainer.load, RunError)

    def load_what_was_written() -> str:
        said = load()
        if not said:  # checksums let nothing else through
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


def fuzz_settings(path: Path, rounds: int) -> Found:
    """By the command itself, which foretells what a run with these settings will need."""

    def foretell() -> str:
        done = CliRunner().invoke(app, ["train", "--config", str(path), "--dry-run", "--json"])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code:
            return done.output
        found = TrainSettings.read(path)
        assert TrainSettings.from_json(found.to_json()) == found, "settings that do not come back as they are"
        return ""

    content = path.read_bytes()
    kind = "settings, by `ringspan train --config`"
    return attempt(kind, rounds, foretell, lambda _, chance: changed(path, damaged(content, chance)))


def fuzz_model(folder: Path, rounds: int) -> Found:
    weights, config = folder / "model.safetensors", folder / "config.json"
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")

    def damage(number: int, chance: random.Random) -> Damage:
        if number % 2:
            return changed(weights, mutated(weights.read_bytes(), chance, header))
        return changed(config, damaged(config.read_bytes(), chance))

    kind = "a trained model, its weights or its config.json"
    return attempt(kind, rounds, lambda: refusal(lambda: LongNet.from_pretrained(folder), OSError, ValueError), damage)


def fuzz_heartbeats(run: Path, rounds: int) -> Found:
    """They are read while a run goes on: what is none is left out."""
    path = run / "heartbeats/rank-00000.json"
    content = path.read_bytes()

    def look() -> str:
        beats = read_beats(run, 1)
        stragglers(beats)
        return "" if beats else "left out"

    kind = "a heartbeat (left out, and the run goes on)"
    return attempt(kind, rounds, look, lambda _, chance: changed(path, damaged(content, chance)))


def refusal(read: Callable[[], Any], *kinds: type[Exception]) -> str:
    """The sentence with which something is refused that should be read; nothing if it is read."""
    try:
        read()
    except kinds as error:
        return str(error)
    return ""


@contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    """Another content in a file, for as long as the block lasts."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)
