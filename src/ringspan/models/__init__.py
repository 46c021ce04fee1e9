"""`LongNet`, a transformer for long sequences; `Decoder`, which generates text with it; and `LongNetConfig`.

The configuration imports without torch.
"""

from typing import TYPE_CHECKING, Any

from ringspan.models.config import LongNetConfig

if TYPE_CHECKING:
    from ringspan.models.decoder import Decoder
    from ringspan.models.longnet import LongNet

__all__ = ["Decoder", "LongNet", "LongNetConfig"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ringspan.models' has no attribute {name!r}")
    from ringspan.models.decoder import Decoder  # noqa: PLC0415
    from ringspan.models.longnet import LongNet  # noqa: PLC0415

    return {"Decoder": Decoder, "LongNet": LongNet}[name]
