"""ringspan: exact context parallelism for full, sliding-window and dilated (LongNet) attention.

>>> import torch, ringspan as rs
>>> q, k, v = torch.randn(3, 1, 4096, 8, 64).unbind()
>>> out = rs.attention(q, k, v, pattern=rs.Dilated((1024, 4096), (1, 4)), causal=True)

Each public name is imported when it is first used: `ringspan --help` and the planner's integers do not import torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Every public name, and the module that defines it. Submodules map to themselves.
_MODULE_OF = {
    "attention": "ringspan.api",
    "Balanced": "ringspan.balance",
    "Cache": "ringspan.decoding",
    "Sampler": "ringspan.decoding",
    "attention_prefill": "ringspan.decoding",
    "attention_step": "ringspan.decoding",
    "Dilated": "ringspan.geometry",
    "Full": "ringspan.geometry",
    "Pattern": "ringspan.geometry",
    "PatternSum": "ringspan.geometry",
    "Window": "ringspan.geometry",
    "LayoutName": "ringspan.layout",
    "FoldedOrder": "ringspan.order",
    "GridOrder": "ringspan.order",
    "Hilbert": "ringspan.order",
    "Morton": "ringspan.order",
    "Order": "ringspan.order",
    "PointOrder": "ringspan.order",
    "RowMajor": "ringspan.order",
    "Snake": "ringspan.order",
    "ByNode": "ringspan.planning",
    "RankMemory": "ringspan.planning",
    "RankPlan": "ringspan.planning",
    "Reach": "ringspan.planning",
    "RingPlan": "ringspan.planning",
    "Routing": "ringspan.planning",
    "TensorSizes": "ringspan.planning",
    "TileCosts": "ringspan.planning",
    "Optimize": "ringspan.planning",
    "best_layout": "ringspan.planning.api",
    "plan": "ringspan.planning.api",
    "PlanChoice": "ringspan.planning.best",
    "PlanChoices": "ringspan.planning.best",
    "best_plan": "ringspan.planning.best",
    "DeviceRates": "ringspan.planning.timing",
    "LayoutAdvice": "ringspan.planning.breakeven",
    "RankTime": "ringspan.planning.timing",
    "attention_weights": "ringspan.readout",
    "Counters": "ringspan.ring",
    "Ring": "ringspan.ring",
    "RingError": "ringspan.ring",
    "SimulatedRing": "ringspan.ring",
    "Trace": "ringspan.ring",
    "stream_attention": "ringspan.streaming",
    "stream_backward": "ringspan.streaming",
    "draw": "ringspan.draw",
    "kernels": "ringspan.kernels",
    "models": "ringspan.models",
    "nn": "ringspan.nn",
    "oracle": "ringspan.oracle",
    "streaming": "ringspan.streaming",
}

if TYPE_CHECKING:  # the same names, for type checkers and editors; tests/test_imports.py compares the two
    from ringspan import draw as draw
    from ringspan import kernels as kernels
    from ringspan import models as models
    from ringspan import nn as nn
    from ringspan import oracle as oracle
    from ringspan import streaming as streaming
    from ringspan.api import attention as attention
    from ringspan.balance import Balanced as Balanced
    from ringspan.decoding import Cache as Cache
    from ringspan.decoding import Sampler as Sampler
    from ringspan.decoding import attention_prefill as attention_prefill
    from ringspan.decoding import attention_step as attention_step
    from ringspan.geometry import Dilated as Dilated
    from ringspan.geometry import Full as Full
    from ringspan.geometry import Pattern as Pattern
    from ringspan.geometry import PatternSum as PatternSum
    from ringspan.geometry import Window as Window
    from ringspan.layout import LayoutName as LayoutName
    from ringspan.order import FoldedOrder as FoldedOrder
    from ringspan.order import GridOrder as GridOrder
    from ringspan.order import Hilbert as Hilbert
    from ringspan.order import Morton as Morton
    from ringspan.order import Order as Order
    from ringspan.order import PointOrder as PointOrder
    from ringspan.order import RowMajor as RowMajor
    from ringspan.order import Snake as Snake
    from ringspan.planning import ByNode as ByNode
    from ringspan.planning import Optimize as Optimize
    from ringspan.planning import RankMemory as RankMemory
    from ringspan.planning import RankPlan as RankPlan
    from ringspan.planning import Reach as Reach
    from ringspan.planning import RingPlan as RingPlan
    from ringspan.planning import Routing as Routing
    from ringspan.planning import TensorSizes as TensorSizes
    from ringspan.planning import TileCosts as TileCosts
    from ringspan.planning.api import best_layout as best_layout
    from ringspan.planning.api import plan as plan
    from ringspan.planning.best import PlanChoice as PlanChoice
    from ringspan.planning.best import PlanChoices as PlanChoices
    from ringspan.planning.best import best_plan as best_plan
    from ringspan.planning.breakeven import LayoutAdvice as LayoutAdvice
    from ringspan.planning.timing import DeviceRates as DeviceRates
    from ringspan.planning.timing import RankTime as RankTime
    from ringspan.readout import attention_weights as attention_weights
    from ringspan.ring import Counters as Counters
    from ringspan.ring import Ring as Ring
    from ringspan.ring import RingError as RingError
    from ringspan.ring import SimulatedRing as SimulatedRing
    from ringspan.ring import Trace as Trace
    from ringspan.streaming import stream_attention as stream_attention
    from ringspan.streaming import stream_backward as stream_backward
else:
    __all__ = list(_MODULE_OF)


if (_torch := sys.modules.get("torch")) and _torch.distributed.is_available():
    # torch imports this module on the first call of a custom operator. If that happens after init_process_group, its
    # default arguments keep the process group alive, and a gloo group that is alive at exit can abort the process.
    import_module("torch.distributed.nn")


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ringspan' has no attribute {name!r}")
    module = import_module(_MODULE_OF[name])
    value = module if module.__name__ == f"ringspan.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF, "__version__"])
