"""What a rank does when it is examined: one question after the other, each answered with figures, never with opinions.

Every rank of a ring runs `examine` at the same time; `ringspan.verify.verdicts` turns the answers of all ranks into
verdicts. A question that raises is answered with the error, and the questions after it are not asked: its ring may be
in pieces.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.evidence.device import Device
from ringspan.evidence.flops import count_flops
from ringspan.evidence.machine import busy_seconds
from ringspan.evidence.overlap import travel_seconds
from ringspan.evidence.wire import loopback_bytes_sent, why_not_seen
from ringspan.oracle import dense_attention, multiplicity
from ringspan.prices import plan
from ringspan.verify.settings import Settings, Size
from ringspan.verify.subject import Bound, Subject, shortened

_PERTURBATION = 1000.0  # added to a value: every row that sees it moves by far more than rounding
_BORDERS, _TOKENS_AT_A_BORDER = 3, 4


@dataclass(frozen=True)
class Examination:
    """A rank with its subject, its device, and the lengths to look at."""

    bound: Bound
    device: Device
    settings: Settings

    @property
    def group(self) -> dist.ProcessGroup:
        return self.bound.ring.group

    def own_rows(self, size: Size, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """This rank's rows of q, k and v: made here, and nowhere else."""
        generator = torch.Generator().manual_seed(self.bound.ring.rank)
        rows = self.bound.layout_of(size.tokens).rows_of(self.bound.ring.rank)
        shape = (1, rows, size.heads, size.dim)
        made = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3))
        return [x.to(self.device.device).requires_grad_() for x in made]

    def attend(self, tensors: list[Tensor], size: Size, causal: bool) -> Tensor:
        """Attention with the pattern, shortened where the sequence is."""
        pattern = shortened(self.bound.subject.pattern, size.tokens)
        return self.bound.attend(tensors[0], tensors[1], tensors[2], pattern, causal, size.tokens)

    def both_passes(self, tensors: list[Tensor], size: Size, causal: bool) -> None:
        out = self.attend(tensors, size, causal)
        torch.autograd.grad(out, tensors, torch.ones_like(out))

    def barrier(self) -> None:
        dist.barrier(self.group)


@dataclass(frozen=True)
class Failed:
    """A question without an answer, and why."""

    reason: str


@dataclass(frozen=True)
class MemoryAnswer:
    """Peak growth of the passes that the settings ask for, this rank's rows included."""

    peak_bytes: int
    alone_counts: bool  # as in the settings: whether a ring of one is comparable


@dataclass(frozen=True)
class ExactAnswer:
    """Which rows the rank held and gave back, and how far they are from the dense oracle, causal and not."""

    positions: tuple[int, ...]
    returned_rows: int
    output_error: float
    gradient_error: float
    allowed_output: float
    allowed_gradient: float


@dataclass(frozen=True)
class ReachAnswer:
    """What moved when the value of one token changed in one head: (row, head) pairs of this rank, causal or not."""

    causal: bool
    token: int
    moved_far: int  # rows of this rank that may see the token, which another rank holds, and did move
    missed: int  # may see it, and did not move
    leaked: int  # may not see it, and moved
    other_heads: int  # moved in a head that was not touched


@dataclass(frozen=True)
class BytesAnswer:
    """What this rank sent, by the plan and by its own count, and what the interface saw of all ranks together."""

    causal: bool
    planned: int | None
    counted: int | None
    needed: int  # bytes of K and V rows that the ranks together lack: not causal, nothing less can do
    interface: int | None
    why_not_seen: str


@dataclass(frozen=True)
class WorkAnswer:
    flops: int


@dataclass(frozen=True)
class SpeedAnswer:
    """Seconds of forward and backward, trial by trial; none where ranks share a core, and speed means nothing."""

    seconds: tuple[float, ...]
    window_seconds: float  # from before the first trial to after the last
    own_cpu_seconds: float  # of this process meanwhile
    busy_cpu_seconds: float  # of the whole machine meanwhile


@dataclass(frozen=True)
class OverlapAnswer:
    """Seconds that a forward waited for parcels, and seconds that the same parcels take with nothing else to do."""

    waited: float
    travelled: float


Answers = dict[str, Any]


