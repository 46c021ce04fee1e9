"""A process group with NCCL's rules and no GPU: every rank is a thread, and the real transport runs on it.

The rules (docs/nccl.md), each broken one a `BrokenRuleError` that names the rank, the hop and the peer:

- The first operation on the communicator is one of all ranks.
- Between two ranks, sends meet receives in the order in which they are posted, with equal sizes and dtypes.
- A batch completes as a whole, once all its peers have posted theirs. A rank's operations run one after another.
- Nothing is buffered: data move from buffer to buffer, as early or as late as the rules allow (`late`).
- Until its wait, a sent buffer stays as it is, a received one is neither read nor written, and both stay referenced.

One thread runs at a time. A hang is found at once, not by a timeout: no rank can go on, and not all have ended. The
current stream is modelled by the thread: it computes at once, and `wait` blocks it, as it blocks a stream.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "nccl_rules"
_POISON = 0xFF  # bytes of NaN


class BrokenRuleError(AssertionError):
    """NCCL would hang, or compute something else. (Not a RuntimeError: the transport takes that for a lost peer.)"""


class _OtherRankFailed(BaseException):
    """Ends a thread after another one has failed."""


class Threads:
    """One thread for each rank, of which one runs at a time, in an order drawn from ``seed``."""

    def __init__(self, size: int, seed: int) -> None:
        self._random, self._turn = random.Random(seed), threading.Condition()
        self._running = -1
        self._ready: dict[int, Callable[[], bool]] = dict.fromkeys(range(size), lambda: True)  # ranks that do not run
        self._local = threading.local()
        self.failure: BaseException | None = None
        self.describe_hang: Callable[[], str] = lambda: "all ranks wait"

    @property
    def rank(self) -> int:
        """The rank of the current thread; 0 in the main thread."""
        return getattr(self._local, "rank", 0)

    def run(self, task: Callable[[], Any]) -> list[Any]:
        """Run a task on every rank, and return its results. Raises the first failure."""
        results: dict[int, Any] = {}
        threads = [threading.Thread(target=self._run, args=(rank, task, results)) for rank in self._ready]
        for thread in threads:
            thread.start()
        with self._turn:
            self._pass_on()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        return [results[rank] for rank in sorted(results)]

    def _run(self, rank: int, task: Callable[[], Any], results: dict[int, Any]) -> None:
        self._local.rank = rank
        try:
            self._take_turn()
            results[rank] = task()
        except _OtherRankFailed:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        with self._turn:
            self._pass_on()

    def block_until(self, ready: Callable[[], bool]) -> None:
        """Let other ranks run until ``ready`` holds."""
        with self._turn:
            self._ready[self.rank] = ready
            self._pass_on()
        self._take_turn()

    def _take_turn(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self.failure is not None or self._running == self.rank)
        if self.failure is not None:
            raise _OtherRankFailed

    def _pass_on(self) -> None:
        able = [rank for rank, ready in self._ready.items() if ready()]
        if able:
            self._running = self._random.choice(able)
            del self._ready[self._running]
        elif self._ready and self.failure is None:
            self.failure = BrokenRuleError(self.describe_hang())
        self._turn.notify_all()


@dataclass(eq=False)
class Buffer:
    """One end of a message. The group keeps no reference to the tensor: that is the duty of the transport."""

    peer: int
    tensor: "ref[Tensor]"
    shape: tuple[int, str]  # elements, dtype
    place: range  # addresses
    sent: Tensor | None  # a copy of what is sent; None for a receive

    @classmethod
    def of(cls, peer: int, tensor: Tensor, *, is_sent: bool) -> "Buffer":
        copied = tensor.detach().clone() if is_sent else None
        place = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        return cls(peer, ref(tensor), (tensor.numel(), str(tensor.dtype)), place, copied)

    def __str__(self) -> str:
        return f"{self.shape[0]} x {self.shape[1].removeprefix('torch.')}"

    @property
    def bytes(self) -> int:
        return len(self.place)


def _raw(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).view(torch.uint8)


@dataclass(eq=False)
class Operation:
    """A batch or a collective of one rank, in the order of its stream."""

    rank: int
    label: str
    kind: str  # "batch", or the name of the collective
    previous: "Operation | None"
    buffers: list[Buffer] = field(default_factory=list)
    collective: tuple[Any, ...] = ()  # what all ranks must agree on, the tensors
    is_complete: bool = False
    is_waited_for: bool = False
    has_moved: bool = False
    moves: list[tuple[Buffer, "Operation", Buffer, "Operation"]] = field(default_factory=list)

    def with_peer(self, peer: int, *, is_sent: bool) -> list[Buffer]:
        return [b for b in self.buffers if b.peer == peer and (b.sent is not None) == is_sent]

    @property
    def peers(self) -> list[int]:
        return sorted({buffer.peer for buffer in self.buffers})

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.label}"


class Work:
    """What a batch or a collective returns."""

    def __init__(self, group: "RulesGroup", operation: Operation) -> None:
        self.group, self.operation = group, operation

    def wait(self, timeout: object = None) -> bool:
        self.group.wait_for(self.operation)
        return True


class RulesGroup(dist.ProcessGroup):
    """The process group of all threads: one object, whose `rank` is that of the current thread."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self._size = size
        self.prepare(seed=0, late=True)

    def prepare(self, *, seed: int, late: bool) -> None:
        """Forget everything, as a new communicator."""
        self.threads, self.late = Threads(self._size, seed), late
        self.threads.describe_hang = self._describe_hang
        self.first: dict[int, Operation] = {}
        self.pending: list[list[Operation]] = [[] for _ in range(self._size)]
        self.posted: list[list[Operation]] = [[] for _ in range(self._size)]
        self.batch: list[Operation | None] = [None] * self._size
        self.label_of: list[Callable[[], str]] = [lambda: ""] * self._size

    def rank(self) -> int:
        return self.threads.rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    # Point-to-point messages. torch brackets a batch for its own groups only, hence `grouped`.

    @contextmanager
    def grouped(self) -> Iterator[Operation]:
        operation = self.batch[self.rank()] = self._operation("batch")
        try:
            yield operation
        finally:
            self.batch[self.rank()] = None
        self._post(operation)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._message(tensors, peer, is_sent=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._message(tensors, peer, is_sent=False)

    def _message(self, tensors: list[Tensor], peer: int, *, is_sent: bool) -> None:
        (tensor,), batch = tensors, self.batch[self.rank()]
        what = f"rank {self.rank()}: {'sends to' if is_sent else 'receives from'} rank {peer}"
        if batch is None:
            raise BrokenRuleError(f"{what} outside of a batch: torch would create a communicator for the pair")
        what = f"{batch}: {what.split(': ')[1]}"
        if peer == self.rank():
            raise BrokenRuleError(f"{what}: itself")
        if not tensor.is_contiguous() or not tensor.numel():
            raise BrokenRuleError(f"{what} a tensor of shape {tuple(tensor.shape)}: must be contiguous, and not empty")
        new = Buffer.of(peer, tensor, is_sent=is_sent)
        in_use = [b for each in self.posted[self.rank()] if not each.is_waited_for for b in each.buffers]
        for old in (*in_use, *batch.buffers):
            overlap = max(old.place.start, new.place.start) < min(old.place.stop, new.place.stop)
            if overlap and (old.sent is None or new.sent is None):
                raise BrokenRuleError(f"{what} in memory of a message with rank {old.peer} that was not waited for")
        batch.buffers.append(new)

    # Collectives.

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> Work:
        (out,), (mine,) = outputs, inputs
        return self._collective("all_gather", _like(mine), out, mine)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        (x,) = tensors
        assert opts.reduceOp == dist.ReduceOp.SUM
        return self._collective("all_reduce", _like(x), [x], x)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        (x,) = tensors
        return self._collective("broadcast", (*_like(x), opts.rootRank), [x], x)

    def barrier(self, opts: object = None) -> Work:
        return self._collective("barrier", (), [], torch.empty(0))

    def _collective(self, kind: str, agreed: tuple[Any, ...], out: list[Tensor], mine: Tensor) -> Work:
        operation = self._operation(kind)
        operation.collective = agreed, out, mine
        self._post(operation)
        return Work(self, operation)

    # The communicator.

    def _operation(self, kind: str) -> Operation:
        rank = self.rank()
        before = self.posted[rank]
        label = (self.label_of[rank]() or f"batch {len(before)}") if kind == "batch" else kind
        return Operation(rank, label, kind, before[-1] if before else None)

    def _post(self, operation: Operation) -> None:
        rank = operation.rank
        if rank not in self.first:  # the host waits here, until all ranks have come
            self.first[rank] = operation
            self.threads.block_until(lambda: len(self.first) == self._size)
            if len({each.label for each in self.first.values()}) > 1:
                raise BrokenRuleError(f"first use of the communicator: not the same on all ranks: {self._first_uses()}")
        for buffer in operation.buffers:
            tensor = buffer.tensor()
            if buffer.sent is None and tensor is not None:
                _raw(tensor).fill_(_POISON)
        self.posted[rank].append(operation)
        self.pending[rank].append(operation)
        self._advance()
        self.threads.block_until(lambda: True)  # others may run now, or not

    def _advance(self) -> None:
        """Complete what can: a batch together with those of all its peers, a collective when all ranks are there."""
        while heads := self._able():
            for operation in heads.values():
                if operation.kind == "batch":
                    self._pair(operation, heads)
                self.pending[operation.rank].pop(0)
                operation.is_complete = True
            if next(iter(heads.values())).kind != "batch":
                _run_collective([heads[rank] for rank in sorted(heads)])
            elif not self.late:
                for operation in heads.values():
                    self._move(operation)

    def _able(self) -> dict[int, Operation]:
        heads = {rank: pending[0] for rank, pending in enumerate(self.pending) if pending}
        collectives = [each for each in heads.values() if each.kind != "batch"]
        if len(collectives) == self._size:
            wanted = {(each.kind, each.collective[0]) for each in collectives}
            if len(wanted) > 1:
                raise BrokenRuleError(f"ranks call different collectives: {wanted}")
            return heads
        able = {rank: each for rank, each in heads.items() if each.kind == "batch"}
        for rank, batch in able.items():
            for peer in batch.peers:
                if peer in able and rank in able[peer].peers:
                    _check_pair(batch, able[peer])
        while True:
            waiting = [r for r, b in able.items() if not all(p in able and r in able[p].peers for p in b.peers)]
            if not waiting:
                return able
            for rank in waiting:
                del able[rank]

    def _pair(self, operation: Operation, heads: dict[int, Operation]) -> None:
        for peer in operation.peers:
            other = heads[peer]
            sends, receives = operation.with_peer(peer, is_sent=True), other.with_peer(operation.rank, is_sent=False)
            for out, into in zip(sends, receives, strict=True):
                move = out, operation, into, other
                operation.moves.append(move)
                other.moves.append(move)

    def _move(self, operation: Operation) -> None:
        """Move the data of a batch, after those of everything before it on the streams of both ends."""
        if operation.has_moved:
            return
        operation.has_moved = True
        if operation.previous is not None:
            self._move(operation.previous)
        for out, sender, into, receiver in operation.moves:
            other = receiver if sender is operation else sender
            if other.has_moved:
                continue  # the wait of the other end has moved it
            if other.previous is not None:
                self._move(other.previous)
            source, target = _alive(out, sender), _alive(into, receiver)
            _check_unchanged(out, sender)
            if not (_raw(target) == _POISON).all():
                raise BrokenRuleError(
                    f"{receiver}: the buffer received from rank {into.peer} was written before the wait"
                )
            with torch.no_grad():
                target.copy_(source)

    def wait_for(self, operation: Operation) -> None:
        self.threads.block_until(lambda: operation.is_complete)
        self._move(operation)
        for out, sender, into, receiver in operation.moves:
            if sender is operation:
                _check_unchanged(out, sender)
            elif not torch.equal(_raw(_alive(into, receiver)), _raw(_sent(out))):
                raise BrokenRuleError(
                    f"{receiver}: the buffer received from rank {into.peer} was written before the wait"
                )
        operation.is_waited_for = True

    def run(self, task: Callable[[], Any], *, seed: int = 0, late: bool = True) -> list[Any]:
        """Run a task on every rank, on a new communicator. At its end, nothing may be pending."""
        self.prepare(seed=seed, late=late)
        batch_isend_irecv = dist.batch_isend_irecv

        def grouped(operations: list[dist.P2POp]) -> list[Work]:
            with self.grouped() as operation:
                batch_isend_irecv(operations)
            return [Work(self, operation)]

        with mock.patch.object(dist, "batch_isend_irecv", grouped):
            results = self.threads.run(task)
        for operation in (each for posted in self.posted for each in posted):
            if not operation.is_waited_for:
                raise BrokenRuleError(f"{operation}: was never waited for")
        return results

    def _first_uses(self) -> str:
        return "; ".join(str(self.first[rank]) for rank in sorted(self.first))

    def _describe_hang(self) -> str:
        """Why no rank can go on."""
        if self.first and len(self.first) < self._size:
            missing = [rank for rank in range(self._size) if rank not in self.first]
            return f"first use of the communicator: rank(s) {missing} take no part: {self._first_uses()}"
        lines = []
        for rank, pending in enumerate(self.pending):
            if not pending:
                continue
            for peer in pending[0].peers or [other for other in range(self._size) if other != rank]:
                head = next(iter(self.pending[peer]), None)
                if head is None:
                    lines.append(f"{pending[0]}, waits for rank {peer}, which has posted nothing more")
                elif rank not in head.peers:
                    lines.append(f"{pending[0]}, waits for rank {peer}, which is at {head.label} with {head.peers}")
        return "ranks wait for one another: " + "; ".join(lines)


def _like(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), str(x.dtype)


def _alive(buffer: Buffer, operation: Operation) -> Tensor:
    tensor = buffer.tensor()
    if tensor is None:
        what = "sent to" if buffer.sent is not None else "received from"
        raise BrokenRuleError(f"{operation}: the buffer {what} rank {buffer.peer} was freed before the wait")
    return tensor


def _sent(buffer: Buffer) -> Tensor:
    assert buffer.sent is not None
    return buffer.sent


def _check_unchanged(buffer: Buffer, operation: Operation) -> None:
    if not torch.equal(_raw(_alive(buffer, operation)), _raw(_sent(buffer))):
        raise BrokenRuleError(f"{operation}: the buffer sent to rank {buffer.peer} was changed before the wait")


def _check_pair(one: Operation, other: Operation) -> None:
    """One end sends what the other receives: as many messages, in this order, of these sizes."""
    sends, receives = one.with_peer(other.rank, is_sent=True), other.with_peer(one.rank, is_sent=False)
    if [b.shape for b in sends] != [b.shape for b in receives]:
        raise BrokenRuleError(
            f"{one}: sends [{', '.join(map(str, sends))}] to rank {other.rank}, which receives "
            f"[{', '.join(map(str, receives))}] in {other.label}"
        )


def _run_collective(operations: list[Operation]) -> None:
    kind = operations[0].kind
    mine = [each.collective[2].detach().clone() for each in operations]
    for each in operations:
        agreed, out, _ = each.collective
        found = mine
        if kind != "all_gather":
            found = [sum(mine[1:], start=mine[0]) if kind == "all_reduce" else mine[agreed[-1]]] if out else []
        with torch.no_grad():
            for x, y in zip(out, found, strict=True):
                x.copy_(y)


def _create(store: object, rank: int, size: int, timeout: object) -> RulesGroup:
    return RulesGroup(size)


dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


@contextmanager
def rules_group(size: int) -> Iterator[RulesGroup]:
    """The default group of the block: ``size`` ranks under NCCL's rules."""
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=size)
    try:
        group = dist.group.WORLD
        assert isinstance(group, RulesGroup)
        yield group
    finally:
        dist.destroy_process_group()
