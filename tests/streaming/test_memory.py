"""Memory of rows: used again while a run goes on, never while somebody holds it, and gone afterwards."""

import torch

from ringspan.streaming.sources import keep_rows_memory, rows_memory

SHAPE = (1, 2**16, 2, 32)


def test_used_again_while_a_run_goes_on() -> None:
    with keep_rows_memory():
        x = rows_memory(SHAPE, torch.float32)
        place = x.data_ptr()
        part = x[:, :5]
        del x
        other = rows_memory(SHAPE, torch.float32)
        assert other.data_ptr() != place, "a view still holds it"
        del part
        again = rows_memory((1, 2**16 - 3, 2, 32), torch.float32)
        assert again.data_ptr() == place
        assert again.shape[1] == 2**16 - 3
        smaller = rows_memory((1, 2**15, 2, 32), torch.float32)
        assert smaller.data_ptr() not in (place, other.data_ptr())
    again.fill_(1.0)  # who holds memory keeps it


def test_small_ones_are_plain_and_every_dtype_will_do() -> None:
    assert rows_memory((1, 3, 1, 8), torch.float64).shape == (1, 3, 1, 8)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        x = rows_memory((2, 2**16, 1, 16), dtype)
        x.fill_(2)
        assert (x.dtype, x.is_contiguous(), float(x[1, -1, 0, -1])) == (dtype, True, 2.0)
