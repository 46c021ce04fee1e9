"""Imports go one way, and the core needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src/ringspan"

# Each part, and the parts it may import from.
ALLOWED: dict[str, set[str]] = {
    "described": set(),
    "extras": set(),
    "geometry": set(),
    "layout": {"geometry"},
    "planning": {"geometry", "layout"},
    "kernels": set(),
    "softmax": set(),
    "views": {"geometry"},
    "ring": {"layout", "planning"},
    "travel": {"planning", "ring", "views"},
    "engine": {"planning", "kernels", "softmax", "views", "ring", "travel"},
    "order": {"geometry", "layout"},
    "operands": {"geometry", "kernels"},
    "call": {"geometry", "layout", "operands", "order", "planning", "ring"},
    "op": {"call", "engine", "geometry", "kernels", "order", "ring", "softmax"},
    "api": {"geometry", "op", "operands", "order", "ring"},
    "decoding": {
        *("api", "engine", "geometry", "kernels", "layout", "operands"),
        *("planning", "ring", "softmax", "travel", "views"),
    },
    "prices": {"geometry", "layout", "planning", "kernels"},
    "streaming": {"engine", "geometry", "kernels", "planning", "prices", "ring", "ringspan", "travel", "views"},
    "nn": {"geometry", "api", "order", "ring"},
    "oracle": {"geometry", "order"},
    "draw": {"geometry", "layout", "oracle", "order", "planning"},
    "measure": set(),
    "processes": set(),
    "public": {"geometry", "api", "decoding", "kernels", "nn", "order", "prices", "ring", "streaming"},
    "evidence": {
        *("api", "extras", "geometry", "kernels", "layout", "measure", "oracle", "planning", "processes"),
        *("ring", "ringspan", "travel"),
    },
    "proof": {"evidence", "geometry", "kernels", "layout", "planning", "streaming"},
    "rehearse": {"engine", "evidence", "kernels", "planning", "processes", "ring", "ringspan"},
    "verify": {"api", "evidence", "geometry", "layout", "oracle", "prices", "processes", "ring"},
    "bench": {
        "draw",
        "evidence",
        "extras",
        "geometry",
        "layout",
        "measure",
        "order",
        "planning",
        "processes",
        "ringspan",
    },
    "integrations": {"extras", "nn", "ringspan"},
    "models": {"described", "geometry", "nn", "ringspan"},
    "train": {"described", "evidence", "geometry", "layout", "models", "planning", "prices", "ringspan"},
    "cli": {
        *("bench", "decoding", "draw", "evidence", "extras", "geometry", "layout", "models", "planning"),
        *("proof", "rehearse", "ringspan", "streaming", "train", "verify"),
    },
    "__main__": {"cli"},
}


def imported_parts(path: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            parts |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "ringspan":
            parts |= {f"ringspan.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts.add(node.module or "")
    ours = {name for name in parts if name.split(".")[0] == "ringspan"}
    return {[*name.split("."), "ringspan"][1] for name in ours}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    if part != "__init__":
        assert imported_parts(path) <= ALLOWED[part] | {part}


@pytest.mark.parametrize("part", ["geometry", "planning", "layout.py"])
def test_pure_integers_know_no_tensor(part: str) -> None:
    found = [SOURCE / part] if part.endswith(".py") else list((SOURCE / part).rglob("*.py"))
    assert found
    for path in found:
        assert "torch" not in path.read_text().replace("torchscale", "")


def test_the_core_imports_with_torch_alone() -> None:
    extras = ["matplotlib", "rich", "psutil", "numpy", "typer", "hypothesis", "safetensors"]
    script = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in extras)
    script += "import ringspan, torch; ringspan.attention(*torch.ones(3, 1, 4, 1, 8), pattern=ringspan.Full())"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
