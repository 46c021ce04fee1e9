"""`ringspan explore`: it serves the page to this machine, starts with given settings, and refuses impossible ones."""

import http.client
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from typer.testing import CliRunner

import ringspan as rs
from ringspan.cli.app import app
from ringspan.runtime.settings import RunError
from ringspan.tools.explorer import site
from ringspan.tools.explorer.results import read_result
from ringspan.tools.explorer.settings import ExplorerSettings
from ringspan.tools.plan_report import headline


@pytest.fixture
def pyodide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of Pyodide: these tests start no browser, and need no network."""
    home = tmp_path / "home"
    folder = home / ".cache/ringspan" / f"pyodide-{site.PYODIDE_VERSION}"
    folder.mkdir(parents=True)
    for name in site.PYODIDE_FILES:
        (folder / name).write_text(name)
    monkeypatch.setenv("HOME", str(home))
    return folder


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["explore", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


def test_it_writes_a_static_site(pyodide: Path, tmp_path: Path) -> None:
    run("--out", str(tmp_path / "site"))
    names = {path.name for path in (tmp_path / "site").iterdir()}
    assert {"index.html", "main.js", "worker.js", "ringspan.zip", "pyodide"} <= names
    assert {path.name for path in (tmp_path / "site/pyodide").iterdir()} == set(site.PYODIDE_FILES)
    assert "../index.html" not in (tmp_path / "site/index.html").read_text()


def test_it_serves_this_machine_only(pyodide: Path) -> None:
    options = ["--no-browser", "--pattern", "window 7 + full", "--tokens", "100", "--no-causal"]
    command = [sys.executable, "-u", "-m", "ringspan", "explore", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = urlsplit(server.stdout.readline().strip())
            assert address.hostname == "127.0.0.1"
            settings = dict(parse_qsl(address.fragment))
            assert settings == dict(pattern="window 7 + full", tokens="100", causal="false")
            for host, path, status, kind in (
                (address.netloc, "/", 200, "text/html"),
                (address.netloc, "/worker.js", 200, "text/javascript"),
                (address.netloc, "/pyodide/pyodide.asm.wasm", 200, "application/wasm"),
                (address.netloc, "/../../etc/passwd", 404, "text/html"),
                (address.netloc, "/pyodide/", 404, "text/html"),
                ("evil.example:80", "/", 403, "text/html"),
            ):
                connection = http.client.HTTPConnection("127.0.0.1", address.port)
                connection.request("GET", path, headers={"Host": host})
                reply = connection.getresponse()
                assert (reply.status, (reply.getheader("Content-Type") or "").split(";")[0]) == (status, kind), path
                connection.close()
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130


@pytest.mark.parametrize(
    ("options", "stem"),
    [
        (["--pattern", "8x0"], "dilation_rates[0]=0: a rate must be at least 1"),
        (["--heads", "5", "--kv-heads", "2"], "heads=5, kv_heads=2"),
        (["--layout", "spiral"], "layout='spiral'"),
        (["--tokens", "many"], "tokens: 'many'"),
        (["--head-ranks", "3"], "head_ranks=3, but the ring has 4 ranks"),
        (["--optimize", "always"], "optimize='always'"),
        (["--routing", "by-node", "--ranks-per-node", "0"], "ranks_per_node: '0'"),
    ],
)
def test_impossible_settings_are_refused(options: list[str], stem: str) -> None:
    assert stem in run(*options, status=2)


def test_without_npm_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match=r"install Node\.js"):
        site.pyodide_folder()


def test_a_plan_is_read_back(tmp_path: Path, pyodide: Path) -> None:
    options = ["--pattern", "window 9 + 16x1,64x4", "--tokens", "200", "--ranks", "3", "--no-measure", "--json"]
    printed = CliRunner().invoke(app, ["plan", *options, "--layout", "zigzag", "--kv-heads", "4"])
    path = tmp_path / "plan.json"
    path.write_text(printed.output)
    settings, table = read_result(path)
    ring = ExplorerSettings.of(settings).ring
    expected = rs.plan(
        rs.Window(9) + rs.Dilated((16, 64), (1, 4)), 200, ring_size=3, layout="zigzag", causal=True, kv_heads=4
    )
    assert ring == expected
    assert [row[:4] for row in table["rows"][1:]] == [
        ["zigzag", str(rank), f"{ring.work(rank):,}", f"{ring.bytes_sent(rank):,}"] for rank in range(3)
    ]
    options += ["--routing", "by-node", "--ranks-per-node", "3", "--layout", "contiguous"]
    path.write_text(CliRunner().invoke(app, ["plan", *options]).output)
    assert ExplorerSettings.of(read_result(path)[0]).ring.routing == rs.ByNode(3)
    path.write_text(printed.output)
    assert "?result#" in run(str(path), "--out", str(tmp_path / "site"))
    assert json.loads((tmp_path / "site/result.json").read_text()) == table


def test_a_benchmark_is_read() -> None:
    path = Path(__file__).parents[2] / "benchmarks/results/long/bench.json"
    cases = [summary["case"] for summary in json.loads(path.read_text())["summaries"]]
    settings, table = read_result(path)
    assert settings["ranks"] == str(max(case["ranks"] for case in cases))
    assert ExplorerSettings.of(settings).ring.layout.rows == int(settings["tokens"])
    assert len(table["rows"]) == 1 + len(cases)


def test_a_trace_is_read(tmp_path: Path) -> None:
    """In Chrome's format: a process per rank, and sends and receives with their bytes."""
    ring = rs.plan(rs.Window(9), 4096, ring_size=2, layout="contiguous", causal=True, heads=4, kv_heads=2)
    events: list[dict[str, Any]] = [dict(name="process_name", ph="M", pid=1, ts=0, args=dict(name="rank 1"))]
    events += [dict(name="hop 1", ph="X", pid=1, ts=5.0, dur=2000, cat="receives", args=dict(peer=0, bytes=64))] * 3
    path = tmp_path / "trace.json"
    for text in (headline(ring, "float32"), str(ring)):
        path.write_text(json.dumps(dict(otherData=dict(plan=text), traceEvents=events)))
        settings, table = read_result(path)
        assert table["rows"][1:] == [["rank 1", "0", "0", "3", "192", "2.005"]]
        read = ExplorerSettings.of(dict(layout="contiguous") | settings).ring
        assert (read.pattern, read.layout, read.causal) == (ring.pattern, ring.layout, True)
    for options in (dict(head_ranks=2), dict(routing=rs.ByNode(2)), dict(routing="direct", causal=True)):
        other = rs.plan(rs.Window(9), 4096, ring_size=4, layout="zigzag", heads=4, kv_heads=2, **options)  # type: ignore[arg-type]
        path.write_text(json.dumps(dict(otherData=dict(plan=str(other)), traceEvents=events)))
        read = ExplorerSettings.of(read_result(path)[0]).ring
        assert (read.layout, read.routing, read.causal) == (other.layout, other.routing, other.causal)
    path.write_text(json.dumps(dict(traceEvents=events)))
    assert read_result(path)[0] == {}


