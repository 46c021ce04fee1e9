"""The command line: `ringspan`, or `python -m ringspan`. torch is imported by the command that needs it."""

import os
import signal
import sys
from types import FrameType

from ringspan.runtime.settings import missing_package


def main() -> None:
    """Run the command line; if its packages are missing, print how to install them."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell ignores it in background jobs
        signal.signal(signal.SIGINT, _on_interrupt)
    try:
        from ringspan.cli.app import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ringspan"):
            raise
        sys.exit(missing_package("The command line", error.name, "cli"))
    app(prog_name="ringspan")


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, as Python does, but exit at once during an import.

    Importing torch takes seconds, and its native code can swallow a KeyboardInterrupt.
    """
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename == "<frozen importlib._bootstrap>":
            if os.environ.get("RANK", "0") == "0":
                os.write(2, b"Interrupted.\n")
            os._exit(130)
        caller = caller.f_back
    signal.default_int_handler(number, frame)
