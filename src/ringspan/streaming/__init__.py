"""Streaming: sequences that do not fit in memory, walked shard by shard with the ring's own plan and engine.

Sources and sinks are tensors in host memory, memory-mapped files, or callables; `rs.stream_attention` and
`rs.stream_backward` run between them.
"""

from ringspan.streaming.attention import stream_attention, stream_backward
from ringspan.streaming.job import ShardDone, Streamed
from ringspan.streaming.mapped_files import create_numpy, create_safetensors, open_numpy, open_safetensors
from ringspan.streaming.sinks import DigestedRows, Place
from ringspan.streaming.sources import ConsumedRows, CountedRows, HeldRows, MadeRows, RowShape, Sink, Source

__all__ = [
    "ConsumedRows",
    "CountedRows",
    "DigestedRows",
    "HeldRows",
    "MadeRows",
    "Place",
    "RowShape",
    "ShardDone",
    "Sink",
    "Source",
    "Streamed",
    "create_numpy",
    "create_safetensors",
    "open_numpy",
    "open_safetensors",
    "stream_attention",
    "stream_backward",
]
