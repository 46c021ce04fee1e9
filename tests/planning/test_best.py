"""`rs.best_plan`: its choices, held to times that can be worked out by hand and to the plans that they name."""

import math
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

import ringspan as rs
from ringspan.planning.breakeven import time_alone
from ringspan.planning.timing import ASSUMED_RATES, ring_time

FULL = rs.Full()
PAIRS_ONLY = rs.TileCosts(row=0, call=0, diagonal=0, narrow=1)
FREE = rs.DeviceRates(flops=1e9, bandwidth=1e18, latency=0, costs=PAIRS_ONLY)  # links cost nothing
DIALUP = replace(FREE, bandwidth=1e3, latency=1.0)
PAIR = 14 * 64 / 1e9  # seconds for a pair of these devices, forward and backward
SMALL: dict[str, Any] = {"heads": 1, "head_dim": 64}
ROW_BYTES = 8 * 64 * 4 + 4  # of q, k, v, out and their gradients, and lse, for one head


def shape(choice: rs.PlanChoice) -> tuple[int, int]:
    return choice.rings, choice.ring_size


@pytest.mark.parametrize(("transfer", "expected"), [(20, (1, 1)), (1, (1, 2))])
def test_two_devices_by_hand(transfer: float, expected: tuple[int, int]) -> None:
    """One parcel of 512 rows, sent twice, and its gradient. A transfer takes so many times the FLOPs of 512² / 4."""
    work, parcel = 64 * 512**2 / 1e9, 2 * 512 * 64 * 4
    rates = replace(FREE, bandwidth=parcel / (transfer * work))
    choices = rs.best_plan(FULL, 1024, devices=2, rates=rates, **SMALL)
    assert shape(choices.best) == expected
    times = {choice.ring_size: choice.time.total for choice in choices.ranked if choice.layout == "contiguous"}
    assert times[1] == pytest.approx(4 * 14 * work)
    waiting = sum(max(0, transfer - overlapped) for overlapped in (4, 10, 0))
    assert times[2] == pytest.approx((2 * 14 + waiting) * work)


def test_a_slow_link_is_not_used() -> None:
    choices = rs.best_plan(FULL, 4096, devices=8, causal=True, rates=DIALUP)
    best = choices.best
    assert (shape(best), best.idle, best.sent) == ((1, 1), 7, 0)
    assert best.time.total == best.time.work == time_alone(best.plan, DIALUP).total
    assert "no split" in choices.reason
    assert "7 of 8 devices are idle" in choices.reason


def test_a_sequence_that_does_not_fit_on_one_device_is_split_even_over_a_slow_link() -> None:
    choices = rs.best_plan(FULL, 4096, devices=4, rates=DIALUP, memory=4096 * ROW_BYTES - 1, **SMALL)
    assert choices.best.ring_size == 2
    assert shape(choices.ranked[-1]) == (1, 1)
    assert choices.ranked[-1].memory == 4096 * ROW_BYTES
    assert choices.ranked[-1].problem == "needs 8.02 MiB of 8.02 MiB"
    assert choices.ranked[-1].problem in choices.reason
    fits = rs.best_plan(FULL, 4096, devices=4, rates=DIALUP, memory=4096 * ROW_BYTES, **SMALL)
    assert fits.best.ring_size == 1


def test_a_ring_of_all_devices_is_the_fastest_over_free_links() -> None:
    best = rs.best_plan(FULL, 2**13, devices=6, causal=True, rates=FREE, **SMALL).best
    assert (shape(best), best.layout) == ((1, 6), "zigzag")
    assert best.time.total == pytest.approx(PAIR * 2**13 * (2**13 + 1) / 2 / 6, rel=1e-2)


def test_a_window_stays_contiguous() -> None:
    best = rs.best_plan(rs.Window(511), 2**18, devices=8, causal=True).best
    assert (shape(best), best.layout) == ((1, 8), "contiguous")


def test_each_device_takes_its_own_batch_elements() -> None:
    choices = rs.best_plan(FULL, 512, devices=4, batch=8, **SMALL, rates=replace(FREE, latency=1e-3))
    assert (shape(choices.best), choices.best.plan.sizes.batch, choices.best.idle) == ((4, 1), 2, 0)
    assert choices.best.time.total == pytest.approx(2 * PAIR * 512**2)


