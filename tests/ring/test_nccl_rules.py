"""Rings under NCCL's rules (tests/ring/nccl_rules.py): no plan breaks one, and each kind of fault is found."""

from dataclasses import dataclass, field
from functools import partial
from math import lcm
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan import schedule
from ringspan.oracle import dense_attention
from ringspan.ring import transport
from ringspan.ring.transport import GroupTransport, Messages
from tests.exactness import inputs, loss_weights, weighted_loss
from tests.ring.nccl_rules import BrokenRuleError, RulesGroup, rules_group
from tests.strategies import examples, lengths, patterns, routings, sinks, softcaps, tile_costs

pytestmark = pytest.mark.filterwarnings("ignore:.*selects row")
close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


@dataclass
class Step:
    """A forward and a backward pass on every rank, compared with the oracle."""

    size: int
    tensors: list[Tensor]
    options: dict[str, Any]
    layout: Any = "contiguous"
    routing: Any = "relay"
    head_ranks: int = 1
    states_length: bool = True
    optimize: Any = "auto"
    passes: int = 1
    found: dict[int, rs.Ring] = field(default_factory=dict)

    def run(self, group: RulesGroup, *, seed: int = 0, late: bool = True) -> None:
        right, right_lse = dense_attention(*self.tensors, **self.options)
        self.weights = loss_weights(right, right_lse)
        self.inputs = [*self.tensors, *([] if self.options.get("sinks") is None else [self.options["sinks"]])]
        self.wanted = torch.autograd.grad(weighted_loss(right, right_lse, self.weights), self.inputs)
        self.right, self.right_lse = right.detach(), right_lse.detach()
        group.run(lambda: self._on_a_rank(group), seed=seed, late=late)

    def _on_a_rank(self, group: RulesGroup) -> None:
        made_of = None
        if self.head_ranks > 1:  # without the mesh's own groups, which the ring does not use
            ranks = torch.arange(self.size).view(-1, self.head_ranks)
            made_of = DeviceMesh("cpu", ranks, mesh_dim_names=("ring", "heads"), _init_backend=False)
        ring = rs.Ring(made_of, self.layout, self.routing)
        group.label_of[ring.rank] = lambda: ring.counters.posted
        split = partial(ring.split_sequence, lengths=self.options["lengths"])
        for _ in range(self.passes):
            mine = [(split(x.detach()) if x.dim() > 1 else x.detach()).requires_grad_() for x in self.inputs]
            given = self.options | ({"sinks": mine[3]} if len(mine) > 3 else {})
            seq_len = self.tensors[0].shape[1] if self.states_length else None
            out, lse = rs.attention(
                *mine[:3], return_lse=True, ring=ring, seq_len=seq_len, optimize=self.optimize, **given
            )
            close(out, split(self.right))
            close(lse, split(self.right_lse, dim=2))
            local = split(self.weights[0]), split(self.weights[1], dim=2)
            for x, wanted in zip(torch.autograd.grad(weighted_loss(out, lse, local), mine), self.wanted, strict=True):
                if x.dim() == 1:  # one sink for each head, which all ranks hold
                    dist.all_reduce(x, group=ring.group)
                close(x, split(wanted) if x.dim() > 1 else wanted)

    def plan(self) -> rs.planning.RingPlan:
        q, k, _ = self.tensors
        shape = dict(batch=q.shape[0], heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3], dtype=q.dtype)
        where = dict(ring_size=self.size, head_ranks=self.head_ranks, layout=self.layout, routing=self.routing)
        what = dict(causal=self.options["causal"], lengths=self.options["lengths"], optimize=self.optimize)
        return rs.plan(self.options["pattern"], q.shape[1], **shape, **where, **what)  # type: ignore[arg-type]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    head_ranks = draw(st.sampled_from([1, 1, 1, 2, 3]))
    size = head_ranks * draw(st.integers(1, 3)) if head_ranks > 1 else draw(st.integers(2, 5))
    divisors = [d for d in range(1, head_ranks + 1) if head_ranks % d == 0]
    kv_heads = draw(st.integers(1, 3)) if head_ranks == 1 else draw(st.sampled_from([*divisors, 2 * head_ranks]))
    group = lcm(kv_heads, head_ranks) // kv_heads * draw(st.integers(1, 2))
    sizes = draw(lengths(longest=50))
    tensors = inputs(draw(st.integers(1, 2)), sum(sizes), kv_heads, group, 2)
    options = dict(pattern=draw(patterns()), causal=draw(st.booleans()), lengths=sizes, softcap=draw(softcaps()))
    nodes = st.sampled_from(["relay", "direct", rs.ByNode(head_ranks), rs.ByNode(2 * head_ranks)])
    return Step(
        size,
        tensors,
        options | dict(sinks=draw(sinks(tensors[0]))),
        draw(st.sampled_from(["contiguous", "zigzag", "balanced"])),
        draw(routings() if head_ranks == 1 else nodes),
        head_ranks,
        draw(st.booleans()),
        draw(tile_costs()) or "none",
        draw(st.sampled_from([1, 1, 2])),
    )


