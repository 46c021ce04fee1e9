"""How to install optional dependencies. ringspan is not on a package index: extras are installed from a clone."""

from __future__ import annotations


def install_command(extra: str) -> str:
    """The command that installs an extra of pyproject.toml; run it in a clone of ringspan.

    >>> install_command("cli")
    "pip install -c constraints.txt -e '.[cli]'"
    """
    return f"pip install -c constraints.txt -e '.[{extra}]'"


def missing_package(what: str, package: str | None, extra: str) -> str:
    """The error message for a feature whose package is not installed.

    >>> missing_package("--draw", "matplotlib", "plot")
    "--draw needs matplotlib: in your clone of ringspan, run pip install -c constraints.txt -e '.[plot]'"
    """
    return f"{what} needs {package}: in your clone of ringspan, run {install_command(extra)}"