def test_two_rings_of_two_take_one_batch_element_each() -> None:
    """One element does not fit on a device, and a ring of four is not faster: both divide the pairs by four."""
    choices = rs.best_plan(FULL, 512, devices=4, batch=2, **SMALL, rates=FREE, memory=512 * ROW_BYTES - 1)
    best = choices.best
    assert (shape(best), best.plan.sizes.batch) == ((2, 2), 1)
    ring_of_four = next(choice for choice in choices.ranked if choice.ring_size == 4)
    assert best.time.total == pytest.approx(ring_of_four.time.total) == pytest.approx(2 * PAIR * 512**2 / 4)


def test_an_uneven_batch_takes_as_long_as_its_largest_share() -> None:
    choices = rs.best_plan(FULL, 64, devices=2, batch=3, **SMALL, rates=DIALUP)
    assert (shape(choices.best), choices.best.plan.sizes.batch) == ((2, 1), 2)


def test_of_equal_choices_the_simpler_is_first_and_says_so() -> None:
    choices = rs.best_plan(FULL, 4096, devices=4, causal=False, rates=FREE, heads=1)
    best = choices.best
    assert (shape(best), best.layout, best.routing, best.head_ranks) == ((1, 4), "contiguous", "relay", 1)
    assert "as fast as a ring of 4, contiguous, direct, and simpler" in choices.reason


def test_many_short_documents_stay_whole_on_devices_of_their_own() -> None:
    choices = rs.best_plan(FULL, devices=4, lengths=[128] * 64, **SMALL, rates=replace(FREE, latency=1e-3))
    best = choices.best
    assert (shape(best), best.sent, [len(own) for own in best.documents]) == ((4, 1), 0, [16] * 4)
    assert best.time.total == pytest.approx(PAIR * 16 * 128**2)


def test_a_long_document_among_short_ones_is_balanced() -> None:
    best = rs.best_plan(FULL, devices=8, causal=True, lengths=(2**17, *[2**9] * 2**8)).best
    assert (shape(best), best.layout) == ((1, 8), "balanced")


@pytest.mark.parametrize(("batch", "lengths"), [(1, (5, 900, 0, 40, 300, 77)), (3, (100, 1, 0, 250))])
def test_rings_divide_documents_so_that_each_is_computed_once(batch: int, lengths: tuple[int, ...]) -> None:
    choices = rs.best_plan(FULL, devices=4, lengths=lengths, batch=batch, causal=True)
    every = [number for number, rows in enumerate(lengths * batch) if rows]
    divided = [choice for choice in choices.ranked if choice.documents]
    assert divided
    for choice in divided:
        assert sorted(number for own in choice.documents for number in own) == every
        held = [tuple((lengths * batch)[number] for number in own) for own in choice.documents]
        assert choice.plan.documents.lengths in held
        assert choice.plan.sizes.batch == 1
        assert choice.idle == 4 - choice.ring_size * len(held)


CASES = [
    (rs.Full(), {"seq_len": 5001, "devices": 6, "causal": True}),
    (rs.Full(), {"seq_len": 4096, "devices": 16, "batch": 2, "kv_heads": 2, "devices_per_node": 4}),
    (rs.Dilated((512, 2048), (1, 4)), {"seq_len": 9999, "devices": 8, "causal": True, "memory": 40e6}),
    (rs.Window(100), {"cu_seqlens": (0, 3000, 3001, 4500), "devices": 4, "causal": True}),
]


@pytest.mark.parametrize(("pattern", "options"), CASES)
def test_order_and_predictions_are_those_of_the_plans(pattern: rs.Pattern, options: dict[str, object]) -> None:
    choices = rs.best_plan(pattern, **options)  # type: ignore[arg-type]
    fits = [choice for choice in choices.ranked if not choice.problem]
    others = choices.ranked[len(fits) :]
    assert all(choice.problem for choice in others)
    assert all(a.time.total <= b.time.total for a, b in pairwise(fits[1:]))
    assert all(a.memory <= b.memory for a, b in pairwise(others))
    assert choices.best is fits[0]
    assert fits[0].time.total <= 1.02 * min(choice.time.total for choice in fits)
    names = [(choice.ring_size, choice.layout, choice.routing, choice.head_ranks) for choice in choices.ranked]
    assert len(set(names)) == len(names)
    assert {choice.ring_size for choice in choices.ranked} == {
        size for size in range(1, choices.devices + 1) if choices.devices % size == 0
    }
    for choice in choices.ranked:
        assert choice.rings * choice.ring_size + choice.idle == choices.devices
        assert choice.time.total >= ring_time(choice.plan, choices.rates).total * (1 - 1e-12)
        if choice.ring_size <= 8:
            ranks = range(choice.ring_size)
            both = [choice.plan.bytes_sent(rank) + choice.plan.bytes_sent(rank, backward=True) for rank in ranks]
            assert choice.sent >= max(both)
            assert choice.memory >= max(choice.plan.memory(rank, backward=True).total for rank in ranks)
    assert str(choices).count("\n") >= min(12, len(choices.ranked)) + 1


