"""The device layer, on the CPU and on a stand-in for an accelerator."""

from __future__ import annotations

import torch

from ringspan.runtime.device import Accelerator, Cpu
from ringspan.tools.measure import count_flops


class StandIn:
    """torch.cuda as far as a measurement uses it: a clock of its own, and an allocator that keeps peaks."""

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


def test_an_accelerator_is_timed_by_its_own_events() -> None:
    api = StandIn()
    device = Accelerator(api, torch.device("cuda", 3))
    assert device.seconds(lambda: api.work(250.0, 0)) == 0.25
    assert api.calls == ["synchronize cuda:3", "work", "synchronize cuda:3"]  # before and after, or it is not over


def test_an_accelerators_memory_is_its_allocators_peak() -> None:
    api = StandIn()
    api.peak = 10**9  # what came before does not count
    assert Accelerator(api, torch.device("cuda", 0)).peak_growth(lambda: api.work(1.0, 4096))[1] == 4096


def test_the_cpu_is_measured_by_the_clock_and_by_the_system() -> None:
    def make_64_mib() -> torch.Tensor:
        return torch.ones(16 * 2**20)

    assert Cpu().seconds(make_64_mib) > 0
    assert 60 * 2**20 < Cpu().peak_growth(make_64_mib)[1] < 80 * 2**20


def test_flops_are_counted_from_what_ran() -> None:
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert count_flops(lambda: a @ b) == 2 * 3 * 5 * 7
    q = torch.ones(1, 2, 16, 8, requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    forward = 2 * 2 * 2 * 16 * 16 * 8
    assert count_flops(lambda: attend(q.detach(), q.detach(), q.detach())) == forward
    assert count_flops(lambda: attend(q, q, q).sum().backward()) == forward * 7 // 2


def test_flops_inside_the_operator_are_seen() -> None:
    import ringspan as rs

    q = torch.ones(1, 64, 2, 8)
    attend = lambda: rs.attention(q, q, q, pattern=rs.Dilated((16, 64), (1, 4)))  # noqa: E731
    pairs = 2 * (4 * 16 * 16 + 16 * 16)  # two heads; four short segments, and every fourth row of the long one
    assert count_flops(attend) == 2 * 2 * pairs * 8