def examine(group: dist.ProcessGroup, device: Device, subject: Subject, settings: Settings) -> Answers:
    """Ask this rank everything. Memory comes first, while the process is fresh."""
    examination = Examination(subject.on(group), device, settings)
    answers: Answers = {}
    broken = ""
    for name, ask in QUESTIONS.items():
        if broken:
            answers[name] = Failed(f"not asked, since {broken} failed")
            continue
        try:
            answers[name] = ask(examination)
        except Exception as error:  # the subject may be anybody's code: whatever it raises is an answer
            answers[name] = Failed("".join(traceback.format_exception_only(error)).strip())
            broken = name
    return answers


def ask_memory(examination: Examination) -> MemoryAnswer:
    size = examination.settings.memory
    small = Size(64 * examination.bound.ring.size, size.heads, size.dim)
    # Threads, libraries and connections are there before; their memory is not the sequence's.
    examination.both_passes(examination.own_rows(small), small, causal=True)
    examination.barrier()

    def run() -> None:
        tensors = examination.own_rows(size)
        if examination.settings.memory_backward:
            examination.both_passes(tensors, size, causal=True)
        else:
            examination.attend([x.detach() for x in tensors], size, causal=True)

    peak = examination.device.peak_growth(run)
    examination.barrier()
    return MemoryAnswer(peak, examination.settings.memory_alone_counts)


def ask_exact(examination: Examination) -> ExactAnswer:
    size, bound = examination.settings.exact, examination.bound
    dtype = getattr(torch, examination.settings.exact_dtype)
    pattern = shortened(bound.subject.pattern, size.tokens)
    errors, allowed, returned = [0.0, 0.0], [0.0, 0.0], 0
    for causal in (False, True):
        whole = _whole(size, dtype)
        mine = [bound.ring.split_sequence(x).to(examination.device.device).requires_grad_() for x in whole]
        out = examination.attend(mine, size, causal)
        returned = out.shape[1]
        found = [out, *torch.autograd.grad(out.square().sum(), mine)]
        exact = _oracle([x.double() for x in whole], pattern, causal)
        rounded = exact if dtype == torch.float64 else _oracle(whole, pattern, causal)
        for i, (have, want, low) in enumerate(zip(found, exact, rounded, strict=True)):
            wanted = bound.ring.split_sequence(want)
            place = min(i, 1)  # the output, or one of the gradients
            errors[place] = max(errors[place], _largest(have.detach().cpu().double() - wanted))
            # A 64-bit result must be right to 1e-12; a shorter one may err ten times as much as dense attention in it.
            limit = 1e-12 if dtype == torch.float64 else 10 * _largest(low.double() - want)
            allowed[place] = max(allowed[place], limit)
    positions = tuple(bound.ring.positions(size.tokens).tolist())
    return ExactAnswer(positions, returned, *errors, *allowed)


