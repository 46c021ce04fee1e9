"""The alternatives that benchmarks compare with compute the same function as ringspan."""

import pytest
import torch

import ringspan as rs
from ringspan.tools.peers import branch_counter, masked_sdpa

PATTERNS = {
    "powers of two": rs.Dilated((16, 64), (1, 4)),
    "odd": rs.Dilated((12, 50), (1, 3)),
    "blocked": rs.Dilated((16, 64), (1, 4), head_offsets="blocked"),
    "shifted": rs.Dilated((16, 64), (1, 4), shift=5),
    "plain": rs.Full(),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_masked_sdpa_equals_ringspan(name: str, causal: bool) -> None:
    q, k, v = torch.randn(3, 1, 100, 4, 16, dtype=torch.float64).unbind()
    attend = masked_sdpa(PATTERNS[name], 100, 4, causal=causal, dtype=torch.float64)
    wanted = rs.attention(q, k, v, pattern=PATTERNS[name], causal=causal)
    torch.testing.assert_close(attend(q, k, v), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["powers of two", "odd", "blocked", "shifted"])
def test_branch_counter_of_flex_equals_the_definition(name: str, causal: bool) -> None:
    pattern, heads, n = PATTERNS[name], 4, 70
    assert isinstance(pattern, rs.Dilated)
    count = branch_counter(pattern, heads, causal=causal)
    h, p, t = torch.meshgrid(torch.arange(heads), torch.arange(n), torch.arange(n), indexing="ij")
    found = count(h, p, t)
    for head in range(heads):
        for row in range(0, n, 7):
            wanted = [pattern.sees(row, key, head=head, kv_heads=heads, causal=causal) for key in range(n)]
            assert found[head, row].tolist() == wanted
