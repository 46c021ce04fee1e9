"""The adapters for other projects change nothing: losses are those of the models, rows are where the peer put them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringspan.runtime.launch import run_local_ranks
from ringspan.testing import UnsupportedError, verify_training
from ringspan.tools.verify_training import other_trainers
from ringspan.tools.verify_training.batches import make_batch
from tests.ranks import starts_processes

pytestmark = starts_processes
NAME = "ringspan.tools.verify_training.other_trainers"
TRANSFORMERS = (
    "torch_context_parallel",
    "torch_context_parallel_window",
    "accelerate_context_parallel",
    "accelerate_context_parallel_window",
)


def losses_of_one_process() -> dict[str, tuple[float, float, float]]:
    """For each adapter and packing: its loss, the mean of its token losses, and the loss that its model returns."""
    group: Any = dist.group.WORLD
    found = {}
    for name in TRANSFORMERS:
        adapter = getattr(other_trainers, name)(group, torch.float32)
        for batch in (make_batch([48], 64), make_batch([20, 28], 64)):
            result = adapter.step([batch])
            plain = adapter.model(input_ids=batch.tokens, position_ids=batch.position_ids, labels=batch.labels).loss
            rows = result.token_losses.sum() / (batch.targets != -100).sum()
            found[f"{name} {batch.lengths}"] = (float(result.loss), float(rows), float(plain))
    return found


def test_a_transformers_adapter_on_one_process_is_the_plain_model() -> None:
    pytest.importorskip("transformers")
    (found,) = run_local_ranks(1, losses_of_one_process)
    assert len(found) == 2 * len(TRANSFORMERS)
    for name, losses in found.items():
        assert losses == pytest.approx([losses[2]] * 3, rel=1e-6), name


def split_rows() -> tuple[list[int], bool]:
    """The rows of this rank as torch splits them, and whether every buffer has these rows."""
    group: Any = dist.group.WORLD
    adapter = other_trainers.torch_context_parallel(group, torch.float32)
    batch = make_batch([20, 28], 64)
    whole, buffers = adapter.buffers(batch), adapter.buffers(batch)
    with adapter.split(buffers):
        rows = buffers[-1][0].clone()
        same = all(torch.equal(part, x[:, rows]) for part, x in zip(buffers, whole, strict=True))
    return rows.tolist(), same


def test_tokens_labels_and_positions_are_split_alike() -> None:
    pytest.importorskip("transformers")
    rows, same = zip(*run_local_ranks(2, split_rows), strict=True)
    assert same == (True, True)
    assert sorted(rows[0] + rows[1]) == list(range(48))


def own_losses() -> tuple[float, float]:
    group: Any = dist.group.WORLD
    adapter = other_trainers.ring_attention_pytorch_transformer(group, torch.float32)
    batch = make_batch([48], 64)
    mine = batch.tokens.tensor_split(adapter.size)[adapter.rank]
    with torch.no_grad():
        own = adapter.model_of(48)(mine.clone(), return_loss=True)
    dist.all_reduce(own)
    return float(adapter.step([batch]).loss), float(own) / adapter.size


@pytest.mark.parametrize("size", [1, 2, 4])  # on 4 ranks, some have no sequence of the batch
def test_the_loss_of_a_ring_transformer_is_its_own(size: int) -> None:
    pytest.importorskip("ring_attention_pytorch")
    for loss, own in run_local_ranks(size, own_losses):
        assert loss == pytest.approx(own, rel=1e-6)


def test_the_rows_of_a_ring_transformer_are_whole_and_right() -> None:
    pytest.importorskip("ring_attention_pytorch")
    report = verify_training(f"{NAME}:ring_attention_pytorch_transformer", ranks=(1, 2), tokens=128)
    verdicts = {check.name: check.verdict for check in report.checks}
    assert verdicts["the loss of each token is that of one process"] == "pass"
    assert verdicts["predictions come back whole and in order"] == "pass"
    assert verdicts["documents do not see each other"] == "not supported"


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_what_a_peer_raises_is_in_the_report(name: str) -> None:
    """Context parallelism of torch and Accelerate does not run on CPUs. If it does: measure docs/trainers.md again."""
    pytest.importorskip("accelerate")
    (check,) = verify_training(f"{NAME}:{name}", ranks=(1, 2)).checks
    assert check.verdict == "FAIL"
    assert check.reason.startswith("rank 0 of 2: ")
    assert "MULTI_CPU" in check.reason if name.startswith("accelerate") else "harding" in check.reason


@pytest.mark.parametrize("name", [*TRANSFORMERS, "ring_attention_pytorch_transformer"])
def test_float64_is_refused_where_the_peer_computes_in_float32(name: str) -> None:
    group: Any = None
    with pytest.raises(UnsupportedError, match="float32"):
        getattr(other_trainers, name)(group, torch.float64)
