"""Out-of-core attention: sequences larger than memory, computed shard by shard with the plan and engine of a ring.

Sources and sinks are tensors in host memory, memory-mapped files, or callables. `rs.stream_attention` and
`rs.stream_backward` read from one and write to the other.
"""

from ringspan.streaming.attention import stream_attention, stream_backward
from ringspan.streaming.job import ShardDone, StreamSummary
from ringspan.streaming.mapped_files import create_numpy, create_safetensors, open_numpy, open_safetensors
from ringspan.streaming.sinks import CallbackSink, ChecksumSink, QueryPosition, Sink
from ringspan.streaming.sources import CallableSource, RowShape, Source, SyntheticSource, TensorRows

__all__ = [
    "CallableSource",
    "CallbackSink",
    "ChecksumSink",
    "QueryPosition",
    "RowShape",
    "ShardDone",
    "Sink",
    "Source",
    "StreamSummary",
    "SyntheticSource",
    "TensorRows",
    "create_numpy",
    "create_safetensors",
    "open_numpy",
    "open_safetensors",
    "stream_attention",
    "stream_backward",
]
