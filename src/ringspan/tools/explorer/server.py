"""Serves the explorer to browsers on this machine, and to nobody else. Standard library only."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"


class _Files(SimpleHTTPRequestHandler):
    """Files of one folder. Requests that name another host are refused: a page elsewhere could send them."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".wasm": "application/wasm",
        ".mjs": "text/javascript",
        ".js": "text/javascript",
    }

    def send_head(self) -> Any:
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self.send_error(403, "this server answers requests for 127.0.0.1 and localhost only")
            return None
        return super().send_head()

    def list_directory(self, path: Any) -> Any:
        self.send_error(404)

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def make_server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the files of a folder; port 0 takes a free one. Raises OSError if the port is in use."""
    return ThreadingHTTPServer((HOST, port), partial(_Files, directory=str(folder)))


def address(server: ThreadingHTTPServer) -> str:
    """The address of the page."""
    return f"http://{HOST}:{server.server_address[1]}/"