@pytest.mark.parametrize(
    "content",
    [
        *("{}", "[1]", "3", "no JSON", '{"checks": []}', '{"layouts": 3, "advice": null}', "[" * 100_000),
        *('{"summaries": []}', '{"traceEvents": [{"pid": [], "name": "x", "ph": "X", "ts": 0, "dur": 0}]}'),
        '{"traceEvents": [{"pid": 1, "name": "process_name", "ph": "X", "ts": "<b>", "dur": {}, "args": {"name": 1}}]}',
    ],
    ids=lambda content: content[:40],
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(RunError, match="not a result that the explorer can read"):
        read_result(path)


def test_verified_patterns_are_read_back(tmp_path: Path) -> None:
    """From fields as `dataclasses.asdict` writes them; `ringspan verify` runs for a minute."""
    import dataclasses

    for pattern in (rs.Full(), rs.Window(3, 2), rs.Window(3) + rs.Dilated((8, 16), (1, 2), shift=3)):
        case: dict[str, Any] = dict(tokens=64, batch=1, heads=4, kv_heads=2, head_dim=8, dtype="float32", lengths=())
        case["pattern"] = dataclasses.asdict(pattern)
        document = dict(settings=dict(counted=case), measurements={"1": {}, "4": {}}, verdict="PASS")
        document["checks"] = [dict(name="exact", verdict="pass", result="1e-15")]
        path = tmp_path / "verify.json"
        path.write_text(json.dumps(document))
        settings, table = read_result(path)
        assert ExplorerSettings.of(settings).ring.pattern == pattern
        assert settings["ranks"] == "4"
        assert table["rows"][1:] == [["exact", "pass", "1e-15"]]
