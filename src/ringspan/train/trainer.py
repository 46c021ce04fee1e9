"""A loss or a gradient that is not finite: which step, which rank, which weight. All ranks stop alike."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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
from ringspan.runtime.collectives import all_gather_floats, run_on_all_ranks
from ringspan.runtime.files import write_atomic
from ringspan.runtime.settings import RunError
from ringspan.train.checkpoint import SETTINGS, STEPS, Checkpoints
from ringspan.train.config import TrainSettings
from ringspan.train.data import Corpus, select_together
from ringspan.train.distributed import Crew, assemble, spread
from ringspan.train.metrics import Step, hidden_share, travel_of_a_step
from ringspan.train.watchdog import Pulse, late_rank


def check_finite(step: int, losses: Tensor, gradient_norm: float, model: nn.Module, saved: Checkpoints) -> None:
    """Raise on all ranks, before any weight is changed, if a rank's loss or the norm of the gradients is not finite.

    ``losses`` has one for each rank; ``saved`` knows where the last good checkpoint is.
    """
    lost = [str(rank) for rank, loss in enumerate(losses.tolist()) if not math.isfinite(loss)]
    if lost:
        what = f"the loss is not finite on rank{'s' * (len(lost) > 1)} {', '.join(lost)}"
    elif not math.isfinite(gradient_norm):
        what = f"gradients are not finite: {_first_bad_gradient(model)}"
    else:
        return
    raise RunError(
        f"step {step + 1}: {what}. Nothing was written; {saved.last_good()}. Going on from it with the same settings "
        "leads here again, unless the hardware erred: try a lower --learning-rate, or look at the data"
    )


def _first_bad_gradient(model: nn.Module) -> str:
    """The first weight with a gradient that is not finite, and the ranks that hold the bad part of it."""
    gradients = [(name, _local(weight.grad)) for name, weight in model.named_parameters() if weight.grad is not None]
    bad = [number for number, (_, gradient) in enumerate(gradients) if not gradient.isfinite().all()]
    firsts = all_gather_floats(min(bad, default=len(gradients)), device=gradients[0][1].device)[:, 0].tolist()
    first = int(min(firsts))
    if first == len(gradients):
        return "each number is, but their norm overflows"
    ranks = [str(rank) for rank, number in enumerate(firsts) if number == first]
    return f"that of {gradients[first][0]}, in the part of rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@contextmanager
def interrupts_to(ask: Callable[[], None], tell: Callable[[], None]) -> Iterator[None]:
    """While the block runs, the first SIGINT calls ``ask`` and ``tell``; the next one raises KeyboardInterrupt.

    ``tell`` may print: it runs in a thread of its own, since a signal can arrive in the middle of a write.
    """

    def on_first(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ask()
        threading.Thread(target=tell).start()

    before = signal.signal(signal.SIGINT, on_first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Trainer:
    """A run: model, optimiser, text, and where it stands."""

    def __init__(self, settings: TrainSettings, *, resume: bool = False) -> None:
        settings = settings.with_absolute_paths()  # they are stored: a run can be evaluated from any folder
        self.settings, self.pulse = settings, Pulse()
        self.checkpoints = Checkpoints(Path(settings.out) / "checkpoints", settings.keep)
        self.checkpoints.check_before(settings, resume)
        self.crew: Crew = assemble(settings)
        text = select_together(settings, bool(self.checkpoints.steps()), self.crew.device.device)
        self.corpus, self.held_out = Corpus(text).split(settings.held_out)
        self.corpus.start_of(settings.seed, 0, settings.tokens)  # too short a text is found out now
        torch.manual_seed(settings.seed)
        model = LongNet(settings.model).to(self.crew.device.device)
        if settings.dtype == "float64":
            model = model.double()
        model.checkpoint_layers(settings.recompute)
        spread(model, self.crew, settings)
        self.model = model
        decayed = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
        )
        self.next_step = 0
        self.is_stopping = False  # on all ranks, because one was asked to stop
        self._is_asked_to_stop = False
        self.travel = travel_of_a_step(self.crew, settings)

    @staticmethod
    def resumed(settings: TrainSettings) -> Trainer:
        """A run that goes on from the last checkpoint, also of another number of ranks; from the start without one."""
        trainer = Trainer(settings, resume=True)
        trainer.load()
        return trainer

    def load(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        self.pulse.at(self.next_step, "loading")
        self.next_step = self.checkpoints.load_latest(self.model, self.optimizer, self.crew.device.device) or 0

    def run(self, report: Callable[[Step], None], until: int | None = None) -> None:
        """The steps that are left, or those before ``until``, with a checkpoint now and then and at the end.

        Returns early, after a checkpoint, if any rank was asked to stop.
        """
        last = self.settings.steps if until is None else until
        try:
            run_on_all_ranks(self._write_settings, self.crew.device.device)
            while self.next_step < last and not self.is_stopping:
                report(self._step(self.next_step))
                if self.next_step % self.settings.save_every == 0 or self.next_step == last or self.is_stopping:
                    self.save()
        except RuntimeError as error:
            explained = self._explained(error)
            if explained is None:
                raise
            raise explained from error

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop after the step that is running. Does next to nothing: a signal handler may call it."""
        self._is_asked_to_stop = True

    def save(self) -> None:
        """Write a checkpoint; all ranks together."""
        self.pulse.at(self.next_step - 1, "saving")
        self.checkpoints.save(self.next_step, self.model, self.optimizer, self.crew.device.device)

    def save_model(self, folder: Path) -> None:
        """The weights as `LongNet.from_pretrained` reads them, from all ranks; one of them writes."""
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=whole)

        def write() -> None:
            if self.crew.is_speaker:
                save_weights(folder, self.settings.model.to_json(), weights)  # type: ignore[arg-type]
                write_atomic(folder / STEPS, f"{self.next_step}\n")

        run_on_all_ranks(write, self.crew.device.device)

    def close(self) -> None:
        """Leave the group; all ranks together, when all is well."""
        dist.barrier()
        dist.destroy_process_group()

    def _write_settings(self) -> None:
        if self.crew.is_speaker:
            folder = Path(self.settings.out)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / SETTINGS, self.settings.to_json())
            self.corpus.selection.write(folder)

    def _step(self, number: int) -> Step:
        settings, crew = self.settings, self.crew
        rate = settings.rate_at(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        crew.ring.reset_counters()
        start = time.perf_counter()
        loss = self._micro_steps(number)
        weights = [weight for weight in self.model.parameters() if weight.grad is not None]
        norm = get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        gradient_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        losses = all_gather_floats(loss.item(), device=crew.device.device)[:, 0]
        check_finite(number, losses, gradient_norm, self.model, self.checkpoints)
        if settings.clip:
            clip_grads_with_norm_(weights, settings.clip, norm)
        self.pulse.at(number, "updating")
        self.optimizer.step()
        self.optimizer.zero_grad()
        spent = crew.device.peak_bytes(), crew.ring.counters.waiting_seconds
        figures = all_gather_floats(*spent, self._is_asked_to_stop, device=crew.device.device)
        self.is_stopping = bool(figures[:, 2].any())  # the same on every rank
        waits = figures[:, 1].tolist()
        seconds = time.perf_counter() - start
        self.next_step = number + 1
        return Step(
            number,
            loss=losses.mean().item(),  # each rank's share was multiplied by the number of ranks
            gradient_norm=gradient_norm,
            rate=rate,
            seconds=seconds,
            tokens=settings.tokens * settings.batch * settings.accumulate * crew.data_size,
            peak_bytes=int(figures[:, 0].max()),
            waiting_seconds=max(waits),
            hidden_share=hidden_share(self.travel, max(waits), seconds),
            late_rank=late_rank(waits, crew.ring.size, seconds),
        )

    def _micro_steps(self, number: int) -> Tensor:
        """Forward and backward of all micro-steps; this rank's share of the loss. FSDP reduces after the last one."""
        settings, crew = self.settings, self.crew
        fsdp = cast(FSDPModule, self.model)
        total = torch.zeros((), dtype=torch.float64, device=crew.device.device)
        for micro in range(settings.accumulate):
            fsdp.set_requires_gradient_sync(micro == settings.accumulate - 1)
            self.pulse.at(number, "reading")
            tokens, targets = self._rows(number, micro)
            self.pulse.at(number, "forward")
            with torch.autocast(crew.device.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
                loss = self.model.loss(
                    tokens,
                    targets,
                    ring=crew.ring,
                    seq_len=settings.tokens,
                    group=dist.group.WORLD,
                    gradients="averaged",
                )
            self.pulse.at(number, "backward")
            (loss / settings.accumulate).backward()
            total += loss.detach().double() / settings.accumulate
        return total

    def _rows(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of this micro-step's sequences, and the byte that follows each."""
        settings, crew = self.settings, self.crew
        layout = crew.ring.layout_of(settings.tokens)
        first = ((step * settings.accumulate + micro) * crew.data_size + crew.data_rank) * settings.batch
        sequences = []
        for number in range(first, first + settings.batch):
            begin = self.corpus.start_of(settings.seed, number, settings.tokens)
            spans = layout.spans(crew.ring.rank)
            # One byte more than the span: the target of its last row may be another rank's row.
            sequences.append([self.corpus.read(begin + s.start, begin + s.stop + 1) for s in spans])
        tokens = torch.stack([torch.cat([part[:-1] for part in parts]) for parts in sequences])
        targets = torch.stack([torch.cat([part[1:] for part in parts]) for parts in sequences])
        return tokens.long().to(crew.device.device), targets.long().to(crew.device.device)

    def _explained(self, error: RuntimeError) -> rs.RingError | None:
        """What a collective says of a lost rank, in plain words; None if the error is another."""
        lost = isinstance(error, dist.DistError) or "gloo" in str(error)
        if not lost or isinstance(error, (RunError, rs.RingError)):
            return None
        return rs.RingError(
            f"rank {self.crew.rank}: step {self.pulse.step + 1}, {self.pulse.doing}: another rank is gone, or did not "
            f"answer within {self.settings.patience:g} s ({error})"
        )
