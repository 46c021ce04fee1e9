"""Imports go one way, the core needs torch alone, and every public name is in one table."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ringspan as rs

SOURCE = Path(__file__).parent.parent / "src/ringspan"

# Each part, and the parts it may import from.
ALLOWED: dict[str, set[str]] = {
    "runtime": set(),
    "geometry": set(),
    "balance": {"geometry"},
    "layout": {"balance", "geometry"},
    "planning": {
        "geometry",
        "layout",
    },  # and api.py and best.py order, validation: rules, types
    "kernels": {"geometry", "softmax"},
    "softmax": set(),
    "views": {"geometry"},
    "ring": {"geometry", "layout", "planning", "runtime"},
    "schedule": {"geometry", "planning", "ring", "views"},
    "engine": {"geometry", "planning", "kernels", "softmax", "views", "ring", "schedule"},
    "order": {"geometry", "layout"},
    "validation": {"geometry", "kernels"},
    "execute": {
        *("engine", "geometry", "kernels", "layout", "order", "planning", "ring", "schedule", "softmax", "validation"),
    },
    "_op": {"execute", "geometry", "kernels", "order", "planning", "ring", "softmax", "validation"},
    "api": {"_op", "geometry", "order", "planning", "ring", "validation"},
    "readout": {"api", "execute", "geometry", "kernels", "layout", "order", "ring", "validation"},
    "decoding": {
        *(
            "api",
            "engine",
            "execute",
            "geometry",
            "kernels",
            "layout",
            "planning",
            "ring",
            "schedule",
            "softmax",
            "validation",
        ),
        "views",
    },
    "streaming": {"engine", "geometry", "kernels", "layout", "planning", "ring", "ringspan", "runtime", "schedule"}
    | {"softmax", "validation", "views"},
    "nn": {"geometry", "api", "order", "ring", "validation"},
    "oracle": {"geometry", "order"},
    "draw": {"geometry", "layout", "oracle", "order", "planning"},
    "integrations": {"layout", "models", "nn", "ringspan", "runtime", "validation"},
    "models": {"geometry", "nn", "ringspan", "runtime", "validation"},
    "train": {"balance", "geometry", "layout", "models", "nn", "planning", "ringspan", "runtime", "schedule"},
    "__main__": {"cli"},
}
TAKE_DTYPES = {SOURCE / "planning/api.py", SOURCE / "planning/best.py"}  # `rs.plan` and `rs.best_plan`
LIBRARY = {*ALLOWED, "ringspan"} - {"__main__"}
ALLOWED["tools"] = LIBRARY  # what only the command line needs
ALLOWED["cli"] = LIBRARY | {"tools"}
ALLOWED["testing"] = {"runtime", "tools"}  # the tools as users import them in their own tests


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
        also = {"balance", "kernels", "order", "validation"} if path in TAKE_DTYPES else set()
        assert imported_parts(path) <= ALLOWED[part] | {part} | also


@pytest.mark.parametrize("part", ["geometry", "planning", "layout.py"])
def test_pure_integers_know_no_tensor(part: str) -> None:
    found = [SOURCE / part] if part.endswith(".py") else list((SOURCE / part).rglob("*.py"))
    assert found
    for path in set(found) - TAKE_DTYPES:
        assert "torch" not in path.read_text().replace("torchscale", "")


def test_the_core_imports_with_torch_alone() -> None:
    extras = ["matplotlib", "rich", "psutil", "numpy", "typer", "hypothesis", "safetensors"]
    script = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in extras)
    script += "import ringspan, torch; ringspan.attention(*torch.ones(3, 1, 4, 1, 8), pattern=ringspan.Full())"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_type_checkers_see_the_same_names_as_the_export_table() -> None:
    (block,) = (
        node
        for node in ast.parse((SOURCE / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    typed = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.name == alias.asname
            typed[alias.name] = f"ringspan.{alias.name}" if node.module == "ringspan" else node.module
    assert typed == rs._MODULE_OF
    assert sorted(typed) == sorted(rs.__all__)
    assert sorted([*typed, "__version__"]) == dir(rs)


@pytest.mark.parametrize("name", dir(rs))
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(rs, name) is not None


def test_patterns_and_plans_need_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import ringspan as rs; rs.ByNode(2)\n"
    script += "pattern = rs.Window(3) + rs.Dilated((8,), (2,))\n"
    script += (
        "print(rs.plan(pattern, 64, ring_size=4, lengths=(60, 4), dtype='bfloat16'), rs.best_layout(pattern, 64, 4))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_classes_have_unique_names() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
