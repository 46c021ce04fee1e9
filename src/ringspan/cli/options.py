"""What commands share: options, how their values are parsed, and the console. Does not import torch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar, cast, get_type_hints

import typer

from ringspan.geometry import Dilated, Pattern, parse_pattern, unselected_warning
from ringspan.layout import check_layout_name
from ringspan.planning import ByNode, Routing
from ringspan.runtime.counts import parse_count, parse_documents
from ringspan.train.config import TrainSettings, choices_of

if TYPE_CHECKING:
    from rich.console import Console

    from ringspan.layout import LayoutName
    from ringspan.models import LongNet


Value = TypeVar("Value")
SPANNING: Final = "spanning"
PATTERN_TERMS_HELP = "full, SEGMENTxRATE pairs, 'window N', or a sum: 'window 511 + 4096x4,65536x64'."
PATTERN_HELP = f"spanning (2048x1,8192x4,.. up to --tokens), {PATTERN_TERMS_HELP}"
DTYPES = ("float32", "bfloat16", "float16", "float64")


def read_pattern(text: str) -> Pattern:
    """``full``, segment lengths and rates such as ``2048x1,8192x4``, ``window 1023``, or a sum of these.

    >>> read_pattern("2048x1,8k x4").segment_lengths
    (2048, 8192)
    >>> read_pattern("window 1k right 2 + full").text
    'window 1024 right 2 + full'
    """
    try:
        return parse_pattern(text, _read_count_or_zero)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def read_pattern_at(tokens: int) -> Callable[[str], Pattern]:
    """A reader of patterns that also accepts ``spanning``: segments that grow by a factor of 4 up to the length.

    >>> read_pattern_at(32768)("spanning").segment_lengths
    (2048, 8192, 32768)
    """
    return lambda text: Dilated.spanning(tokens) if text.strip().lower() == SPANNING else read_pattern(text)


def read_count(text: str, least: int = 1) -> int:
    """A whole number, also written as 32k (x 1024), 4M, 1G or 1e9.

    >>> read_count("32k"), read_count("1e9"), read_count("131_072")
    (32768, 1000000000, 131072)
    """
    try:
        return parse_count(text, least)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _read_count_or_zero(text: str) -> int:
    return read_count(text, least=0)


def read_counts(text: str) -> list[int]:
    """Whole numbers separated by commas.

    >>> read_counts("1,2,4k")
    [1, 2, 4096]
    """
    return [read_count(word) for word in text.split(",")]


def read_dtype(text: str) -> str:
    """The name of a dtype of torch."""
    if text not in DTYPES:
        raise typer.BadParameter(f"{text!r}: must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return text


def read_as(option: str, reader: Callable[[str], Value], text: str) -> Value:
    """The value that ``reader`` parses; errors name the option."""
    try:
        return reader(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint=option) from error


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints text unchanged.

    Paths, error messages and pip commands contain brackets, which rich would otherwise parse as markup and remove.
    """
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=stderr, quiet=quiet, markup=False, highlight=False)


def warn_of_unselected(console: Console, pattern: Pattern, tokens: int, kv_heads: int) -> str:
    """Print the warning that `rs.attention` would give, and return it."""
    warning = unselected_warning(pattern, tokens, kv_heads)
    if warning:
        console.print(f"Warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    return warning


@contextmanager
def writing_to(option: str, place: Path) -> Iterator[None]:
    """Turn an OSError in the block into a one-line error that names the option and the folder."""
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise typer.BadParameter(f"{place}: must be a place that can be written ({why})", param_hint=option) from error


AsJson = Annotated[bool, typer.Option("--json", help="Print only the result, as JSON, to stdout.")]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write a trace for ui.perfetto.dev: what each rank does when.",
        show_default="none",
    ),
]
Heads = Annotated[int, typer.Option(help="Query heads.", min=1)]
HeadDim = Annotated[int, typer.Option(help="Head dimension.", min=1)]
RoutingName = Annotated[
    str,
    typer.Option(
        help="relay (from neighbour to neighbour), direct (from the owner) or, with --ranks-per-node, by-node "
        "(relay that enters each node once)."
    ),
]
RanksPerNode = Annotated[
    int | None, typer.Option(help="Ranks of a node; consecutive.", min=1, show_default="all ranks")
]
NodeBandwidth = Annotated[
    float | None,
    typer.Option(
        help="Bytes/s that the ranks of a node together send to other nodes.",
        show_default="each rank has its --bandwidth",
    ),
]
NodeLatency = Annotated[
    float | None, typer.Option(help="Latency of a hop between nodes in seconds.", show_default="--latency")
]


def as_routing(name: str, ranks_per_node: int | None) -> Routing:
    """The routing with this name; other names are left to `check_routing`."""
    if name != "by-node":
        return cast("Routing", name)
    if ranks_per_node is None:
        raise typer.BadParameter("by-node needs the size of a node: add --ranks-per-node", param_hint="--routing")
    return ByNode(ranks_per_node)


def check_nodes(
    ring_size: int, ranks_per_node: int | None, node_bandwidth: float | None, node_latency: float | None
) -> None:
    """Raise unless the ring fills its nodes, and rates between nodes are given only for nodes."""
    if ranks_per_node is None:
        for option, given in (("--node-bandwidth", node_bandwidth), ("--node-latency", node_latency)):
            if given is not None:
                raise typer.BadParameter("give --ranks-per-node too", param_hint=option)
    elif ring_size > ranks_per_node and ring_size % ranks_per_node:
        raise typer.BadParameter(
            f"{ranks_per_node}: must divide the {ring_size} ranks, so that the ring fills its nodes",
            param_hint="--ranks-per-node",
        )


