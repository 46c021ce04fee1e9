"""The training loop: read, step, report, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ringspan.models import LongNet
from ringspan.models.saving import save_weights
from ringspan.train.checkpoints import SETTINGS, Checkpoints
from ringspan.train.corpus import Corpus
from ringspan.train.figures import Step, hidden_share, travel_of_a_step
from ringspan.train.mesh import Crew, assemble, spread
from ringspan.train.settings import TrainSettings


class Trainer:
    """A run: model, optimiser, text, and where it stands."""

    def __init__(self, settings: TrainSettings, *, resume: bool = False) -> None:
        self.settings = settings
        self.checkpoints = Checkpoints(Path(settings.out) / "checkpoints", settings.keep)
        self.checkpoints.check_before(settings, resume)
        self.crew: Crew = assemble(settings)
        self.corpus, self.held_out = Corpus.of(settings.data).split(settings.held_out)
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
        self.travel = travel_of_a_step(self.crew, settings)

    @staticmethod
    def resumed(settings: TrainSettings) -> Trainer:
        """A run that goes on from the last checkpoint, also of another number of ranks; from the start without one."""
        trainer = Trainer(settings, resume=True)
        trainer.next_step = trainer.checkpoints.load_latest(trainer.model, trainer.optimizer) or 0
        return trainer

    def run(self, report: Callable[[Step], None], until: int | None = None) -> None:
        """The steps that are left, or those before ``until``, with a checkpoint now and then and at the end."""
        last = self.settings.steps if until is None else until
        if self.crew.is_speaker:
            folder = Path(self.settings.out)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SETTINGS).write_text(self.settings.to_json())
        while self.next_step < last:
            report(self._step(self.next_step))
            if self.next_step % self.settings.save_every == 0 or self.next_step == last:
                self.checkpoints.save(self.next_step, self.model, self.optimizer)

    def save_model(self, folder: Path) -> None:
        """The weights as `LongNet.from_pretrained` reads them, from all ranks; one of them writes."""
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=whole)
        if self.crew.is_speaker:
            save_weights(folder, self.settings.model.to_json(), weights)  # type: ignore[arg-type]
        dist.barrier()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the group; all ranks together, unless something went wrong: then nobody is waited for."""
        if kind is None:
            dist.barrier()
        dist.destroy_process_group()

    def _step(self, number: int) -> Step:
        settings, crew = self.settings, self.crew
        rate = settings.rate_at(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        crew.ring.reset_counters()
        start = time.perf_counter()
        loss = self._micro_steps(number)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss)
        most = torch.tensor([crew.device.peak_bytes(), crew.ring.counters.waiting_seconds], dtype=torch.float64)
        most = most.to(crew.device.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        seconds = time.perf_counter() - start
        self.next_step = number + 1
        return Step(
            number,
            loss=loss.item() / crew.world,  # each rank's share was multiplied by the number of ranks
            gradient_norm=(norm.full_tensor() if isinstance(norm, DTensor) else norm).item(),
            rate=rate,
            seconds=seconds,
            tokens=settings.tokens * settings.batch * settings.accumulate * crew.data_size,
            peak_bytes=int(most[0]),
            waiting_seconds=most[1].item(),
            hidden_share=hidden_share(self.travel, most[1].item(), seconds),
        )

    def _micro_steps(self, number: int) -> Tensor:
        """Forward and backward of all micro-steps; this rank's share of the loss. FSDP reduces after the last one."""
        settings, crew = self.settings, self.crew
        fsdp = cast(FSDPModule, self.model)
        total = torch.zeros((), dtype=torch.float64, device=crew.device.device)
        for micro in range(settings.accumulate):
            fsdp.set_requires_gradient_sync(micro == settings.accumulate - 1)
            tokens, targets = self._rows(number, micro)
            with torch.autocast(crew.device.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
                loss = self.model.loss(
                    tokens,
                    targets,
                    ring=crew.ring,
                    seq_len=settings.tokens,
                    group=dist.group.WORLD,
                    gradients="averaged",
                )
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