def _whole(size: Size, dtype: torch.dtype) -> list[Tensor]:
    """The same q, k and v on every rank."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, size.tokens, size.heads, size.dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def _oracle(tensors: list[Tensor], pattern: Any, causal: bool) -> list[Tensor]:
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    out, _ = dense_attention(*tensors, pattern=pattern, causal=causal)
    return [x.detach() for x in (out, *torch.autograd.grad(out.square().sum(), tensors))]


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item() if difference.numel() else 0.0


def ask_reach(examination: Examination) -> list[ReachAnswer]:
    """Change one token at a time, and see which rows move: by the definition, no others may, and those must."""
    size, bound = examination.settings.exact, examination.bound
    dtype = getattr(torch, examination.settings.exact_dtype)
    pattern = shortened(bound.subject.pattern, size.tokens)
    layout = bound.layout_of(size.tokens)
    positions = bound.ring.positions(size.tokens)
    starts = sorted(spans[0].start for r in range(layout.ring_size) if (spans := layout.spans(r)))
    # A few tokens from each border on: a dilated head selects but one of them.
    near = (start + i for start in starts[:_BORDERS] for i in range(_TOKENS_AT_A_BORDER))
    tokens = sorted({size.tokens - 1, *(token for token in near if token < size.tokens)})
    head = min(1, size.heads - 1)
    noise = 1e4 * torch.finfo(dtype).eps
    answers = []
    for causal in (False, True):
        sees = multiplicity(pattern, size.tokens, size.heads, causal=causal)[head][positions] > 0

        def rows_of_output(token: int | None, causal: bool = causal) -> Tensor:
            q, k, v = (bound.ring.split_sequence(x).clone() for x in _whole(size, dtype))
            if token is not None:
                v[:, positions == token, head] += _PERTURBATION
            with torch.no_grad():
                moved = examination.attend([x.to(examination.device.device) for x in (q, k, v)], size, causal)
            return moved[0].cpu()

        before = rows_of_output(None)
        for token in tokens:
            moved = (rows_of_output(token) - before).abs().amax(-1) > noise  # (rows, heads)
            mine, may_see = moved[:, head], sees[:, token]
            is_mine = bool((positions == token).any())
            answers.append(
                ReachAnswer(
                    causal,
                    token,
                    moved_far=0 if is_mine else int((mine & may_see).sum()),
                    missed=int((~mine & may_see).sum()),
                    leaked=int((mine & ~may_see).sum()),
                    other_heads=int(moved.sum() - mine.sum()),
                )
            )
    return answers


def ask_bytes(examination: Examination) -> list[BytesAnswer]:
    size, bound = examination.settings.counted, examination.bound
    ring, subject = bound.ring, bound.subject
    tensors = [x.detach() for x in examination.own_rows(size)]
    unseen = why_not_seen(examination.group)
    answers = []
    for causal in (False, True):
        seen = []
        for _ in range(1 if unseen else 3):  # others may use the interface too: the least is nearest the truth
            ring.reset_counters()
            examination.barrier()
            before = 0 if unseen else loopback_bytes_sent()
            examination.barrier()  # nobody sends before everybody has looked
            with torch.no_grad():
                examination.attend(tensors, size, causal)
            examination.barrier()
            seen.append(0 if unseen else loopback_bytes_sent() - before)
            examination.barrier()
        planned = counted = None
        if subject.is_ringspan:
            priced = plan(
                shortened(subject.pattern, size.tokens),
                size.tokens,
                ring_size=ring.size,
                layout=ring.layout,
                causal=causal,
                heads=size.heads,
                dim=size.dim,
            )
            planned, counted = priced.bytes_sent(ring.rank), ring.counters.bytes_sent
        lacking = 0 if causal or subject.is_ringspan else size.tokens * (ring.size - 1)
        needed = lacking * 2 * size.heads * size.dim * tensors[0].element_size()
        answers.append(BytesAnswer(causal, planned, counted, needed, None if unseen else min(seen), unseen))
    return answers


def ask_work(examination: Examination) -> WorkAnswer:
    size = examination.settings.counted
    tensors = examination.own_rows(size)
    return WorkAnswer(count_flops(lambda: examination.both_passes(tensors, size, causal=False)))


def ask_speed(examination: Examination) -> SpeedAnswer:
    size = examination.settings.speed
    tensors = examination.own_rows(size)
    if not examination.settings.trials:
        return SpeedAnswer((), 0.0, 0.0, 0.0)
    seconds = []
    examination.barrier()
    start, own, busy = time.perf_counter(), time.process_time(), busy_seconds()
    for _ in range(examination.settings.trials + 1):
        examination.barrier()
        seconds.append(examination.device.seconds(lambda: examination.both_passes(tensors, size, causal=True)))
    window, own, busy = time.perf_counter() - start, time.process_time() - own, busy_seconds() - busy
    return SpeedAnswer(tuple(seconds[1:]), window, own, busy)  # the first one warmed up


def ask_overlap(examination: Examination) -> OverlapAnswer | None:
    """How long a forward waits for parcels, beside the same walk that computes nothing. Only ringspan can be asked."""
    size, bound = examination.settings.speed, examination.bound
    if not bound.subject.is_ringspan or not examination.settings.trials:
        return None
    tensors = [x.detach() for x in examination.own_rows(size)]
    pattern = shortened(bound.subject.pattern, size.tokens)
    waited, travelled = [], []
    for _ in range(examination.settings.trials):
        examination.barrier()
        bound.ring.reset_counters()
        with torch.no_grad():
            examination.attend(tensors, size, causal=True)
        waited.append(bound.ring.counters.waiting_seconds)
        travelled.append(travel_seconds(bound.ring, pattern, size.tokens, tensors[1], tensors[2], causal=True))
    return OverlapAnswer(statistics.median(waited), statistics.median(travelled))


QUESTIONS: dict[str, Callable[[Examination], Any]] = {
    "memory": ask_memory,
    "exact": ask_exact,
    "reach": ask_reach,
    "bytes": ask_bytes,
    "work": ask_work,
    "speed": ask_speed,
    "overlap": ask_overlap,
}
