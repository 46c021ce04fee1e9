"""The training loop: read, step, report, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ringspan.evidence.overlap import travel_seconds
from ringspan.models import LongNet
from ringspan.models.saving import save_weights
from ringspan.prices import plan
from ringspan.train.checkpoints import SETTINGS, Checkpoints
from ringspan.train.corpus import Corpus
from ringspan.train.mesh import Crew, assemble, spread
from ringspan.train.settings import TrainSettings

BITS = 1 / 0.6931471805599453  # of a nat


@dataclass(frozen=True)
class Step:
    """What one step did: the mean loss over all ranks, and what the rank that spent most has spent."""

    number: int
    loss: float  # nats per byte
    gradient_norm: float
    rate: float
    seconds: float
    tokens: int
    peak_bytes: int  # since the run began
    waiting_seconds: float
    hidden_share: float | None  # of the time that its parcels take; None where nothing travels

    @property
    def bits_per_byte(self) -> float:
        return self.loss * BITS

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class TravelTime:
    """Seconds that all parcels of a micro-step take, forward and backward, with nothing else to do."""

    seconds: float

    @staticmethod
    def measure(crew: Crew, settings: TrainSettings) -> TravelTime:
        """Measured for a forward walk of each layer's pattern; backward moves more bytes, in proportion."""
        model, rows = settings.model, crew.ring.layout_of(settings.tokens).rows_of(crew.ring.rank)
        dtype = torch.bfloat16 if settings.dtype == "bfloat16" else getattr(torch, settings.dtype)
        shape = (settings.batch, rows, model.kv_heads, model.head_dim)
        k, v = (torch.zeros(shape, dtype=dtype, device=crew.device.device) for _ in range(2))
        total, known = 0.0, {}
        for layer in range(model.layers):
            pattern = model.pattern_of(layer)
            if pattern not in known:
                priced = plan(
                    pattern,
                    settings.tokens,
                    ring_size=crew.ring.size,
                    layout=crew.ring.layout,
                    causal=True,
                    batch=settings.batch,
                    heads=model.heads,
                    kv_heads=model.kv_heads,
                    dim=model.head_dim,
                    dtype=dtype,
                )
                sent = [sum(priced.bytes_sent(r, backward=b) for r in range(crew.ring.size)) for b in (False, True)]
                seconds = travel_seconds(crew.ring, pattern, settings.tokens, k, v, causal=True)
                known[pattern] = seconds * (1 + sent[1] / sent[0]) if sent[0] else 0.0
            total += known[pattern]
        return TravelTime(total)

    def hidden_share(self, waited: float) -> float | None:
        return max(0.0, 1 - waited / self.seconds) if self.seconds else None


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
        self.travel = TravelTime.measure(self.crew, settings)

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

    def close(self) -> None:
        """Leave the group; all ranks together."""
        dist.barrier()
        dist.destroy_process_group()

    def _step(self, number: int) -> Step:
        settings, crew = self.settings, self.crew
        rate = settings.rate_at(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        crew.ring.reset_counters()
        start = time.perf_counter()
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
        clip = settings.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)  # each rank's share was multiplied by the number of ranks
        waited = crew.ring.counters.waiting_seconds
        hidden = self.travel.hidden_share(waited / settings.accumulate)
        worst = torch.tensor(
            [crew.device.peak_bytes(), waited, 0.0 if hidden is None else -hidden], dtype=torch.float64
        )
        worst = worst.to(crew.device.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        self.next_step = number + 1
        return Step(
            number,
            loss=total.item() / crew.world,
            gradient_norm=(norm.full_tensor() if isinstance(norm, DTensor) else norm).item(),
            rate=rate,
            seconds=time.perf_counter() - start,
            tokens=settings.tokens * settings.batch * settings.accumulate * crew.data_size,
            peak_bytes=int(worst[0]),
            waiting_seconds=worst[1].item(),
            hidden_share=None if hidden is None else -worst[2].item(),
        )

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
