"""The device layer, on the CPU and on a stand-in for an accelerator."""

from __future__ import annotations

import torch

from ringspan.runtime.device import Accelerator, Cpu
from ringspan.tools.measure import count_flops


class StandIn:
    """The part of torch.cuda that measurements use: a clock, and an allocator that tracks its peak."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.milliseconds = 0.0
        self.allocated = self.peak = 100

    def Event(self, enable_timing: bool) -> _Event:  # noqa: N802
        assert enable_timing
        return _Event(self)

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(f"synchronize {device}")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def work(self, milliseconds: float, needed: int) -> None:
        self.milliseconds += milliseconds
        self.peak = max(self.peak, self.allocated + needed)
        self.calls.append("work")


class _Event:
    def __init__(self, device: StandIn) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.milliseconds

    def elapsed_time(self, later: _Event) -> float:
        return later.at - self.at


def test_an_accelerator_is_timed_with_its_events() -> None:
    api = StandIn()
    device = Accelerator(api, torch.device("cuda", 3))
    assert device.seconds(lambda: api.work(250.0, 0)) == 0.25
    assert api.calls == [
        "synchronize cuda:3",
        "work",
        "synchronize cuda:3",
    ]  # before and after, since calls are asynchronous


def test_memory_of_an_accelerator_is_the_peak_of_its_allocator() -> None:
    api = StandIn()
    api.peak = 10**9  # earlier peaks do not count
    assert Accelerator(api, torch.device("cuda", 0)).peak_growth(lambda: api.work(1.0, 4096))[1] == 4096


def test_time_and_memory_of_the_cpu() -> None:
    def make_64_mib() -> torch.Tensor:
        return torch.ones(16 * 2**20)

    assert Cpu().seconds(make_64_mib) > 0
    assert 60 * 2**20 < Cpu().peak_growth(make_64_mib)[1] < 80 * 2**20


def test_flops_of_torch_operators() -> None:
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert count_flops(lambda: a @ b) == 2 * 3 * 5 * 7
    q = torch.ones(1, 2, 16, 8, requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    forward = 2 * 2 * 2 * 16 * 16 * 8
    assert count_flops(lambda: attend(q.detach(), q.detach(), q.detach())) == forward
    assert count_flops(lambda: attend(q, q, q).sum().backward()) == forward * 7 // 2


def test_flops_inside_the_custom_operator() -> None:
    import ringspan as rs

    q = torch.ones(1, 64, 2, 8)
    attend = lambda: rs.attention(q, q, q, pattern=rs.Dilated((16, 64), (1, 4)))  # noqa: E731
    pairs = 2 * (4 * 16 * 16 + 16 * 16)  # two heads; four short segments, and every fourth row of the long one
    assert count_flops(attend) == 2 * 2 * pairs * 8
