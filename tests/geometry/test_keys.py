import torch
from hypothesis import given
from hypothesis import strategies as st

from ringspan.geometry import Documents, keys_seen
from ringspan.oracle import multiplicity
from tests.strategies import lengths, patterns


@given(st.data())
def test_keys_equal_the_definition(data: st.DataObject) -> None:
    sizes = data.draw(lengths().filter(sum))
    pattern, kv_heads, causal = data.draw(patterns()), data.draw(st.integers(1, 4)), data.draw(st.booleans())
    count = multiplicity(pattern, sum(sizes), kv_heads, causal=causal, lengths=sizes)
    for row in range(sum(sizes)):
        for head in range(kv_heads):
            found = torch.zeros(sum(sizes), dtype=torch.int64)
            for keys in keys_seen(pattern, Documents(sizes), row, kv_head=head, kv_heads=kv_heads, causal=causal):
                for key in keys:
                    found[key] += 1
            assert torch.equal(found, count[head, row])
