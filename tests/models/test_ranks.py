"""A model with a different pattern in each layer over real ranks: loss, gradients and decoding equal one process."""

import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.models import Decoder
from tests.models.mixed import mixed_model
from tests.ranks import on_ranks


@on_ranks(2, 3)
def test_loss_and_gradients_of_mixed_patterns_equal_one_process() -> None:
    text = torch.randint(256, (2, 76))
    tokens, targets = text[:, :-1], text[:, 1:]
    for layout, recompute in (("zigzag", True), ("contiguous", False)):
        ring = rs.Ring(layout=layout)  # type: ignore[arg-type]
        alone, spread = mixed_model(), mixed_model()
        wanted = alone.loss(tokens, targets)
        wanted.backward()
        spread.checkpoint_layers(recompute)
        loss = spread.loss(ring.split_sequence(tokens), ring.split_sequence(targets), ring=ring, seq_len=75)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, wanted.detach(), rtol=0, atol=1e-12)
        for a, b in zip(alone.parameters(), spread.parameters(), strict=True):
            assert b.grad is not None
            dist.all_reduce(b.grad)  # sinks like every replicated weight: each rank has the share of its rows
            torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-12)


@on_ranks(2, 3)
def test_packed_documents_equal_one_process() -> None:
    ring, model, tokens = rs.Ring(), mixed_model(), torch.randint(256, (1, 80))
    with torch.no_grad():
        wanted = model(tokens, lengths=(30, 0, 50))
        found = model(ring.split_sequence(tokens), ring=ring, seq_len=80, lengths=(30, 0, 50))
    torch.testing.assert_close(found, ring.split_sequence(wanted), rtol=0, atol=1e-12)


@on_ranks(2, 3)
def test_decoding_equals_a_full_forward_pass() -> None:
    ring, model = rs.Ring(), mixed_model()
    texts = [torch.randint(256, (n,)) for n in (70, 52)]
    with torch.no_grad():
        wanted = [model.logits(model(text[None])[0]) for text in texts]
    for sharded in (False, True):
        decoder = Decoder(model, batch=2, ring=ring, sharded=sharded)
        logits = decoder.read([text[:-20] for text in texts])
        for step in range(20, 0, -1):
            for row, whole in zip(logits, wanted, strict=True):
                torch.testing.assert_close(row, whole[-step - 1], rtol=0, atol=1e-10)
            logits = decoder.step(torch.stack([text[-step] for text in texts]))
