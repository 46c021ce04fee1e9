"""The training loop: steps, checkpoints, metrics, the check for NaNs, and Ctrl-C. Prints nothing.

>>> from ringspan.train.config import PRESETS
>>> with Trainer(PRESETS["quick"].settings) as trainer:  # doctest: +SKIP
...     trainer.run()
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import ringspan as rs
from ringspan.models import LongNet
from ringspan.models.config import save_weights
from ringspan.nn.cross_entropy import IGNORED
from ringspan.runtime.collectives import all_gather_floats, run_on_all_ranks
from ringspan.runtime.files import write_atomic
from ringspan.runtime.settings import RunError
from ringspan.train.checkpoint import SETTINGS, STEPS, Checkpoints
from ringspan.train.config import TrainSettings
from ringspan.train.data import Corpus, select_on_all_ranks
from ringspan.train.distributed import DistributedContext, collective_seconds, init_distributed, shard_model
from ringspan.train.metrics import RunMetrics, StepMetrics, hidden_share, measure_communication
from ringspan.train.watchdog import (
    Heartbeat,
    Phase,
    RankStatus,
    Straggler,
    Watchdog,
    check_folder_is_shared,
    find_slowest_rank,
)

MODEL = "model"  # folder of the trained model, in the folder of the run

_STOP, _INTERRUPT = 1, 2  # why a run is to stop; the larger one wins
_SHARED_SECONDS = 60.0  # for a new file to be seen on all hosts: NFS remembers for so long that a folder was missing
_FORWARDED_SECONDS = 1.0  # in which torchrun forwards an interrupt that its ranks have received too


def _ignore(*_: Any) -> None:
    """The default callback."""


class Trainer:
    """A run: its model, optimizer, data, checkpoints and metrics. All ranks create it together.

    Joins the group of torchrun, uses the current process group, or runs in one process. The folder ``settings.out`` is
    locked until `close`; use the trainer as a context manager. With ``resume``, the run continues from the last
    checkpoint in the folder, also if that was written by a different number of ranks, or starts if there is none.

    Raises ValueError if the settings do not fit the folder, the data or the ranks, and RunError if the folder is in
    use or the ranks cannot meet.
    """

    def __init__(self, settings: TrainSettings, *, resume: bool = False) -> None:
        self.settings = settings = settings.with_absolute_paths()  # stored, so that any working directory will do
        self.next_step = 0
        self.status = RankStatus()
        self._stop_request = 0  # of this rank; a signal may set it at any moment
        self._stop_reason = 0  # the largest request of all ranks, agreed in each step
        self._trace: rs.Trace | None = None
        self._is_open = True
        _check_restarts(resume)
        # First of all: the launcher may die, and another run may take the folder, while ranks still meet.
        self._watchdog = _start_watchdog(Path(settings.out))
        try:
            self.checkpoints = Checkpoints(Path(settings.out) / "checkpoints", settings.keep)
            self.checkpoints.check_resume(settings, resume)
            self.context: DistributedContext = init_distributed(settings)
            with self._naming_lost_ranks():
                self._set_up(settings)
                if resume:
                    self.load()
        except BaseException:
            self._give_up()
            raise

    def _set_up(self, settings: TrainSettings) -> None:
        device = self.context.device.device
        check_folder_is_shared(
            Path(settings.out), device, min(_SHARED_SECONDS, collective_seconds(settings.timeout) / 2)
        )
        text = select_on_all_ranks(settings, bool(self.checkpoints.steps()), device)
        self.corpus, self.held_out = Corpus(text).split(settings.held_out)
        self.corpus.start_of(settings.seed, 0, settings.tokens)  # raises if the text is too short
        torch.manual_seed(settings.seed)
        self.model = LongNet(settings.model).to(device)
        if settings.dtype == "float64":
            self.model = self.model.double()
        self.model.checkpoint_layers(settings.recompute)
        shard_model(self.model, self.context, settings)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
        )
        self.metrics = RunMetrics(settings)
        self._communication_seconds = (
            measure_communication(self.context, settings) if settings.measure_communication else None
        )

    def run(
        self,
        on_step: Callable[[StepMetrics], None] = _ignore,
        on_heartbeats: Callable[[list[Heartbeat], list[Straggler]], None] = _ignore,
        on_interrupt: Callable[[], None] = _ignore,
        *,
        until: int | None = None,
        trace: Path | None = None,
        trace_steps: int = 3,
    ) -> None:
        """Train the remaining steps, or those before ``until``, and save checkpoints on the way and at the end.

        When the last step of the settings is done, the trained model is saved, too. The main rank writes the metrics.

        The first Ctrl-C saves a checkpoint after the current step, closes the trainer and raises KeyboardInterrupt; the
        second raises it at once. `request_stop` saves a checkpoint and returns.

        ``trace`` names a file for a trace of ``trace_steps`` steps (`rs.Ring.trace`), after a first one that warms up.

        Callbacks only observe: ``on_step`` runs after every step, on every rank; ``on_heartbeats`` about once a second,
        on the main rank and in the watchdog's thread; ``on_interrupt`` after the first Ctrl-C, in its own thread.
        """
        last = self.settings.steps if until is None else until
        self._stop_request = self._stop_reason = 0
        with (
            self._naming_lost_ranks(),
            self._recording(),
            self._watchdog.monitoring(self.status, self.context, self._heartbeat_recorder(on_heartbeats)),
            self._interrupts_request_stop(on_interrupt),
        ):
            self._train(last, on_step, trace, trace_steps)
            if self.next_step == self.settings.steps:
                self.save_model(Path(self.settings.out) / MODEL)
        if self._stop_reason == _INTERRUPT and self.next_step < last:
            self.close()
            raise KeyboardInterrupt(
                f"Interrupted after step {self.next_step} of {self.settings.steps}: the checkpoint is "
                f"{self.checkpoints.path_of(self.next_step)}."
            )

    def request_stop(self) -> None:
        """Ask all ranks to save a checkpoint and stop after the current step. Safe to call in a signal handler."""
        self._stop_request = max(self._stop_request, _STOP)

    def save(self) -> None:
        """Write a checkpoint. A collective."""
        self._enter(self.next_step - 1, "saving")
        self.checkpoints.save(self.next_step, self.model, self.optimizer, self.context.device.device)

    def load(self) -> None:
        """Continue from the last checkpoint, if there is one. A collective."""
        self.status.enter(self.next_step, "loading")
        self.next_step = self.checkpoints.load_latest(self.model, self.optimizer, self.context.device.device) or 0

    def save_model(self, folder: Path) -> None:
        """Gather the weights and write them on the main rank, for `LongNet.from_pretrained`. A collective."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=options)

        def write() -> None:
            if self.context.is_main:
                save_weights(folder, self.settings.model.to_json(), weights)  # type: ignore[arg-type]
                write_atomic(folder / STEPS, f"{self.next_step}\n")

        run_on_all_ranks(write, self.context.device.device)

    def close(self) -> None:
        """Unlock the folder, and leave the process group if the trainer created it. A collective. May be repeated."""
        if not self._is_open:
            return
        self._is_open = False
        dist.barrier()
        if self.context.owns_group:
            dist.destroy_process_group()
        self.context.peers.close()
        self._watchdog.stop()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif self._is_open:
            self._is_open = False
            self._give_up()

    def _give_up(self) -> None:
        """After an error: other ranks may be gone or still need this one, so only a group of one is destroyed."""
        context: DistributedContext | None = getattr(self, "context", None)
        if context is not None and context.owns_group and context.world_size == 1:
            dist.destroy_process_group()
        self._watchdog.stop(failed=True)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Write settings and open the metrics; if the main rank cannot, all ranks raise."""

        def start() -> None:
            if self.context.is_main:
                folder = Path(self.settings.out)
                folder.mkdir(parents=True, exist_ok=True)
                write_atomic(folder / SETTINGS, self.settings.to_json())
                self.corpus.selection.write(folder)
                self.metrics.open()

        try:
            run_on_all_ranks(start, self.context.device.device)
            yield
        finally:
            self.metrics.close()

    def _heartbeat_recorder(
        self, on_heartbeats: Callable[[list[Heartbeat], list[Straggler]], None]
    ) -> Callable[[list[Heartbeat], list[Straggler]], None]:
        def record(heartbeats: list[Heartbeat], stragglers: list[Straggler]) -> None:
            self.metrics.record_heartbeats(heartbeats, stragglers)
            on_heartbeats(heartbeats, stragglers)

        return record

    @contextmanager
    def _interrupts_request_stop(self, on_interrupt: Callable[[], None]) -> Iterator[None]:
        """Turn the first SIGINT into a request to stop; the second raises KeyboardInterrupt.

        Schedulers interrupt all processes of a job at once, and torchrun forwards its interrupt: that is one, not two.
        ``on_interrupt`` may print, so it runs in a thread: a signal can arrive in the middle of a write.
        """
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
            yield  # only the main thread may set handlers; an ignored signal stays ignored
            return

        first = 0.0

        def on_signal(number: int, frame: FrameType | None) -> None:
            nonlocal first
            if not first:
                first = time.monotonic()
                self._stop_request = _INTERRUPT
                threading.Thread(target=on_interrupt).start()
            elif not dist.is_torchelastic_launched() or time.monotonic() - first > _FORWARDED_SECONDS:
                signal.default_int_handler(number, frame)

        signal.signal(signal.SIGINT, on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _train(self, last: int, on_step: Callable[[StepMetrics], None], trace: Path | None, trace_steps: int) -> None:
        traced_from = max(self.next_step, min(self.next_step + 1, last - trace_steps))
        with ExitStack() as tracing:
            while self.next_step < last:
                if trace is not None and self.next_step == traced_from:
                    whole_run = self.context.ring.trace(trace, dist.group.WORLD)
                    self._trace = tracing.enter_context(whole_run)
                    tracing.callback(self._end_of_trace)
                step = self._step(self.next_step)
                if self.context.is_main:
                    self.metrics.record_step(step)
                on_step(step)
                if self.next_step % self.settings.save_every == 0 or self.next_step == last or self._stop_reason:
                    self.save()
                if self._stop_reason:
                    return
                if self.next_step == traced_from + trace_steps:
                    tracing.close()

    def _end_of_trace(self) -> None:
        self._trace = None

    def _enter(self, step: int, phase: Phase) -> None:
        """Begin a phase of a step, for the watchdog and for the trace."""
        self.status.enter(step, phase)
        if self._trace is not None:
            self._trace.phase(phase, step=step + 1)

    def _step(self, number: int) -> StepMetrics:
        settings, context = self.settings, self.context
        device = context.device.device
        learning_rate = settings.learning_rate_at(number)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        context.ring.reset_counters()
        start = time.perf_counter()
        loss = self._forward_backward(number)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        gradient_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        losses = all_gather_floats(loss.item(), device=device)[:, 0]
        check_finite(number, losses, gradient_norm, self.model, self.checkpoints)
        if settings.clip:
            clip_grads_with_norm_(parameters, settings.clip, norm)
        self._enter(number, "updating")
        self.optimizer.step()
        self.optimizer.zero_grad()
        by_rank = all_gather_floats(
            context.device.peak_bytes(), context.ring.counters.waiting_seconds, self._stop_request, device=device
        )
        self._stop_reason = int(by_rank[:, 2].max())  # the same on every rank
        waits = by_rank[:, 1].tolist()
        seconds = time.perf_counter() - start
        self.next_step = number + 1
        communication = self._communication_seconds
        return StepMetrics(
            number,
            loss=losses.mean().item(),  # each rank's share is already multiplied by the number of ranks
            gradient_norm=gradient_norm,
            learning_rate=learning_rate,
            seconds=seconds,
            tokens=settings.tokens * settings.batch * settings.accumulate * context.data_size,
            peak_bytes=int(by_rank[:, 0].max()),
            waiting_seconds=max(waits),
            hidden_share=None if communication is None else hidden_share(communication, max(waits), seconds),
            slowest_rank=find_slowest_rank(waits, context.ring.size, seconds),
        )

    def _forward_backward(self, number: int) -> Tensor:
        """Run all micro-steps; returns this rank's share of the loss. FSDP reduces gradients after the last one."""
        settings, context = self.settings, self.context
        fsdp = cast(FSDPModule, self.model)
        total = torch.zeros((), dtype=torch.float64, device=context.device.device)
        for micro in range(settings.accumulate):
            fsdp.set_requires_gradient_sync(micro == settings.accumulate - 1)
            self._enter(number, "reading")
            tokens, targets, documents = self._read_batch(number, micro)
            self._enter(number, "forward")
            with torch.autocast(context.device.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
                loss = self.model.loss(
                    tokens,
                    targets,
                    ring=context.ring,
                    **documents,
                    group=dist.group.WORLD,
                    gradients="averaged",
                )
            self._enter(number, "backward")
            (loss / settings.accumulate).backward()
            total += loss.detach().double() / settings.accumulate
        return total

    def _read_batch(self, step: int, micro: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """This rank's rows of the sequences of a micro-step, the byte that follows each row, and seq_len and lengths.

        With documents, which differ from sequence to sequence, all sequences are packed into one.
        """
        settings, context = self.settings, self.context
        first = ((step * settings.accumulate + micro) * context.data_size + context.data_rank) * settings.batch
        starts = [
            self.corpus.start_of(settings.seed, number, settings.tokens)
            for number in range(first, first + settings.batch)
        ]
        sequences, rows = [[start] for start in starts], settings.tokens
        lengths: tuple[int, ...] | None = None
        if settings.documents:
            sequences, rows = [starts], settings.tokens * settings.batch
            lengths = tuple(n for start in starts for n in _documents(self.corpus, start, start + settings.tokens))
        layout = context.ring.layout_of(rows, lengths)
        spans = [(span.start, span.stop) for span in layout.spans(context.ring.rank)]
        # One byte more than each part: the target of its last row may be another rank's row.
        parts = [
            [(start + first, start + stop + 1) for start, first, stop in _parts(sequence, settings.tokens, spans)]
            for sequence in sequences
        ]
        empty = torch.empty(0, dtype=torch.int64)
        tokens = [torch.cat([empty, *(self.corpus.read(a, b - 1) for a, b in each)]) for each in parts]
        targets = [torch.cat([empty, *(self._targets(a + 1, b) for a, b in each)]) for each in parts]
        device = context.device.device
        documents: dict[str, Any] = dict(seq_len=rows, lengths=lengths)
        return torch.stack(tokens).to(device), torch.stack(targets).to(device), documents

    def _targets(self, start: int, stop: int) -> Tensor:
        """Bytes to predict. With documents, the first byte of a file follows nothing and is ignored."""
        targets = self.corpus.read(start, stop).long()
        if self.settings.documents:
            for first in self.corpus.file_starts(start, stop):
                targets[first - start] = IGNORED
        return targets

    @contextmanager
    def _naming_lost_ranks(self) -> Iterator[None]:
        """Turn the error of a transfer or collective whose peer is lost into a RingError that names all lost ranks.

        Only after any other error is the port closed: this rank is not lost, and others ask.
        """
        rank, host = self.context.rank, socket.gethostname()

        def where() -> str:
            return f"rank {rank} on {host}: step {self.status.step + 1}, {self.status.phase}"

        with self.context.peers.naming_at_termination(where):
            try:
                yield
            except BaseException as error:
                is_lost = isinstance(error, dist.DistError) or isinstance(error.__cause__, dist.DistError)
                if isinstance(error, RunError) or not (is_lost or "gloo" in str(error)):
                    self.context.peers.close()
                    raise
                seconds = collective_seconds(self.settings.timeout)
                lost = self.context.peers.lost() or (
                    f"all other ranks are alive, but did not answer within {seconds:g} s"
                )
                raise rs.RingError(f"{where()}: {lost} ({error})") from error


def _documents(corpus: Corpus, start: int, stop: int) -> Iterator[int]:
    """The lengths of the parts of files in the bytes ``start`` to ``stop`` (exclusive)."""
    borders = [start, *corpus.file_starts(start + 1, stop), stop]
    return (after - before for before, after in pairwise(borders))


def _parts(starts: list[int], tokens: int, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Spans of packed sequences, cut where a sequence ends: its start in the text, and the rows of it.

    >>> list(_parts([100, 700], 10, [(2, 5), (8, 15)]))
    [(100, 2, 5), (100, 8, 10), (700, 0, 5)]
    """
    for first, stop in spans:
        for i in range(first // tokens, -(-stop // tokens)):
            yield starts[i], max(first - i * tokens, 0), min(stop - i * tokens, tokens)


def check_finite(step: int, losses: Tensor, gradient_norm: float, model: nn.Module, checkpoints: Checkpoints) -> None:
    """Raise RunError on all ranks, before weights change, if a loss or the gradient norm is NaN or infinite.

    ``losses`` holds the loss of each rank. The message names the step, the rank and the last good checkpoint.
    """
    bad_ranks = [str(rank) for rank, loss in enumerate(losses.tolist()) if not math.isfinite(loss)]
    if bad_ranks:
        what = f"the loss is not finite on rank{'s' * (len(bad_ranks) > 1)} {', '.join(bad_ranks)}"
    elif not math.isfinite(gradient_norm):
        what = f"gradients are not finite: {_first_bad_gradient(model)}"
    else:
        return
    raise RunError(
        f"step {step + 1}: {what}. Nothing was written; {checkpoints.last_good()}. Resuming with the same settings "
        "fails at the same step, unless the hardware failed: lower --learning-rate, or check the data"
    )


def _first_bad_gradient(model: nn.Module) -> str:
    """The first parameter whose gradient is not finite, and the ranks that hold the bad part of it. A collective."""
    gradients = [(name, _local(weight.grad)) for name, weight in model.named_parameters() if weight.grad is not None]
    bad = [number for number, (_, gradient) in enumerate(gradients) if not gradient.isfinite().all()]
    firsts = all_gather_floats(min(bad, default=len(gradients)), device=gradients[0][1].device)[:, 0].tolist()
    first = int(min(firsts))
    if first == len(gradients):
        return "each value is finite, but their norm overflows"
    ranks = [str(rank) for rank, number in enumerate(firsts) if number == first]
    return f"that of {gradients[first][0]}, in the shard of rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _check_restarts(resume: bool) -> None:
    """Raise ValueError if torchrun would restart a run that cannot resume."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and not resume:
        raise ValueError(
            f"torchrun --max-restarts={restarts} needs --resume auto: a restarted run finds its own checkpoints in the "
            "folder and would be refused. Without a checkpoint, --resume auto starts from the beginning"
        )


def _start_watchdog(folder: Path) -> Watchdog:
    """The watchdog of this rank; the rank is known from torchrun before there is a process group."""
    launched = dist.is_torchelastic_launched()
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]) if launched else 0
    watchdog = Watchdog(folder, rank, os.getppid() if launched else None)
    watchdog.start()
    return watchdog
