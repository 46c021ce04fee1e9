"""The command line: `ringspan`, or `python -m ringspan`. Nothing here imports torch before a command needs it."""

import sys


def main() -> None:
    """Run the command line; without its libraries, say how to get them."""
    try:
        from ringspan.cli.app import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ringspan"):
            raise
        sys.exit(f"The command line needs {error.name}: pip install 'ringspan[cli]'")
    app(prog_name="ringspan")
