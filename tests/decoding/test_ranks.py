"""Decoding over real gloo processes: one launch for each ring size runs all of `tasks`; each task is a test here."""

from functools import lru_cache

import pytest
import torch

import ringspan as rs
from ringspan.oracle import dense_attention
from ringspan.runtime.launch import run_local_ranks
from tests.decoding import tasks
from tests.exactness import inputs
from tests.rank_tasks import run_tasks


@lru_cache
def failures(size: int) -> list[dict[str, str]]:
    return run_local_ranks(size, run_tasks, tasks.__name__, tasks.TASKS)


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("size", [2, 3])
def test_on_every_rank(size: int, task: str) -> None:
    failed = {rank: found[task] for rank, found in enumerate(failures(size)) if found[task]}
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())


@pytest.mark.parametrize("lengths", [None, (20, 0, 31)])
def test_a_simulated_ring_reads_a_prompt_too(lengths: tuple[int, ...] | None) -> None:
    pattern = rs.Dilated((8, 32), (1, 4), shift=3)
    q, k, v = (x.detach() for x in inputs(1, 51, 2, 2, 4))
    texts = 1 if lengths is None else len(lengths)
    cache = rs.Cache(pattern, kv_heads=2, dim=4, batch=texts, dtype=q.dtype)
    out = rs.attention_prefill(q, k, v, cache, ring=rs.SimulatedRing(3), lengths=lengths)
    wanted, _ = dense_attention(q, k, v, pattern=pattern, causal=True, lengths=lengths)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    assert cache.lengths == (lengths or (51,))
    again = rs.Cache(pattern, kv_heads=2, dim=4, batch=texts, dtype=q.dtype)
    rs.attention_step(q, k, v, again, lengths=lengths)
    x = torch.randn(3, texts, 1, 4, 4, dtype=q.dtype)
    rows = (x[0], x[1][:, :, :2], x[2][:, :, :2])
    assert torch.equal(rs.attention_step(*rows, cache), rs.attention_step(*rows, again))


def test_a_prompt_of_transposed_tensors_fills_the_cache_with_its_own_rows() -> None:
    pattern = rs.Dilated((8, 32), (1, 4))
    q, k, v = (x.detach() for x in inputs(1, 40, 2, 2, 4))
    transposed = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    cache = rs.Cache(pattern, kv_heads=2, dim=4, dtype=q.dtype)
    rs.attention_prefill(*(x[:, :30] for x in transposed), cache, ring=rs.SimulatedRing(2))
    wanted, _ = dense_attention(q, k, v, pattern=pattern, causal=True)
    found = rs.attention_step(*(x[:, 30:] for x in (q, k, v)), cache)
    torch.testing.assert_close(found, wanted[:, 30:], rtol=0, atol=1e-12)
