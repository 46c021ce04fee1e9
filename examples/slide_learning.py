"""Learns from distant regions of a slide: over a ring as in one process, and not at all if ranks see only their tiles.

    torchrun --nproc-per-node=2 examples/slide_learning.py            # over a ring; about a minute on two cores
    python examples/slide_learning.py                                 # the same in one process
    torchrun --nproc-per-node=2 examples/slide_learning.py --alone    # attention does not cross ranks
    python examples/slide_learning.py --pooled                        # an MLP on the mean of the tiles

A slide has two pieces of tissue, one for each rank. Each piece has a region of gland and a region of stroma; one of the
two is inflamed, the other is scarred. The label says whether the same one is inflamed in both pieces. One piece says
nothing about the label, and neither does the mean of the tiles: it is the same for both labels.

Over a ring, the example first compares itself with one process in fp64.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F

import ringspan as rs
from ringspan.integrations.gigapath import SlideEncoder
from ringspan.tools.synthetic_slide import tissue

TILE = 256  # pixels
PIECES, REGION = (127, 128), 12  # tiles. With the CLS row, the pieces are the shards of two ranks
FEATURES, STRENGTH, NOISE = 16, 4.0, 0.5  # of a tile: their number, the length of a direction, the noise of each
SLIDES_A_STEP, TEST_SLIDES = 32, 256
LEARNING_RATE, WARM_UP, CLIP = 2e-3, 20, 1.0
COMPARED_STEPS, ALLOWED = 3, 1e-10  # with one process, in fp64


@dataclass(frozen=True)
class Slides:
    """Tile features (slides, tiles, features), coordinates (slides, tiles, 2) in pixels, and labels (slides,)."""

    x: Tensor
    coords: Tensor
    labels: Tensor


def directions() -> Tensor:
    """How gland and stroma differ from other tissue, and how inflammation and scars change them, (4, features)."""
    noise = torch.randn(FEATURES, 4, generator=torch.Generator().manual_seed(0))
    return STRENGTH * torch.linalg.qr(noise).Q.T


def make_slides(count: int, seed: int, noise: float = NOISE) -> Slides:
    """Slides with tiles sorted by x, then by y: the tiles of the left piece come first."""
    generator = torch.Generator().manual_seed(seed)
    x = noise * torch.randn(count, sum(PIECES), FEATURES, generator=generator)
    coords = torch.zeros(count, sum(PIECES), 2, dtype=torch.int64)
    inflamed = torch.randint(2, (count, len(PIECES)), generator=generator)  # of each piece: gland or stroma
    gland_and_stroma, changes = directions().split(2)
    for slide in range(count):
        first = left = 0
        for piece, tiles in enumerate(PIECES):
            cells = tissue(tiles, 1, int(torch.randint(2**31, (), generator=generator)))
            start = cells[int(torch.randint(tiles, (), generator=generator))]
            by_distance = first + (cells - start).square().sum(1).argsort(stable=True)
            regions = torch.stack((by_distance[:REGION], by_distance[-REGION:]))
            x[slide, regions] += gland_and_stroma[:, None]
            x[slide, regions.roll(int(inflamed[slide, piece]), 0)] += changes[:, None]
            coords[slide, first : first + tiles] = TILE * (cells + torch.tensor((left, 0)))
            first, left = first + tiles, int(cells[:, 0].max()) + 3
    return Slides(x, coords, (inflamed[:, 0] == inflamed[:, 1]).long())


class Classifier(nn.Module):
    """Logits of the two labels, (slides, 2), the same on all ranks. The last layer is linear.

    With ``alone``, each rank encodes its tiles as a slide of their own, and the embeddings are averaged over ranks.
    """

    def __init__(self, ring: rs.Ring | None, alone: bool, pooled: bool) -> None:
        super().__init__()
        self.ring, self.alone = ring, alone
        self.encoder: nn.Module
        if pooled:
            self.encoder = nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64))
        else:
            self.encoder = SlideEncoder(
                in_chans=FEATURES,
                embed_dim=64,
                depth=2,
                mlp_ratio=2.0,
                num_heads=4,
                max_wsi_size=64 * TILE,
                dropout=0.05,
                drop_path_rate=0.05,
                padding="none",
            )
        self.head = nn.Linear(64, 2)

    def forward(self, slides: Slides, key: rs.nn.DropoutKey | None = None) -> Tensor:
        x, coords, ring = slides.x.to(self.head.weight.dtype), slides.coords, self.ring
        if not isinstance(self.encoder, SlideEncoder):
            return self.head(self.encoder(x.mean(1)))
        if ring is None:
            return self.head(self.encoder(x, coords, dropout_key=key)[0])
        tiles = x.shape[1]
        x, coords = self.encoder.shard(x, coords, ring)
        if not self.alone:
            return self.head(self.encoder(x, coords, ring=ring, seq_len=tiles, dropout_key=key)[0])
        (embedding,) = self.encoder(x, coords, dropout_key=key)
        return self.head(all_reduce(embedding, group=ring.group) / ring.size)


def train(model: Classifier, seed: int, steps: int, test: Slides | None, every: int) -> list[dict[str, float]]:
    """Train on new slides in each step. Returns the loss of each step, and the test accuracy of some."""
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    start, found = time.perf_counter(), []
    for step in range(1, steps + 1):
        slides = make_slides(SLIDES_A_STEP, seed=1_000_000 * (seed + 1) + step)
        loss = F.cross_entropy(model.train()(slides, rs.nn.DropoutKey(seed, step)), slides.labels)
        optimizer.zero_grad()
        (loss / (model.ring.size if model.ring else 1)).backward()  # every rank computes the whole loss
        if model.ring is not None:
            gradients = nn.utils.parameters_to_vector(weight.grad for weight in weights)
            dist.all_reduce(gradients, group=model.ring.group)  # a sum
            nn.utils.vector_to_parameters(gradients, (weight.grad for weight in weights))
        nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        warm_up.step()
        record = {"step": step, "loss": loss.item(), "seconds": time.perf_counter() - start}
        if test is not None and (step % every == 0 or step == steps):
            record["accuracy"] = accuracy(model, test)
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(f"{step:5} {record['loss']:8.4f} {record['accuracy']:9.1%} {record['seconds']:8.1f}", flush=True)
        found.append(record)
    return found


@torch.no_grad()
def accuracy(model: Classifier, test: Slides) -> float:
    model.eval()
    parts = zip(test.x.split(32), test.coords.split(32), test.labels.split(32), strict=True)
    return float(torch.cat([model(Slides(*part)).argmax(1) == part[2] for part in parts]).float().mean())


def new_model(seed: int, ring: rs.Ring | None, alone: bool = False, pooled: bool = False) -> Classifier:
    torch.manual_seed(seed)  # the same weights on all ranks
    return Classifier(ring, alone, pooled)


def difference_from_one_process(seed: int, ring: rs.Ring) -> float:
    """Train a few steps in fp64, over the ring and in one process: the largest difference of a loss or a weight."""
    models = [new_model(seed, each).double() for each in (ring, None)]
    losses = [[record["loss"] for record in train(model, seed, COMPARED_STEPS, None, 1)] for model in models]
    apart = [abs(a - b) for a, b in zip(*losses, strict=True)]
    weights = zip(*(model.parameters() for model in models), strict=True)
    return max(*apart, *(float((a - b).detach().abs().max()) for a, b in weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", action="store_true", help="attention does not cross ranks; needs two")
    parser.add_argument("--pooled", action="store_true", help="an MLP on the mean of the tiles; one process")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the slides and dropout")
    parser.add_argument("--quick", action="store_true", help="2 steps and few test slides, to see that it runs")
    parser.add_argument("--out", type=Path, help="write the loss of each step and the accuracies, as JSON lines")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ring, main_rank = None, True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        ring, main_rank = rs.Ring(layout="contiguous"), dist.get_rank() == 0
    ranks = 1 if ring is None else ring.size
    if (options.alone and ranks != 2) or (options.pooled and ranks != 1):
        raise SystemExit(f"{ranks} processes: --alone needs two, one for each piece of tissue, and --pooled one")
    if options.quick:
        options.steps, options.every = 2, 1

    difference = 0.0
    if ring is not None and not options.alone:
        difference = difference_from_one_process(options.seed, ring)
        if main_rank:
            print(
                f"{ranks} ranks, {COMPARED_STEPS} steps: losses and weights differ from one process by {difference:.1e}"
            )
    if main_rank:
        print(" step     loss  accuracy  seconds")
    test = make_slides(8 if options.quick else TEST_SLIDES, seed=0)
    model = new_model(options.seed, ring, options.alone, options.pooled)
    found = train(model, options.seed, options.steps, test, options.every)
    if options.out is not None and main_rank:
        options.out.write_text("".join(json.dumps(record) + "\n" for record in found))
    if ring is not None:
        dist.barrier()  # gloo aborts if a rank leaves while another still communicates
        dist.destroy_process_group()
    if not difference <= ALLOWED:
        raise SystemExit(f"{difference:.1e} is more than {ALLOWED:.1e}")


if __name__ == "__main__":
    main()