@examples(500, fast=50)
@given(steps(), st.integers(0, 2**32), st.booleans())
def test_no_random_plan_breaks_a_rule(step: Step, seed: int, late: bool) -> None:
    """What ranks post is what `RingPlan.batches` says, which `RingPlan.check` proves."""
    with rules_group(step.size) as group:
        step.run(group, seed=seed, late=late)
        check_posted(group, step)


def check_posted(group: RulesGroup, step: Step) -> None:
    plan = step.plan()
    plan.check()
    logits = step.options.get("sinks")
    if step.head_ranks > 1 and logits is not None and logits.dim() == 3:
        return  # sinks for each row, which head ranks exchange too, are not in the plan
    for rank, posted in enumerate(group.posted):
        ends = lambda buffers, sent: [(b.peer, b.bytes) for b in buffers if (b.sent is not None) == sent]  # noqa: E731
        found = [
            (each.label, ends(each.buffers, True), ends(each.buffers, False)) for each in posted if each.kind == "batch"
        ]
        wanted = [
            (each.label, [(t.peer, t.bytes) for t in each.sends], [(t.peer, t.bytes) for t in each.receives])
            for each in (*plan.batches(rank), *plan.batches(rank, backward=True))
            if each.sends or each.receives
        ]
        assert found == wanted * step.passes


def full(size: int = 3, n: int = 36, **others: Any) -> Step:
    options = dict(pattern=rs.Full(), causal=False, lengths=(n,)) | others
    return Step(size, inputs(1, n, 1, 1, 4), options)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("states_length", [False, True])
def test_ranks_without_messages_take_part_in_the_first_use(states_length: bool, late: bool) -> None:
    """Two documents, of which one is on rank 0 and the other on ranks 1 and 2: rank 0 never sends anything."""
    step = full(lengths=(12, 24))
    step.states_length = states_length
    with rules_group(3) as group:
        step.run(group, late=late)
        assert [any(each.kind == "batch" for each in posted) for posted in group.posted] == [False, True, True]


def test_a_readout_with_lse_and_seq_len_sends_nothing() -> None:
    """So one rank may call it alone, before any other use of the group."""

    def task() -> None:
        ring = rs.Ring()
        x = torch.randn(1, ring.layout_of(30).rows_of(ring.rank), 1, 4)
        if ring.rank == 1:
            rs.attention_weights(x[:, :1], x, rows=[4], pattern=rs.Full(), lse=x[:, :1, :1, 0], ring=ring, seq_len=30)

    with rules_group(3) as group:
        group.run(task)
        assert group.posted == [[], [], []]


def test_other_calls_use_the_communicator_together() -> None:
    def task() -> None:
        ring = rs.Ring()
        whole = torch.arange(20.0).view(1, 20, 1)
        mine = ring.split_sequence(whole)
        assert torch.equal(ring.gather_sequence(mine, seq_len=20), whole)
        assert torch.equal(ring.rows_at(mine, [3, 17], seq_len=20), whole[:, [3, 17]])
        x = torch.randn(1, mine.shape[1], 1, 4)
        assert schedule.communication_seconds(ring, rs.Full(), 20, x, x, causal=True) >= 0
        cache = rs.Cache(rs.Full(), batch=1, kv_heads=1, head_dim=4)
        rs.attention_prefill(x, x, x, cache, ring=ring)

    with rules_group(3) as group:
        group.run(task)


# Faults. Each is planted in the real ring, and breaks one rule.

Change = Any
_send_receive = GroupTransport.send_receive


def run_with(change: Change, step: Step | None = None, *, late: bool = True) -> str:
    """The broken rule of a step whose transport is changed."""
    step = step or full()
    with (
        rules_group(step.size) as group,
        mock.patch.object(GroupTransport, "send_receive", change),
        pytest.raises(BrokenRuleError) as caught,
    ):
        step.run(group, late=late)
    return str(caught.value)


