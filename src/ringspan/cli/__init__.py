"""The command line: `ringspan`, or `python -m ringspan`. torch is imported by the command that needs it."""

import os
import signal
import sys
from types import FrameType

from ringspan.runtime.extras import missing_package


def main() -> None:
    """Run the command line; without its libraries, say how to get them."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in a shell's background job
        signal.signal(signal.SIGINT, _on_interrupt)
    try:
        from ringspan.cli.app import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ringspan"):
            raise
        sys.exit(missing_package("The command line", error.name, "cli"))
    app(prog_name="ringspan")


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, as Python does; but end the process if it is importing modules.

    Importing torch takes seconds, and a KeyboardInterrupt can get lost in there.
    """
    at = frame
    while at is not None:
        if at.f_code.co_filename == "<frozen importlib._bootstrap>":
            if os.environ.get("RANK", "0") == "0":
                os.write(2, b"Interrupted.\n")
            os._exit(130)
        at = at.f_back
    signal.default_int_handler(number, frame)
