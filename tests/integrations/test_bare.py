"""In an environment with torch alone, the core works, and what needs more says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import importlib.util, torch, ringspan as rs
for extra in ("matplotlib", "rich", "typer", "psutil", "safetensors", "transformers", "numpy"):
    assert importlib.util.find_spec(extra) is None, extra
q, k, v = torch.randn(3, 1, 101, 4, 16, requires_grad=True).unbind()
pattern = rs.Dilated((16, 64), (1, 4))
for ring in (None, rs.SimulatedRing(3)):
    rs.attention(q, k, v, pattern=pattern, causal=True, ring=ring).sum().backward()
print(rs.plan(pattern, 101, ring_size=3, causal=True))
rs.models.LongNet(rs.models.LongNetConfig.named("nano")).loss(*torch.zeros(2, 1, 50, dtype=torch.int64)).backward()
try:
    from ringspan.integrations.transformers import register
    register(pattern=pattern)
except ImportError as error:
    assert "pip install -c constraints.txt -e '.[transformers]'" in str(error)
else:
    raise AssertionError("Transformers is here")
"""


def test_the_core_works_with_torch_alone(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv/bin/python")
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([python, *install, str(ROOT)], check=True)
    done = subprocess.run([python, "-c", SCRIPT], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
