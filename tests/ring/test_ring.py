"""A ring needs a process group, and knows its layouts. What it does on real ranks is in test_ranks.py."""

import subprocess
import sys
import textwrap

import pytest

import ringspan as rs


def test_without_a_process_group() -> None:
    with pytest.raises(rs.RingError, match="torchrun"):
        rs.Ring()
    with pytest.raises(ValueError, match="layout='round'"):
        rs.Ring(layout="round")  # type: ignore[arg-type]


def test_destroying_the_process_group_destroys_it() -> None:
    """Nothing holds the group after destroy_process_group: a gloo group that is alive at exit can abort the process."""
    script = """
        import weakref, torch, ringspan as rs
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group, ring = weakref.ref(dist.group.WORLD), rs.Ring(min_size=1)
        out = rs.attention(*torch.randn(3, 1, 16, 2, 8, requires_grad=True).unbind(), pattern=rs.Full(), ring=ring)
        out.sum().backward()
        dist.destroy_process_group()
        assert group() is None
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
