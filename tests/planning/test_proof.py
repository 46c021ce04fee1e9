"""The proof that a plan cannot hang: every plan passes, and each kind of fault is named with rank, hop and peer."""

from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.planning.proof import MessageBatch, PlanError, SizedMessage, pair_up
from tests.strategies import examples, lengths, patterns, routings, tile_costs


@examples(500)
@given(st.data())
def test_every_plan_pairs_up(data: st.DataObject) -> None:
    head_ranks = data.draw(st.sampled_from([1, 1, 2, 3]))
    size = head_ranks * data.draw(st.integers(1, 9 // head_ranks))
    sizes = data.draw(lengths(longest=80))
    kv_heads = data.draw(st.sampled_from([1, head_ranks, 2 * head_ranks]))
    plan = rs.plan(
        data.draw(patterns()),
        sum(sizes),
        ring_size=size,
        head_ranks=head_ranks,
        layout=data.draw(st.sampled_from(["contiguous", "zigzag", "balanced"])),
        causal=data.draw(st.booleans()),
        routing=data.draw(routings() if head_ranks == 1 else st.sampled_from(["relay", "direct"])),
        lengths=sizes,
        heads=lcm(kv_heads, head_ranks) * data.draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        optimize=data.draw(tile_costs()) or "none",
    )
    proof = plan.check()
    assert proof.ranks == size
    for backward in (False, True):
        for rank in range(size):
            batches = plan.batches(rank, backward=backward)
            assert sum(t.bytes for batch in batches for t in batch.sends) == plan.bytes_sent(rank, backward=backward)
            received = sum(t.bytes for batch in batches for t in batch.receives)
            assert received == plan.bytes_received(rank, backward=backward)
            assert all(t.bytes > 0 for batch in batches for t in (*batch.sends, *batch.receives))


def test_the_sentence() -> None:
    assert str(rs.plan(rs.Full(), 64).check()) == "Nothing is sent."
    proof = rs.plan(rs.Full(), 4096, ring_size=4, layout="contiguous").check()
    assert (proof.messages, proof.largest) == (36, 2)
    assert "36 messages of 4 ranks in 36 batches, at most 2 in one" in str(proof)


@pytest.mark.slow
def test_batches_over_many_ranks_are_small() -> None:
    """NCCL may cut batches of hundreds of messages differently on two ranks."""
    assert rs.plan(rs.Dilated.spanning(2**20), 2**20, ring_size=64, causal=True).check().largest == 12


def plan_of_three() -> list[list[MessageBatch]]:
    plan = rs.plan(rs.Dilated((20, 36), (1, 2)), 36, ring_size=3, layout="contiguous")
    return [list(plan.batches(rank)) for rank in range(3)]


def test_a_missing_receive_is_named() -> None:
    ranks = plan_of_three()
    ranks[1][1] = replace(ranks[1][1], receives=())
    with pytest.raises(PlanError, match=r"rank 0, parcels of hop 2: sends .* to rank 1, which has no receive left"):
        pair_up(ranks)


def test_a_missing_send_is_named() -> None:
    ranks = plan_of_three()
    ranks[0][1] = replace(ranks[0][1], sends=())
    with pytest.raises(PlanError, match=r"rank 1, parcels of hop 2: receives .* from rank 0, which"):
        pair_up(ranks)


def test_another_order_is_named() -> None:
    ranks = plan_of_three()
    ranks[0][0] = replace(ranks[0][0], sends=ranks[0][0].sends[::-1])
    assert len(ranks[0][0].sends) > 1
    with pytest.raises(PlanError, match=r"rank ., parcels of hop 1: receives .* from rank 0, which sends"):
        pair_up(ranks)


def test_another_size_is_named() -> None:
    ranks = plan_of_three()
    first, *others = ranks[0][0].sends
    ranks[0][0] = replace(ranks[0][0], sends=(replace(first, bytes=first.bytes + 4), *others))
    with pytest.raises(PlanError, match="parcels of hop 1: receives"):
        pair_up(ranks)


def test_a_cycle_is_named() -> None:
    """Every message has its receive, but each rank sends before it receives."""
    send = [MessageBatch("first", (SizedMessage((rank + 1) % 3, "x", 8),), ()) for rank in range(3)]
    receive = [MessageBatch("second", (), (SizedMessage((rank + 2) % 3, "x", 8),)) for rank in range(3)]
    with pytest.raises(PlanError, match="ranks wait in a cycle") as caught:
        pair_up([[send[rank], receive[rank]] for rank in range(3)])
    for rank in range(3):
        wanted = f"rank {rank}, first, waits for rank {(rank + 1) % 3}, second, which comes after first"
        assert wanted in str(caught.value)
    both = [MessageBatch("both", send[rank].sends, receive[rank].receives) for rank in range(3)]
    assert pair_up([[batch] for batch in both]).messages == 3


def test_a_batch_that_meets_two_is_named() -> None:
    """The second of two messages of a batch can only be received after the first batch of the peer, which waits."""
    one = [MessageBatch("both", (SizedMessage(1, "x", 8), SizedMessage(1, "y", 8)), ())]
    two = [MessageBatch("x", (), (SizedMessage(0, "x", 8),)), MessageBatch("y", (), (SizedMessage(0, "y", 8),))]
    with pytest.raises(PlanError, match="waits for rank 1, y, which comes after x"):
        pair_up([one, two])
