"""Attention layers over real ranks: rows and gradients equal those of one process, sinks included."""

import torch
import torch.distributed as dist

import ringspan as rs
from tests.ranks import on_ranks


@on_ranks(2, 3)
def test_multihead_under_windows_and_sums_equals_one_process() -> None:
    for layout in ("zigzag", "contiguous"):
        ring = rs.Ring(layout=layout)  # type: ignore[arg-type]
        for pattern in (rs.Window(9), rs.Window(6) + rs.Dilated((16, 40), (4, 8)), rs.Window(3) + rs.Full()):
            alone, spread = (
                rs.nn.MultiheadAttention(
                    *(32, 4), pattern=pattern, softcap=2.0, sinks=True, ring=where, kv_heads=2, dtype=torch.float64
                )
                for where in (None, ring)
            )
            assert alone.sinks is not None
            torch.nn.init.normal_(alone.sinks)
            spread.load_state_dict(alone.state_dict())
            x = torch.randn(2, 45, 32, dtype=torch.float64)
            wanted, _ = alone(x, x, x, is_causal=True)
            mine = ring.split_sequence(x)
            found, _ = spread(mine, mine, mine, is_causal=True)
            torch.testing.assert_close(found, ring.split_sequence(wanted), rtol=1e-12, atol=1e-12)
            wanted.square().sum().backward()
            found.square().sum().backward()
            for (name, a), b in zip(alone.named_parameters(), spread.parameters(), strict=True):
                assert a.grad is not None, name
                assert b.grad is not None, name
                dist.all_reduce(b.grad)  # weights are replicated: each rank has the share of its rows
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-12)
