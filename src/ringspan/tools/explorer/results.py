"""Results of `ringspan plan`, `bench` and `verify` as settings of the explorer, and as a table that it shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringspan.geometry import Dilated, Full, Pattern, PatternSum, Window
from ringspan.runtime.settings import RunError

Rows = list[list[str]]


def read_result(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a result's case, and ``{"title": .., "rows": ..}``: a table with a head. Raises RunError."""
    try:
        document = json.loads(path.read_text())
        for key, read in (("layouts", _from_plan), ("summaries", _from_bench), ("checks", _from_verify)):
            if key in document:
                settings, title, rows = read(document)
                return settings, {"title": f"{title}: {path.name}", "rows": rows}
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise RunError(f"{path}: is not a result that the explorer can read ({error!r}); {_WAY_OUT}") from error
    raise RunError(f"{path}: is not a result that the explorer can read; {_WAY_OUT}")


_WAY_OUT = "give the JSON of `ringspan plan --json`, bench.json or verify.json"


def _from_plan(document: Mapping[str, Any]) -> tuple[dict[str, Any], str, Rows]:
    layout = document["advice"]["layout"] if document["advice"] else next(iter(document["layouts"]))
    sizes = document["sizes"]
    settings = _settings(document, layout, document["pattern"], sizes) | {"routing": document["routing"]}
    rows = [["layout", "rank", "pairs", "bytes sent forward", "bytes sent backward", "memory forward"]]
    for name, costs in document["layouts"].items():
        for rank in costs["ranks"]:
            memory = sum(rank["memory_forward"].values())
            cells = (rank["rank"], rank["work"], rank["sent_forward"], rank["sent_backward"], memory)
            rows.append([name.split(" ")[0], *(f"{cell:,}" for cell in cells)])
    return settings, "Planned", rows


def _from_bench(document: Mapping[str, Any]) -> tuple[dict[str, Any], str, Rows]:
    """The longest case of the largest ring; the table has all cases."""
    cases = [summary["case"] for summary in document["summaries"]]
    case = max(cases, key=lambda one: (one["ranks"], one["tokens"]))
    rows = [["implementation", "ranks", "tokens", "layout", "forward, s", "backward, s", "peak of a rank, MiB"]]
    for summary in document["summaries"]:
        one = summary["case"]
        seconds = [f"{summary[way]['median']:.4g}" if summary.get(way) else "" for way in ("forward", "backward")]
        peak = f"{summary['rank_bytes']['median'] / 2**20:,.1f}" if summary.get("rank_bytes") else ""
        rows.append(
            [one["implementation"], str(one["ranks"]), f"{one['tokens']:,}", one["layout"], *seconds, peak]
        )
    return _settings(case, case["layout"], case["pattern"], case), "Measured by bench", rows


def _from_verify(document: Mapping[str, Any]) -> tuple[dict[str, Any], str, Rows]:
    """The case in which bytes and FLOPs were counted, on the largest ring."""
    case = document["settings"]["counted"]
    ranks = max(map(int, document["measurements"]), default=1)
    settings = _settings(case | {"ranks": ranks, "causal": True}, "zigzag", _pattern(case["pattern"]).text, case)
    rows = [["check", "verdict", "result"]]
    rows += [[check["name"], check["verdict"], check["result"]] for check in document["checks"]]
    return settings, f"Verified ({document['verdict']})", rows


def _settings(case: Mapping[str, Any], layout: str, pattern: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    values = {"tokens": case["tokens"], "ranks": case["ranks"], "layout": layout.split(" ")[0], "pattern": pattern}
    values |= {"heads": sizes["heads"], "kv_heads": sizes.get("kv_heads", sizes["heads"])}
    values |= {"head_dim": sizes["head_dim"], "dtype": case["dtype"]}
    return {name: str(value) for name, value in values.items()} | {"causal": case["causal"]}


def _pattern(fields: Mapping[str, Any]) -> Pattern:
    """The pattern with these fields: a dataclass as JSON, without its class."""
    if "terms" in fields:
        return PatternSum(tuple(map(_pattern, fields["terms"])))
    if "left" in fields:
        return Window(**fields)
    return Dilated(**fields) if fields else Full()
