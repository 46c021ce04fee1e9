"""Results of `plan`, `bench` and `verify`, and trace files: as settings of the explorer, and a table that it shows."""

from __future__ import annotations

import json
import re
from collections import defaultdict
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
        for key, read in _READERS.items():
            if key in document:
                settings, title, rows = read(document)
                return settings, {"title": f"{title}: {path.name}", "rows": rows}
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: is not a result that the explorer can read ({error!r}); {_WAY_OUT}") from error
    raise RunError(f"{path}: is not a result that the explorer can read; {_WAY_OUT}")


_WAY_OUT = "give the JSON of `ringspan plan --json`, bench.json, verify.json or a trace file"
# What `headline` of tools/plan_report.py and `str` of a plan say.
_PLANNED = (
    re.compile(
        r"(?P<tokens>[\d,]+) tokens over (?P<ranks>[\d,]+) ranks?, (?P<pattern>.+), (?P<causal>causal|not causal), "
        r"(?P<heads>\d+) heads(?: \((?P<kv_heads>\d+) KV\))? of (?P<head_dim>\d+), (?P<dtype>\w+)"
    ),
    re.compile(
        r"(?P<pattern>[^;]+); n = (?P<tokens>[\d,]+) over (?P<ranks>\d+) ranks, (?P<layout>\w+)(?: \([^)]*\))?, "
        r"(?P<routing>[^,;]+)(?:, (?P<head_ranks>\d+) head ranks)?(?P<causal>, causal)?;"
    ),
)


def _from_plan(document: Mapping[str, Any]) -> tuple[dict[str, Any], str, Rows]:
    layout = document["advice"]["layout"] if document["advice"] else next(iter(document["layouts"]))
    sizes = document["sizes"]
    settings = _settings(document, layout, document["pattern"], sizes) | _routing(document["routing"])
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
        rows.append([one["implementation"], str(one["ranks"]), f"{one['tokens']:,}", one["layout"], *seconds, peak])
    return _settings(case, case["layout"], case["pattern"], case), "Measured by bench", rows


def _from_verify(document: Mapping[str, Any]) -> tuple[dict[str, Any], str, Rows]:
    """The case in which bytes and FLOPs were counted, on the largest ring."""
    case = document["settings"]["counted"]
    ranks = max(map(int, document["measurements"]), default=1)
    settings = _settings(case | {"ranks": ranks, "causal": True}, "zigzag", _pattern(case["pattern"]).text, case)
    rows = [["check", "verdict", "result"]]
    rows += [[check["name"], check["verdict"], check["result"]] for check in document["checks"]]
    return settings, f"Verified ({document['verdict']})", rows


def _from_trace(document: Mapping[str, Any]) -> tuple[dict[str, Any], str, Rows]:
    """What each rank sent and received, and the settings of the plan that the trace names, if it names one."""
    sent: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0])
    names, ends = {}, defaultdict[int, float](float)
    for event in document["traceEvents"]:
        rank = event["pid"]
        if event["name"] == "process_name":
            names[rank] = event["args"]["name"]
        if event["ph"] == "X":
            ends[rank] = max(ends[rank], event["ts"] + event["dur"])
            if "bytes" in event.get("args", {}):
                total = sent[rank, event["cat"]]
                total[0], total[1] = total[0] + 1, total[1] + event["args"]["bytes"]
    rows = [["rank", "messages sent", "bytes sent", "messages received", "bytes received", "end, ms"]]
    for rank, name in sorted(names.items()):
        cells = [*sent[rank, "sends"], *sent[rank, "receives"]]
        rows.append([name, *(f"{cell:,}" for cell in cells), f"{ends[rank] / 1000:,.3f}"])
    return _settings_of_text(str(document.get("otherData", {}).get("plan", ""))), "Traced", rows


def _settings_of_text(text: str) -> dict[str, Any]:
    """The settings that the description of a plan states; empty if it is none."""
    found = next(filter(None, (pattern.match(text) for pattern in _PLANNED)), None)
    if found is None:
        return {}
    stated = {name: value for name, value in found.groupdict().items() if value is not None and name != "causal"}
    if "heads" in stated:
        stated.setdefault("kv_heads", stated["heads"])
    counts = {name: stated[name].replace(",", "") for name in ("tokens", "ranks")}
    return (
        stated
        | counts
        | _routing(stated.get("routing", "relay"))
        | {"causal": (found["causal"] or "not").strip(", ") == "causal"}
    )


def _routing(text: str) -> dict[str, str]:
    """The settings of a routing, as `str` writes it.

    >>> _routing("relay by nodes of 4")
    {'routing': 'by-node', 'ranks_per_node': '4'}
    """
    _, by_node, size = text.partition(" by nodes of ")
    return {"routing": "by-node", "ranks_per_node": size} if by_node else {"routing": text}


def _settings(case: Mapping[str, Any], layout: str, pattern: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    values = {
        "tokens": case["tokens"],
        "ranks": case["ranks"],
        "layout": layout.split(" ", maxsplit=1)[0],
        "pattern": pattern,
    }
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


_READERS = {"layouts": _from_plan, "summaries": _from_bench, "checks": _from_verify, "traceEvents": _from_trace}