def flags_of(shown: Any, source: str, topic: str = "") -> list[inspect.Parameter]:
    """A flag for each field of a dataclass that has help text; None if not given, so that the preset applies.

    Help shows the values of ``shown`` as defaults, which are those of the preset ``source``.
    """
    settings = type(shown)
    hints = get_type_hints(settings)
    return [
        inspect.Parameter(
            entry.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                _kind(settings, entry.name, hints[entry.name]),
                typer.Option(
                    *_declarations(entry.name, hints[entry.name]),
                    help=entry.metadata["help"],
                    rich_help_panel=entry.metadata["topic"] or topic,
                    show_default=f"{source}: {_text(getattr(shown, entry.name))}",
                    **_reading(entry.name, hints[entry.name]),
                ),
            ],
        )
        for entry in dataclasses.fields(settings)
        if "help" in entry.metadata
    ]


def with_flags(command: Callable[..., None], flags: list[inspect.Parameter]) -> Callable[..., None]:
    """The command, with ``flags`` in its signature instead of its ``**`` parameter."""
    own = inspect.signature(command, eval_str=True)
    kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
    command.__signature__ = own.replace(parameters=[*kept, *flags])  # type: ignore[attr-defined]
    return command


def _declarations(name: str, kind: Any) -> list[str]:
    """The name of a flag that differs from that of its setting: a list is given one by one, in the singular."""
    return [f"--{name.removesuffix('s')}"] if kind == tuple[str, ...] else []


def _kind(settings: type, name: str, kind: Any) -> Any:
    """The type of a flag: one that typer parses, or text."""
    if kind == tuple[str, ...]:
        return list[str]
    return kind if kind in (int, float, bool) or choices_of(settings, name) else str


def _reading(name: str, kind: Any) -> dict[str, Any]:
    """The parser of a flag whose type typer does not parse."""
    if kind is int and name == "tokens":
        return {"parser": read_count, "metavar": "COUNT"}
    if name == "patterns":
        return {"parser": lambda text: read_pattern(text).text, "metavar": "PATTERN"}
    return {}


def _text(value: Any) -> str:
    """A value as its flag accepts it."""
    if isinstance(value, tuple):
        return ", ".join(map(repr, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def read_documents(text: str) -> tuple[int, ...]:
    """Lengths of packed documents, in order, separated by commas; LENGTH*COUNT repeats one.

    >>> read_documents("4k, 100*3")
    (4096, 100, 100, 100)
    """
    try:
        return parse_documents(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


LENGTHS_HELP = "Lengths of packed documents, such as 64k,512*128; their sum replaces --tokens."


def read_lengths(text: str) -> list[int]:
    """Lengths separated by commas; FIRST..LAST means doubling.

    >>> read_lengths("4k..16k"), read_lengths("1000,2k")
    ([4096, 8192, 16384], [1000, 2048])
    """
    lengths: set[int] = set()
    for word in text.split(","):
        first, dots, last = word.partition("..")
        n = read_count(first)
        end = read_count(last) if dots else n
        if n > end:
            raise typer.BadParameter(f"{word!r}: the first length must not be longer than the last")
        while n <= end:
            lengths.add(n)
            n *= 2
    return sorted(lengths)


def read_bytes(text: str) -> int:
    """Bytes, with or without a unit; units are powers of 1024.

    >>> read_bytes("8GiB"), read_bytes("512M"), read_bytes("1.5 gib")
    (8589934592, 536870912, 1610612736)
    """
    try:
        return read_count(text.lower().replace(" ", "").removesuffix("b").removesuffix("i"))
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r}: must be a number of bytes, such as 8GiB or 512MiB") from None


def refuse_balanced(layout: str) -> None:
    """Raise for the balanced layout, in commands that split all sequences of a length alike."""
    if layout == "balanced":
        raise typer.BadParameter("'balanced': depends on packed documents; use contiguous or zigzag in this command")


def read_layout(text: str) -> LayoutName | None:
    """The name of a layout, or None for ``best``: the faster layout of each case."""
    if text == "best":
        return None
    try:
        check_layout_name(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, or 'best'") from error
    refuse_balanced(text)
    return text  # type: ignore[return-value]


Step: TypeAlias = Annotated[
    int, typer.Option(help="Load the weights of the checkpoint after this many steps; 0 loads the final model.")
]


def run_settings(run: Path) -> TrainSettings:
    """The settings in the folder of a run."""
    path = run / "settings.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the folder of a run, the --out of `ringspan train`")
    return TrainSettings.read(path)


def trained_model(run: Path, step: int) -> LongNet:
    """The final model of a run, or that after ``step`` steps; raises if the run continued after its final model."""
    from ringspan.models import LongNet  # noqa: PLC0415
    from ringspan.train.checkpoint import STEPS, Checkpoints  # noqa: PLC0415

    settings = run_settings(run)
    checkpoints = Checkpoints(run / "checkpoints", settings.keep)
    if not step:
        steps, written = checkpoints.steps(), run / "model" / STEPS
        if steps and not written.is_file():
            raise ValueError(f"{run} has no final model yet: use --step {steps[-1]}, its last checkpoint")
        if steps and written.read_text().strip() != str(steps[-1]):
            raise ValueError(
                f"{run} continued after its model was written: use --step {steps[-1]}, its last checkpoint"
            )
        return LongNet.from_pretrained(run / "model")
    model = LongNet(settings.model)
    checkpoints.load_weights(step, model)
    return model
