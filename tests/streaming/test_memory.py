"""Buffers of rows are reused during a run, but never while a tensor uses them."""

import torch

from ringspan.streaming.sources import empty_rows, reuse_row_buffers

SHAPE = (1, 2**16, 2, 32)


def test_buffers_are_reused_during_a_run() -> None:
    with reuse_row_buffers():
        x = empty_rows(SHAPE, torch.float32)
        address = x.data_ptr()
        part = x[:, :5]
        del x
        other = empty_rows(SHAPE, torch.float32)
        assert other.data_ptr() != address, "a view still uses the buffer"
        del part
        again = empty_rows((1, 2**16 - 3, 2, 32), torch.float32)
        assert again.data_ptr() == address
        assert again.shape[1] == 2**16 - 3
        smaller = empty_rows((1, 2**15, 2, 32), torch.float32)
        assert smaller.data_ptr() not in (address, other.data_ptr())
    again.fill_(1.0)  # a live tensor keeps its buffer


def test_small_buffers_and_all_dtypes() -> None:
    assert empty_rows((1, 3, 1, 8), torch.float64).shape == (1, 3, 1, 8)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        x = empty_rows((2, 2**16, 1, 16), dtype)
        x.fill_(2)
        assert (x.dtype, x.is_contiguous(), float(x[1, -1, 0, -1])) == (dtype, True, 2.0)
