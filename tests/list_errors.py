"""Print every error message and warning of the source, by file: `python -m tests.list_errors` or `make errors`.

The texts are read from the syntax tree: of ``raise`` statements, of errors that functions return, and of warnings.
``{...}`` stands for a value, and ``[... / ...]`` for one text or the other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ringspan"


@dataclass(frozen=True)
class Message:
    line: int
    kind: str
    text: str


def messages(path: Path) -> list[Message]:
    """The messages of one file, in order of their lines."""
    tree = ast.parse(path.read_text())
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    known = dict(_constants_and_helpers(tree))
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        kind = ast.unparse(node.func).rsplit(".", 1)[-1]
        if id(node) in raised or kind in ("warn", "BadParameter") or kind.endswith("Error"):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            texts = [text for value in given for text in _texts(value, known)]
            found += [Message(node.lineno, kind, text) for text in texts]
    return sorted(found, key=lambda message: message.line)


def all_messages() -> dict[Path, list[Message]]:
    return {path: found for path in sorted(SOURCE.rglob("*.py")) if (found := messages(path))}


def _constants_and_helpers(tree: ast.Module) -> Iterator[tuple[str, list[ast.expr]]]:
    """Texts under a name: constants, and what functions return."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _has_text(node.value):
            yield node.targets[0].id, [node.value]
        if isinstance(node, ast.FunctionDef):
            returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
            yield node.name, [value for value in returned if isinstance(value, ast.JoinedStr | ast.Constant)]


def _texts(node: ast.expr, known: dict[str, list[ast.expr]]) -> list[str]:
    if isinstance(node, ast.Name | ast.Call):
        name = node.id if isinstance(node, ast.Name) else ast.unparse(node.func)
        if name in known:
            return [_text(value) for value in known[name] if _has_text(value)]
    return [_text(node)] if _has_text(node) else []


def _has_text(node: ast.expr) -> bool:
    """Two words or more."""
    constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return any(isinstance(value, str) and " " in value.strip() for value in constants)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else _text(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"[{_text(node.body)} / {_text(node.orelse)}]"
    return f"{{{ast.unparse(node)}}}"


def main() -> None:
    files = all_messages()
    for path, found in files.items():
        sys.stdout.write(f"\n{path.relative_to(ROOT)}\n")
        for message in found:
            sys.stdout.write(f"  {message.line:4}  {message.kind}: {message.text}\n")
    sys.stdout.write(f"\n{sum(map(len, files.values()))} messages in {len(files)} files\n")


if __name__ == "__main__":
    main()