@pytest.mark.parametrize("rates", [ASSUMED_RATES, rs.DeviceRates(1e11, bandwidth=1e9, latency=1e-4)])
@pytest.mark.parametrize("n", [1001, 30_000, 500_000])
@pytest.mark.parametrize("pattern", [rs.Full(), rs.Dilated((512, 8192), (1, 8)), rs.Window(300)])
def test_no_plan_that_the_search_skips_is_much_faster(pattern: rs.Pattern, n: int, rates: rs.DeviceRates) -> None:
    layouts: list[rs.LayoutName] = ["contiguous", "zigzag"]
    routings: list[rs.Routing] = ["relay", "direct"]
    sizes = [(size, head_ranks) for size in (1, 2, 4, 8) for head_ranks in (1, 2, 4, 8) if head_ranks <= size]
    every = [
        rs.plan(
            pattern,
            n,
            ring_size=size,
            head_ranks=count,
            layout=layout,
            routing=routing,
            causal=True,
            optimize=rates.costs,
        )
        for (size, count), layout, routing in product(sizes, layouts, routings)
    ]
    fastest = min(ring_time(plan, rates).total for plan in every)
    assert rs.best_plan(pattern, n, devices=8, causal=True, rates=rates).best.time.total <= 1.021 * fastest


def test_head_ranks_and_node_routing_respect_nodes() -> None:
    choices = rs.best_plan(FULL, 2**14, devices=16, heads=16, kv_heads=8, devices_per_node=4)
    assert {choice.head_ranks for choice in choices.ranked} == {1, 2, 4}
    by_node = [choice for choice in choices.ranked if isinstance(choice.routing, rs.ByNode)]
    assert by_node
    assert all(choice.ring_size > 4 and choice.routing == rs.ByNode(4) for choice in by_node)
    plain = rs.best_plan(FULL, 2**14, devices=16, heads=16, kv_heads=8)
    assert max(choice.head_ranks for choice in plain.ranked) == 16
    assert all(isinstance(choice.routing, str) for choice in plain.ranked)


def test_the_length_from_which_a_ring_pays() -> None:
    single = rs.best_plan(FULL, 2**16, devices=4, causal=True, **SMALL)
    found = single.break_even
    assert found is not None
    assert found.pays
    assert f"From about {found.length:,} tokens on, a ring of 4, zigzag" in str(single)
    for length, pays in ((found.length, True), (math.floor(found.length / 1.2), False)):
        at_length = rs.best_plan(FULL, length, devices=4, causal=True, **SMALL)
        times = {(choice.ring_size, choice.layout): choice.time.total for choice in at_length.ranked}
        assert (times[4, "zigzag"] < times[1, "contiguous"]) == pays
    full_batch = rs.best_plan(FULL, 2**12, devices=4, batch=4)
    assert full_batch.break_even is not None
    assert not full_batch.break_even.pays
    assert "not faster than no split" in str(full_batch)


def test_no_length_for_packed_documents_and_for_one_device() -> None:
    assert rs.best_plan(FULL, devices=2, lengths=(100, 200)).break_even is None
    alone = rs.best_plan(FULL, 300, devices=1)
    assert (len(alone.ranked), alone.break_even, alone.best.idle) == (1, None, 0)
    assert "one device, no split" in str(alone)


@pytest.mark.parametrize(
    ("options", "stem"),
    [
        ({"seq_len": 8, "devices": 0}, "devices=0"),
        ({"devices": 2}, "neither seq_len"),
        ({"seq_len": 0, "devices": 2}, "seq_len=0"),
        ({"seq_len": 8, "devices": 2, "lengths": (3, 4)}, "8"),
        ({"devices": 2, "lengths": (3, 4), "cu_seqlens": (0, 3, 7)}, "both lengths and cu_seqlens"),
        ({"seq_len": 8, "devices": 2, "memory": 0}, "memory=0"),
        ({"seq_len": 8, "devices": 2, "batch": 0}, "batch=0"),
        ({"seq_len": 8, "devices": 6, "devices_per_node": 4}, "devices_per_node=4"),
        ({"seq_len": 8, "devices": 2, "devices_per_node": 0}, "devices_per_node=0"),
        ({"seq_len": 8, "devices": 2, "layer_weights": -1}, "layer_weights=-1"),
        ({"seq_len": 8, "devices": 2, "rates": rs.DeviceRates(1, 1, 1, node_bandwidth=1)}, "devices_per_node"),
        ({"seq_len": 8, "devices": 2, "rates": rs.DeviceRates(1, 1, 1, devices_per_core=2)}, "devices_per_core=2"),
        ({"seq_len": 2**20, "devices": 2, "memory": 1e6}, "no plan fits on 2 devices"),
    ],
)
def test_bad_arguments(options: dict[str, object], stem: str) -> None:
    with pytest.raises(ValueError, match=stem):
        rs.best_plan(FULL, **options)  # type: ignore[arg-type]