def test_crossed_messages_are_found() -> None:
    """Rank 1 lists the messages of two segments in another order. They differ in size: gloo would abort."""
    pattern = rs.Dilated((20, 36), (1, 2))

    def crossed(self: GroupTransport, sends: Messages, receives: Messages, label: str) -> Any:
        return _send_receive(self, sends[::-1] if self.rank == 1 else sends, receives, label)

    message = run_with(crossed, full(pattern=pattern))
    assert "rank 1, parcels of hop 1" in message
    assert "which receives" in message


def test_a_one_sided_batch_is_found() -> None:
    """Rank 2 forgets a send; its peer waits."""

    def one_sided(self: GroupTransport, sends: Messages, receives: Messages, label: str) -> Any:
        forgets = self.rank == 2 and label == "parcels of hop 2"
        return _send_receive(self, sends[1:] if forgets else sends, receives, label)

    message = run_with(one_sided)
    assert "rank 0, parcels of hop 2, waits for rank 2, which is at parcels of hop 2" in message


@pytest.mark.parametrize("late", [False, True])
def test_a_buffer_reused_while_it_is_sent_is_found(late: bool) -> None:
    """A rank writes to a packed parcel as soon as it is posted."""

    def too_early(self: schedule.RankRun, number: int) -> None:
        post(self, number)
        if self._packed:
            self._packed[0].add_(1)

    post = schedule.RankRun.post
    with mock.patch.object(schedule.RankRun, "post", too_early):
        message = run_with(_send_receive, late=late)
    assert "parcels of hop 1: the buffer sent to rank" in message
    assert "was changed before the wait" in message


def test_a_buffer_that_is_freed_while_it_is_sent_is_found() -> None:
    def freed(self: schedule.RankRun, number: int) -> None:
        post(self, number)
        self._packed.clear()
        self._buffers.release()

    post = schedule.RankRun.post
    with mock.patch.object(schedule.RankRun, "post", freed):
        message = run_with(_send_receive)
    assert "parcels of hop 1" in message
    assert "was freed before the wait" in message


def test_a_buffer_that_is_received_into_while_in_use_is_found() -> None:
    def shared(self: GroupTransport, sends: Messages, receives: Messages, label: str) -> Any:
        if receives and self.rank == 1:
            receives = [(peer, sends[0][1]) for peer, _ in receives]
        return _send_receive(self, sends, receives, label)

    message = run_with(shared)
    assert "rank 1, parcels of hop 1: sends to rank" in message  # posted after the receive
    assert "not waited for" in message


def test_reading_before_the_wait_is_found() -> None:
    """The schedule computes a hop without waiting for its parcels. Data that come late are not there yet."""

    class NoWait:
        def wait(self) -> None:
            pass

    def eager(self: GroupTransport, sends: Messages, receives: Messages, label: str) -> Any:
        _send_receive(self, sends, receives, label)
        return NoWait()

    with (
        rules_group(2) as group,
        mock.patch.object(GroupTransport, "send_receive", eager),
        pytest.raises(AssertionError, match="not close"),
    ):
        full(size=2).run(group, late=True)


def test_a_cycle_is_found() -> None:
    """Each rank sends to the next before it posts its receive: gloo buffers small messages, NCCL does not."""

    def sends_first(self: GroupTransport, sends: Messages, receives: Messages, label: str) -> Any:
        if sends and receives:
            _send_receive(self, sends, [], label).wait()
            sends = []
        return _send_receive(self, sends, receives, label)

    message = run_with(sends_first)
    for rank in range(3):
        assert f"rank {rank}, parcels of hop 1, waits for rank {(rank + 1) % 3}" in message


def test_a_first_use_without_all_ranks_is_found() -> None:
    """Without the first collective, rank 0 takes no part in the only hop, and the others wait for it."""
    with mock.patch.object(transport, "create_communicator", return_value=None):
        message = run_with(_send_receive, full(lengths=(12, 24)))
    assert "first use of the communicator: rank(s) [0] take no part" in message
    assert "rank 1, parcels of hop 1; rank 2, parcels of hop 1" in message


def test_single_messages_are_found() -> None:
    def task() -> None:
        ring = rs.Ring()
        dist.barrier()
        dist.isend(torch.ones(1), (ring.rank + 1) % 2)

    with rules_group(2) as group, pytest.raises(BrokenRuleError, match=r"rank \d outside of a batch"):
        group.run(task)
