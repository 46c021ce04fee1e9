"""A thread that watches over a run: the lock, the heartbeat, the launcher, and ranks that keep others waiting.

It goes on while the training itself is stuck in a hop: that is when it is needed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from ringspan.train.errors import RunError
from ringspan.train.lock import RunLock

if TYPE_CHECKING:
    from ringspan.train.heartbeats import Beat
    from ringspan.train.loop import Trainer
    from ringspan.train.stragglers import Straggler

BEAT = 1.0  # seconds
ORPHANED = 3  # exit status of a worker whose launcher has died, or whose folder has been taken

Told = Callable[["list[Beat]", "list[Straggler]"], None]


class Guard:
    """Holds the lock of ``folder`` (rank 0 does) for as long as the block lasts.

    ``launcher`` is the process whose death ends this one; None if nobody launched it. While it is `following` a
    trainer, the rank's heartbeat is written, and rank 0 reads those of all.
    """

    def __init__(self, folder: Path, rank: int, launcher: int | None) -> None:
        self.folder, self.rank, self.launcher = folder, rank, launcher
        self.lock = RunLock(folder)
        self._is_locked = False
        self._trainer: Trainer | None = None
        self._tell: Told = lambda beats, late: None
        self._began = 0.0
        self._turn = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ringspan guard", daemon=True)

    def __enter__(self) -> Guard:
        if self.launcher is not None and not _may_launch(self.launcher):
            self._end("the launcher is gone")
        self._thread.start()
        if self.rank == 0:
            self._take_lock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._end_if_orphaned()  # a peer that stopped first is not the cause: say what is
        self._over.set()
        self._thread.join()
        self.lock.release()

    def _take_lock(self) -> None:
        try:
            self.lock.take()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._is_locked = True

    @contextmanager
    def following(self, trainer: Trainer, tell: Told) -> Iterator[None]:
        """Write this rank's heartbeat; rank 0 is told, at every beat, of all beats and who keeps others waiting."""
        from ringspan.train.heartbeats import feel, last_written, write_beat  # noqa: PLC0415

        with self._turn:
            write_beat(self.folder, feel(trainer.pulse, trainer.crew))
            self._began, self._tell, self._trainer = last_written(self.folder, self.rank), tell, trainer
        try:
            yield
        finally:
            with self._turn:
                self._trainer = None

    def _watch(self) -> None:
        while not self._over.wait(BEAT):
            self._end_if_orphaned()
            try:
                if self._is_locked:
                    self.lock.beat()
                with self._turn:
                    if self._trainer is not None:
                        self._beat(self._trainer)
            except RunError as error:
                self._end(str(error))
            except OSError:
                continue  # a full disk, or a file server that hesitates: the training itself will say so if it lasts

    def _beat(self, trainer: Trainer) -> None:
        from ringspan.train.heartbeats import feel, read_beats, write_beat  # noqa: PLC0415
        from ringspan.train.stragglers import stragglers  # noqa: PLC0415

        write_beat(self.folder, feel(trainer.pulse, trainer.crew))
        if self.rank == 0:
            beats = read_beats(self.folder, trainer.crew.world, self._began)
            self._tell(beats, stragglers(beats))

    def _end_if_orphaned(self) -> None:
        if self.launcher is not None and os.getppid() != self.launcher:
            self._end(f"the launcher (process {self.launcher}) is gone")

    def _end(self, why: str) -> NoReturn:
        """End the process, whatever its main thread waits for."""
        sys.stderr.write(f"rank {self.rank}: {why}: stopping. The last checkpoint is safe; go on with --resume auto.\n")
        sys.stderr.flush()
        os._exit(ORPHANED)


def _may_launch(process: int) -> bool:
    """Whether a parent may be the launcher, which is a Python of ours; one that adopts orphans is not.

    A launcher may die before its workers first look who their parent is.
    """
    if not Path("/proc/self/exe").exists():
        return True  # not Linux: nobody can tell
    try:
        program = Path(f"/proc/{process}/exe").readlink().name
    except OSError:  # gone, or somebody else's
        return False
    return "python" in program or "pypy" in program
