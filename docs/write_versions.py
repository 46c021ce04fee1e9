"""Write docs/versions.md: the versions that the tests ran with. `make versions` runs all tests first."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = (
    *("torch", "transformers", "accelerate", "trl", "deepspeed"),
    *("safetensors", "prometheus-client", "tensorboard", "sphinx"),
)


def main() -> None:
    versions = {"Python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
    written = f"Written by `make versions` on {datetime.date.today()}, after all tests passed; do not edit."
    page = ["# Tested versions", "", written, "", "| package | version |", "| --- | --- |"]
    page += [f"| {name} | {version} |" for name, version in versions.items()]
    (Path(__file__).parent / "versions.md").write_text("\n".join(page) + "\n")
    print("\n".join(page))


if __name__ == "__main__":
    main()
