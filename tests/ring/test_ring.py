"""A ring needs a process group, and knows its layouts. What it does on real ranks is in test_ranks.py."""

import pytest

import ringspan as rs


def test_without_a_process_group() -> None:
    with pytest.raises(rs.RingError, match="torchrun"):
        rs.Ring()
    with pytest.raises(ValueError, match="layout='round'"):
        rs.Ring(layout="round")  # type: ignore[arg-type]