def test_a_model_without_layers() -> None:
    with pytest.raises(ValueError, match="the pattern of a layer"):
        rs.best_plan([], 8, devices=2)


def test_equal_layers_take_as_often_as_long_and_are_planned_once() -> None:
    options: dict[str, Any] = dict(devices=4, causal=True, rates=ASSUMED_RATES)
    one = rs.best_plan(FULL, 2**14, **options)
    six = rs.best_plan([FULL] * 6, 2**14, **options)
    assert [str(choice) for choice in six.ranked] == [str(choice) for choice in one.ranked]
    assert six.best.time.total == pytest.approx(6 * one.best.time.total)
    assert six.best.sent == 6 * one.best.sent
    assert six.layers.counts == ((FULL, 6),)
    rows, heads, dim = six.best.plan.layout.rows_of(0), 8, 64
    saved = rows * heads * (4 * dim * 4 + 4)
    assert six.best.memory == one.best.memory + 5 * saved


def test_the_time_of_a_model_is_the_sum_of_its_layers() -> None:
    layers, per_node = [rs.Window(255), rs.Window(255), FULL], 2
    rates = rs.DeviceRates(1e11, bandwidth=1e9, latency=1e-4, node_bandwidth=2e8)
    options: dict[str, Any] = dict(devices=4, causal=True, rates=rates, devices_per_node=per_node)
    choices = rs.best_plan(layers, 8192, layer_weights=10**6, **options)
    for choice in choices.ranked:
        plans = [replace(choice.plan, pattern=pattern) for pattern in layers]
        times = [ring_time(plan, rates, per_node, 10**6).total for plan in plans]
        assert choice.time.total == pytest.approx(sum(times))
    found = choices.break_even
    assert found is not None
    assert found.pays
    longer = int(1.2 * found.length)
    assert rs.best_plan(layers, longer, layer_weights=10**6, **options).best.ring_size > 1


def test_weights_make_shorter_sequences_pay() -> None:
    """The products of a rank's own rows are divided by a ring too, and need no message."""
    options: dict[str, Any] = dict(devices=4, causal=True, rates=rs.DeviceRates(1e13, 1e9, 1e-4))
    light, heavy = (rs.best_plan([FULL] * 2, 2**13, layer_weights=w, **options).break_even for w in (0, 10**8))
    assert light is not None
    assert heavy is not None
    assert heavy.length < light.length


def test_a_slow_link_between_nodes_keeps_rings_inside_them_or_enters_each_node_once() -> None:
    rates = rs.DeviceRates(1e14, bandwidth=200e9, latency=1e-5, node_bandwidth=4e9, node_latency=2e-5)
    options: dict[str, Any] = dict(devices=16, devices_per_node=8, causal=True, rates=rates, heads=7)
    inside = rs.best_plan(FULL, 2**17, batch=2, **options)
    assert (shape(inside.best), inside.best.sent_by_node) == ((2, 8), 0)
    assert "nothing is sent between nodes" in inside.reason
    across = rs.best_plan(FULL, 2**20, **options)
    assert (shape(across.best), across.best.routing) == ((1, 16), rs.ByNode(8))
    assert "as with routing" in across.reason
    alike = {
        str(one.routing): one
        for one in across.ranked
        if (one.ring_size, one.layout, one.head_ranks) == (16, across.best.layout, across.best.head_ranks)
    }
    assert alike["relay by nodes of 8"].sent_by_node < alike["relay"].sent_by_node
    assert alike["relay by nodes of 8"].sent_by_node < alike["direct"].sent_by_node
    flat = rs.best_plan(FULL, 2**20, devices=16, causal=True, heads=7, rates=replace(rates, node_bandwidth=None))
    assert flat.best.time.total < across.best.time.total


def test_rings_fill_nodes_or_fit_into_one() -> None:
    choices = rs.best_plan(FULL, 4096, devices=12, devices_per_node=4, batch=12)
    assert {choice.ring_size for choice in choices.ranked} == {1, 2, 4, 12}
