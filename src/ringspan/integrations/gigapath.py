"""`SlideEncoder`: Prov-GigaPath's slide encoder, with its arguments, parameter names and outputs.

Needs neither flash-attn nor a GPU. Runs on one device or over a ring, on single slides or on batches of slides of
different sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import ringspan as rs
from ringspan.integrations.gigapath_weights import used_weights
from ringspan.integrations.tile_grid import TileGrid, check_finite, position_embedding
from ringspan.integrations.torchscale import TorchscaleEncoder, load_weights_of_one_dtype, row_places
from ringspan.integrations.torchscale_config import Padding, TorchscaleConfig
from ringspan.layout import Layout
from ringspan.models.longnet import AnyRing
from ringspan.nn.dropout import DropoutKey
from ringspan.runtime.collectives import CPU, all_gather_json
from ringspan.validation import Lengths, document_lengths

# The published sizes. All have 16 heads and an MLP of 4 times the width.
SIZES = {
    "gigapath_slide_enc12l768d": dict(embed_dim=768, depth=12),
    "gigapath_slide_enc24l1024d": dict(embed_dim=1024, depth=24),
    "gigapath_slide_enc12l1536d": dict(embed_dim=1536, depth=12),
}
_RATES = (1, 2, 4, 8, 16)


class SlideEncoder(nn.Module):
    """Tile embeddings of a slide in, one embedding of the slide out: Prov-GigaPath's ``LongNetViT``.

    The first arguments, the parameter names and the outputs are those of ``LongNetViT``. `named` creates a published
    size, `load` also reads weights.

    Args:
        in_chans: width of the tile embeddings.
        embed_dim, depth, mlp_ratio: width, layers, and width of the MLP divided by ``embed_dim``.
        slide_ngrids: side of the grid of tiles. Changes no weight and no result; tiles outside are an error.
        tile_size: side of a tile, in the unit of the coordinates.
        max_wsi_size: the longest side of a slide. With ``tile_size``, determines the segment lengths.
        norm_layer: the last norm; the published sizes have ``eps=1e-6``.
        global_pool: average the tiles, instead of reading the CLS row.
        dropout, drop_path_rate: in training mode, `forward` needs a ``dropout_key`` unless both are 0.
        num_heads: 16 in all published sizes.
        padding: ``"torchscale"`` gives the numbers of the official code, ``"none"`` those of the definition of dilated
            attention (`TorchscaleConfig`).
        allow_shared_cells: accept several tiles in one cell of the grid, as overlapping tiles have.

    >>> encoder = SlideEncoder(in_chans=24, embed_dim=64, depth=2).eval()
    >>> tiles, coords = torch.randn(1, 50, 24), 256 * torch.cartesian_prod(torch.arange(5), torch.arange(10))[None]
    >>> encoder(tiles, coords)[0].shape
    torch.Size([1, 64])
    """

    def __init__(
        self,
        in_chans: int = 1536,
        embed_dim: int = 256,
        depth: int = 12,
        slide_ngrids: int = 1000,
        tile_size: int = 256,
        max_wsi_size: int = 262144,
        norm_layer: Callable[[int], nn.Module] = nn.LayerNorm,
        global_pool: bool = False,
        dropout: float = 0.25,
        drop_path_rate: float = 0.1,
        mlp_ratio: float = 4.0,
        *,
        num_heads: int = 16,
        padding: Padding = "torchscale",
        allow_shared_cells: bool = False,
    ) -> None:
        super().__init__()
        if embed_dim % 4:
            raise ValueError(f"embed_dim={embed_dim}: must be a multiple of 4, for sines and cosines of two axes")
        self.in_chans, self.embed_dim = in_chans, embed_dim
        self.global_pool, self.grid = global_pool, TileGrid(slide_ngrids, tile_size, allow_shared_cells)
        config = TorchscaleConfig(
            width=embed_dim,
            layers=depth,
            heads=num_heads,
            mlp_width=int(embed_dim * mlp_ratio),
            pattern=rs.Dilated(segment_lengths_of(max_wsi_size, tile_size), _RATES, head_offsets="blocked"),
            dropout=dropout,
            drop_path_rate=drop_path_rate,
            padding=padding,
        )
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(in_chans, embed_dim)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.encoder = TorchscaleEncoder(config)
        self.norm = norm_layer(embed_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier for matrices, 0 for biases, and a small CLS token. Norms start at 1."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.cls_token, std=0.02)

    @staticmethod
    def named(name: str, **arguments: Any) -> SlideEncoder:
        """A published size, with random weights."""
        if name not in SIZES:
            raise ValueError(f"size {name!r}: must be one of {', '.join(SIZES)}")
        return SlideEncoder(**{"norm_layer": partial(nn.LayerNorm, eps=1e-6), **SIZES[name], **arguments})

    @staticmethod
    def load(
        source: str | Path | Mapping[str, Any],
        name: str | None = "gigapath_slide_enc12l768d",
        *,
        prefix: str = "",
        **arguments: Any,
    ) -> SlideEncoder:
        """Create an encoder in evaluation mode from official weights, in their dtype.

        Args:
            source: a file (.safetensors or .pth, of which nothing but tensors is unpickled) or a state dict. An outer
                ``{"model": ...}`` is removed.
            name: a published size; None for a size given by the other arguments.
            prefix: only weights whose names start with it are used.
            arguments: as for `SlideEncoder`.

        The decoder of the pre-training (``mask_token`` and names that start with ``decoder``) is ignored. A stored
        ``pos_embed`` must be the sines and cosines that the encoder computes. Other unknown names, and missing ones,
        are errors.
        """
        encoder = SlideEncoder(**arguments) if name is None else SlideEncoder.named(name, **arguments)
        return load_weights_of_one_dtype(encoder, used_weights(source, prefix, encoder.embed_dim))

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        all_layer_embed: bool = False,
        *,
        ring: AnyRing = None,
        seq_len: int | None = None,
        lengths: Lengths | None = None,
        cu_seqlens: Lengths | None = None,
        key_padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> list[Tensor]:
        """Embeddings of the slides, (slides, embed_dim), in a list of one entry.

        Args:
            x: (slides, tiles, in_chans): tile embeddings. Over a `Ring`, this rank's tiles (`shard`, `tile_rows`).
            coords: (slides, tiles, 2): the coordinates (x, y) of the tiles, in the same order.
            all_layer_embed: return one entry for the embedded tiles and one after each layer, without the encoder's own
                last norm, as the official code does.
            lengths, cu_seqlens: tiles per slide: ``x`` is (1, tiles, in_chans) and holds slides one after another. Each
                gets its own CLS row. Over a `Ring`, they describe the tiles of all ranks.
            key_padding_mask: (slides, tiles), bool: True for padding, which is removed and never computed.
            ring: splits the slides over devices. Results are equal on all ranks. Backward sums their gradients over
                ranks: divide a loss that every rank computes by the number of ranks, or average gradients (DDP, FSDP).
            seq_len: number of tiles on all ranks. If given, skips the exchange in which ranks agree and share errors.
            dropout_key: needed in training mode with dropout; other ``step`` in each call.
        """
        sequence, rows = self._sequence(x, coords, ring, seq_len, lengths, cu_seqlens, key_padding_mask, dropout_key)
        readout = partial(self._outcome, rows=rows)
        options = {**rows.options, "dropout_key": dropout_key}
        if all_layer_embed:
            return self.encoder(sequence, **options, readout=readout)
        return [readout(self.encoder(sequence, **options))]

    def queries_and_keys(
        self,
        x: Tensor,
        coords: Tensor,
        layer: int,
        *,
        ring: AnyRing = None,
        seq_len: int | None = None,
        lengths: Lengths | None = None,
        cu_seqlens: Lengths | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Queries and keys of a layer, and the options of its attention: `TorchscaleEncoder.queries_and_keys`.

        Rows are those of the sequence: for each slide its CLS row, then its tiles.
        """
        sequence, rows = self._sequence(x, coords, ring, seq_len, lengths, cu_seqlens, None, None)
        return self.encoder.queries_and_keys(sequence, layer, **rows.options)

    @torch.no_grad()
    def attention_weights(
        self,
        x: Tensor,
        coords: Tensor,
        layer: int | None = None,
        *,
        ring: AnyRing = None,
        seq_len: int | None = None,
        lengths: Lengths | None = None,
        cu_seqlens: Lengths | None = None,
    ) -> Tensor:
        """The weights with which the CLS row of each slide sees every tile, (slides, heads, tiles): a heat map.

        Arguments are those of `forward`; ``layer`` counts from 0 and is the last by default. The weights of a slide add
        up to 1 less that of the CLS row itself. Packed slides share the last dimension and see only their own tiles.
        Over a `Ring`, the columns are this rank's tiles. `rs.attention_weights` reads other rows.
        """
        layer = len(self.encoder.layers) - 1 if layer is None else layer
        sequence, rows = self._sequence(x, coords, ring, seq_len, lengths, cu_seqlens, None, None)
        q, k, options = self.encoder.queries_and_keys(sequence, layer, **rows.options)
        packed = rows.options["lengths"]
        cls_rows = [0] if packed is None else [0, *accumulate(packed[:-1])]

        def of_cls(values: Tensor) -> Tensor:
            if isinstance(ring, rs.Ring):
                return ring.rows_at(values, cls_rows, seq_len=rows.options["seq_len"], lengths=packed)
            return values[:, cls_rows]

        if options["sinks"] is not None:
            options["sinks"] = of_cls(options["sinks"])
        weights = rs.attention_weights(of_cls(q), k, rows=cls_rows, **options)
        return weights[..., rows.positions > 0].transpose(1, 2).flatten(0, 1)

    def checkpoint_layers(self, wanted: bool = True) -> None:
        """Whether backward recomputes the layers instead of keeping activations. Attention outputs are always kept."""
        self.encoder.checkpoint_layers(wanted)

    def shard(
        self,
        x: Tensor,
        coords: Tensor,
        ring: rs.Ring,
        *,
        lengths: Lengths | None = None,
        cu_seqlens: Lengths | None = None,
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of ``x`` and ``coords``, which hold all tiles, as memory-mapped tensors do.

        Checks the coordinates of all tiles; `forward` sees only those of one rank.
        """
        counts = _tile_counts(lengths, cu_seqlens, x.shape[1])
        self._checked_cells(x, coords, None, counts)  # does not read x, which may be larger than memory
        mine = self.tile_rows(x.shape[1], ring, lengths=counts)
        return x[:, mine.to(x.device)], coords[:, mine.to(coords.device)]

    @staticmethod
    def tile_rows(
        tiles: int, ring: rs.Ring, *, lengths: Lengths | None = None, cu_seqlens: Lengths | None = None
    ) -> Tensor:
        """Which of ``tiles`` tiles this rank holds, int64: to read only these from a file.

        The ring splits sequences in which a CLS row precedes the tiles of each slide.
        """
        counts = _tile_counts(lengths, cu_seqlens, tiles)
        whole, positions, slides = _row_places(1, tiles, CPU, ring, counts)
        return (ring.positions(whole, lengths=_rows_of_slides(counts)) - slides[0] - 1)[positions > 0]

    def _sequence(
        self,
        x: Tensor,
        coords: Tensor,
        ring: AnyRing,
        seq_len: int | None,
        lengths: Lengths | None,
        cu_seqlens: Lengths | None,
        key_padding_mask: Tensor | None,
        key: DropoutKey | None,
    ) -> tuple[Tensor, _SlideRows]:
        """The rows of this call, (batch, rows, embed_dim): embedded tiles, and the CLS rows among them."""
        if key_padding_mask is not None:
            if isinstance(ring, rs.Ring) or lengths is not None or cu_seqlens is not None:
                raise ValueError(
                    "key_padding_mask with a Ring, lengths or cu_seqlens: pass what pack_slides returns instead"
                )
            x, coords, lengths = pack_slides(x, coords, key_padding_mask)
        tiles, counts, cells = self._agree(x, coords, ring, seq_len, lengths, cu_seqlens, key)
        whole, positions, slides = _row_places(len(x), tiles, x.device, ring, counts)
        embedded = self.patch_embed["proj"](x)
        embedded = embedded + position_embedding(cells, self.embed_dim).to(self.cls_token)
        sequence = embedded.new_empty(len(x), len(positions), self.embed_dim)
        sequence[:, positions > 0] = embedded
        sequence[:, positions == 0] = self.cls_token.to(embedded.dtype)  # its position embedding is 0
        options = dict(ring=ring, seq_len=whole, lengths=_rows_of_slides(counts))
        per_slide = torch.tensor((tiles,) * len(x) if counts is None else counts, device=x.device)
        return sequence, _SlideRows(positions, slides, per_slide, options)

    def _agree(
        self,
        x: Tensor,
        coords: Tensor,
        ring: AnyRing,
        seq_len: int | None,
        lengths: Lengths | None,
        cu_seqlens: Lengths | None,
        key: DropoutKey | None,
    ) -> tuple[int, tuple[int, ...] | None, Tensor]:
        """The number of tiles on all ranks, that of each packed slide, and the grid cells of this rank's tiles."""
        if not isinstance(ring, rs.Ring) or seq_len is not None:
            _check_shapes(x, coords, self.in_chans, packed=lengths is not None or cu_seqlens is not None)
            check_finite("x", x)
            tiles = seq_len if isinstance(ring, rs.Ring) and seq_len is not None else x.shape[1]
            if seq_len not in (None, tiles):
                raise ValueError(f"seq_len={seq_len}, but there are {tiles} tiles: must be equal without a ring")
            counts = _tile_counts(lengths, cu_seqlens, tiles)
            if isinstance(ring, rs.Ring):
                _check_held({ring.rank: x.shape[1]}, tiles, counts, ring)
            return tiles, counts, self._checked_cells(x, coords, ring, counts)
        problem, cells, counts = "", coords, None
        try:  # an error on one rank is raised on all, so that none waits for it
            counts = _tile_counts(lengths, cu_seqlens, None)
            cells = self._checked_cells(x, coords, ring, counts)
            check_finite("x", x)
        except ValueError as error:
            problem = str(error)
        equal = {"shapes": [len(x), *x.shape[2:]], "lengths": counts, "dropout_key": None if key is None else str(key)}
        mine = {"tiles": x.shape[1] if x.dim() == 3 else 0, "problem": problem, **equal}
        by_rank = all_gather_json(mine, group=ring.group, device=x.device)
        problems = {rank: each["problem"] for rank, each in enumerate(by_rank) if each["problem"]}
        if problems:
            raise ValueError("; ".join(f"rank {rank}: {text}" for rank, text in problems.items()))
        for name in equal:
            found = [each[name] for each in by_rank]
            if any(value != found[0] for value in found):
                raise rs.RingError(f"{name} of ranks 0 .. {ring.size - 1} are {found}: must be equal on all ranks")
        held = {rank: each["tiles"] for rank, each in enumerate(by_rank)}
        _tile_counts(counts, None, sum(held.values()))
        _check_held(held, sum(held.values()), counts, ring)
        return sum(held.values()), counts, cells

    def _checked_cells(self, x: Tensor, coords: Tensor, ring: AnyRing, counts: tuple[int, ...] | None) -> Tensor:
        """The grid cells of the tiles. Raises if they are not tiles of slides; over a ring, of this rank's parts."""
        _check_shapes(x, coords, self.in_chans, packed=counts is not None)
        cells = self.grid.cells(coords)
        batch, tiles = coords.shape[:2]
        if counts is None:
            self.grid.check_shared(
                cells, coords, torch.arange(batch, device=cells.device)[:, None].expand(batch, tiles)
            )
        else:
            _, positions, slides = _row_places(1, sum(counts), cells.device, ring, counts)
            if (slides := slides[:, positions > 0]).shape[1] == tiles:  # otherwise reported as a wrong number
                self.grid.check_shared(cells, coords, slides)
        return cells

    def _outcome(self, hidden: Tensor, rows: _SlideRows) -> Tensor:
        """The embedding of each slide, from the hidden states of this rank's rows; the same on all ranks."""
        chosen = rows.positions > 0 if self.global_pool else rows.positions == 0
        picked = hidden[:, chosen].flatten(0, 1)
        wide = picked if picked.dtype == torch.float64 else picked.float()
        sums = wide.new_zeros(len(rows.tiles), self.embed_dim).index_add(0, rows.slides[:, chosen].flatten(), wide)
        ring = rows.options["ring"]
        if isinstance(ring, rs.Ring):
            sums = _SumOverRanks.apply(sums, ring.group)
        if self.global_pool:
            sums = sums / rows.tiles[:, None]
        return self.norm(sums.to(hidden.dtype))


@dataclass(frozen=True)
class _SlideRows:
    """The rows of a call: for each slide a CLS row, then its tiles."""

    positions: Tensor  # (rows,): in the sequence of the slide
    slides: Tensor  # (batch, rows): the number of the slide
    tiles: Tensor  # (slides,): tiles of each slide on all ranks
    options: dict[str, Any]  # of TorchscaleEncoder


class _SumOverRanks(torch.autograd.Function):
    """Forward and backward: the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def pack_slides(x: Tensor, coords: Tensor, key_padding_mask: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """A padded batch as packed slides: ``x``, ``coords`` and ``lengths`` for `SlideEncoder.forward`.

    ``key_padding_mask`` is (slides, tiles), True for padding, which follows the tiles of a slide. (The ``pad_mask`` of
    Prov-GigaPath's data loader is True for tiles: pass ``~pad_mask``.)

    >>> x, coords = torch.zeros(2, 3, 8), torch.zeros(2, 3, 2)
    >>> pack_slides(x, coords, torch.tensor([[False, False, True], [False, False, False]]))[2]
    (2, 3)
    """
    _check_shapes(x, coords, x.shape[-1], packed=False)
    if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != x.shape[:2]:
        raise ValueError(
            f"key_padding_mask is {key_padding_mask.dtype} of shape {tuple(key_padding_mask.shape)}: must be bool of "
            f"shape {tuple(x.shape[:2])}, True for padding"
        )
    inverted = (key_padding_mask[:, :-1] & ~key_padding_mask[:, 1:]).any(1) | key_padding_mask.all(1)
    if inverted.any():
        raise ValueError(
            f"key_padding_mask[{int(inverted.nonzero()[0])}]: padding must follow at least one tile; True means "
            "padding. If True means a tile, as in the pad_mask of Prov-GigaPath's data loader, pass ~pad_mask"
        )
    tiles = ~key_padding_mask
    return x[tiles][None], coords[tiles.to(coords.device)][None], tuple(tiles.sum(1).tolist())


def segment_lengths_of(max_wsi_size: int, tile_size: int) -> tuple[int, ...]:
    """The segment lengths of the official code: five, evenly spaced in their logarithms from 1024 on.

    >>> segment_lengths_of(262144, 256)
    (1024, 5792, 32768, 185363, 1048576)
    """
    if not 1 <= tile_size <= max_wsi_size:
        raise ValueError(f"tile_size={tile_size}, max_wsi_size={max_wsi_size}: a slide has at least one tile")
    last = ((max_wsi_size // tile_size) ** 2).bit_length() - 1
    return tuple(int(2 ** (10 + (last - 10) * i / 4)) for i in range(5))


def _check_shapes(x: Tensor, coords: Tensor, in_chans: int, packed: bool) -> None:
    if x.dim() != 3 or x.shape[-1] != in_chans:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: must be (slides, tiles, {in_chans}); for one slide without the first "
            "dimension, pass x[None] and coords[None]"
        )
    if packed and len(x) != 1:
        raise ValueError(f"x has shape {tuple(x.shape)}: with lengths or cu_seqlens, must be (1, tiles, {in_chans})")
    if coords.shape != (*x.shape[:2], 2):
        swapped = "; pass coords.transpose(1, 2)" if coords.shape == (len(x), 2, x.shape[1]) else ""
        raise ValueError(f"coords has shape {tuple(coords.shape)}: must be {(*x.shape[:2], 2)}, (x, y){swapped}")


def _tile_counts(lengths: Any, cu_seqlens: Any, tiles: int | None) -> tuple[int, ...] | None:
    """The number of tiles of each packed slide; None if slides are not packed."""
    counts = document_lengths(lengths, cu_seqlens, tiles)
    if counts is None:
        return None
    for i, count in enumerate(counts):
        if count < 1:
            raise ValueError(f"lengths[{i}]={count}: a slide has at least 1 tile; leave it out")
    if tiles is not None and sum(counts) != tiles:
        raise ValueError(f"lengths add up to {sum(counts)}, but there are {tiles} tiles: each belongs to one slide")
    return counts


def _row_places(
    batch: int, tiles: int, device: torch.device, ring: AnyRing, counts: tuple[int, ...] | None
) -> tuple[int, Tensor, Tensor]:
    """Rows of the whole sequence, and for each row of this rank its position, (rows,), and slide, (batch, rows)."""
    whole, lengths = tiles + (1 if counts is None else len(counts)), _rows_of_slides(counts)
    rows = _layout_of(ring, whole, lengths).rows_of(ring.rank) if isinstance(ring, rs.Ring) else whole
    documents = None if lengths is None else torch.tensor(lengths)
    positions, _, slides = row_places(batch, rows, device, ring, whole, documents)
    return whole, positions, slides


def _rows_of_slides(counts: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The rows of each packed slide: its tiles and the CLS row."""
    return None if counts is None else tuple(count + 1 for count in counts)


def _layout_of(ring: rs.Ring, rows: int, lengths: tuple[int, ...] | None) -> Layout:
    if lengths is None and ring.layout not in ("contiguous", "zigzag"):
        raise rs.RingError(
            f"layout={ring.layout!r} balances packed slides: pass lengths=, the number of tiles of each, or make a "
            "contiguous or zigzag ring"
        )
    return ring.layout_of(rows, lengths)


def _check_held(held: dict[int, int], tiles: int, counts: tuple[int, ...] | None, ring: rs.Ring) -> None:
    """Raise unless the ranks hold the tiles that the layout gives them."""
    cls_rows = [0, *accumulate(count + 1 for count in counts or (tiles,))][:-1]
    layout = _layout_of(ring, tiles + len(cls_rows), _rows_of_slides(counts))
    for rank, found in held.items():
        spans = layout.spans(rank)
        wanted = layout.rows_of(rank) - sum(
            bisect_left(cls_rows, s.stop) - bisect_left(cls_rows, s.start) for s in spans
        )
        if found != wanted:
            raise rs.RingError(
                f"rank {rank} passes {found} tiles, but has {wanted} of {tiles} in layout {ring.layout!r} over "
                f"{ring.size} ranks: pass what shard returns, or read those of tile_rows"
            )
