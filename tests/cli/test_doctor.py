"""`ringspan doctor`: its report is correct, and wrong results fail the self-test."""

import json
from unittest import mock

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import ringspan as rs
from ringspan.cli.app import app
from ringspan.tools import doctor
from ringspan.tools.doctor import DTYPES, run_self_test, why_no_cuda


def run(*arguments: str, status: int = 0, **environment: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200", **environment})
    assert result.exit_code == status, result.output
    return result.stdout


def test_report_is_correct() -> None:
    found = json.loads(run("--json"))
    cpu = found["devices"][0]
    assert cpu["name"] == "cpu"
    assert torch.backends.cpu.get_cpu_capability() in cpu["description"]
    usable = {status.kernel.name: status.usable for status in rs.kernels.available()}
    assert {kernel["name"]: kernel["usable"] for kernel in found["kernels"]} == usable
    for choice in found["choices"]:
        chosen = rs.kernels.choose(choice["device"], getattr(torch, choice["dtype"]))
        assert (choice["kernel"], choice["reason"]) == (chosen.kernel.name, chosen.reason)
    backends = {backend["name"]: backend["available"] for backend in found["backends"]}
    assert backends.keys() == {"gloo", "nccl", "mpi", "xccl"}
    assert backends["gloo"] == torch.distributed.is_gloo_available()
    assert backends["nccl"] == torch.distributed.is_nccl_available()
    versions = {package["name"]: package["version"] for package in found["packages"]}
    assert versions["ringspan"] == rs.__version__
    assert versions["torch"] == torch.__version__
    assert found["is_healthy"]


def test_every_usable_device_and_dtype_is_tried() -> None:
    found = json.loads(run("--json"))
    devices = [device["name"] for device in found["devices"] if device["usable"]]
    tried = [(test["device"], test["dtype"]) for test in found["self_tests"]]
    assert tried == [(device, str(dtype).removeprefix("torch.")) for device in devices for dtype in DTYPES]
    for test in found["self_tests"]:
        assert test["passed"]
        assert 0 < test["error"] <= test["allowed"]
    assert found["self_tests"][0]["allowed"] == 1e-12


def test_terminal_output_ends_with_the_verdict() -> None:
    page = run()
    for part in ("Devices", "Kernels", "Process-group backends", "Packages", "Self-test", "torchrun"):
        assert part in page
    assert page.rstrip().splitlines()[-1].startswith("ringspan works here: all")


def test_missing_packages_come_with_the_install_command() -> None:
    names = {"no-such-package": ("nothing at all", "pip install no-such-package")}
    with mock.patch.object(doctor, "_OPTIONAL_PACKAGES", names):
        assert json.loads(run("--json"))["missing"] == {"no-such-package": "pip install no-such-package"}
        page = run()
    (line,) = (line for line in page.splitlines() if "no-such-package" in line)
    assert "pip install no-such-package" in line


def slightly_wrong(*tensors: Tensor, **options: object) -> object:
    out, lse = rs.attention(*tensors, **options)  # type: ignore[call-overload]
    return out * (1 + 8 * torch.finfo(out.dtype).eps) + 1e-11, lse


def test_slightly_wrong_results_fail() -> None:
    with mock.patch.object(doctor, "attention", slightly_wrong):
        test = run_self_test("cpu", torch.float64)
        assert not test.passed
        assert test.error > 1e-12
        found = json.loads(run("--json", status=1))
        assert not found["is_healthy"]
        assert "self-tests fail: cpu float64" in found["verdict"]
        assert "FAIL" in run(status=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_dtype_has_its_own_limit(dtype: torch.dtype) -> None:
    """Results rounded to a narrower dtype fail."""
    narrower = {torch.float32: torch.bfloat16, torch.float16: torch.float8_e4m3fn, torch.bfloat16: torch.float8_e5m2}

    def narrow(*tensors: Tensor, **options: object) -> object:
        out, lse = rs.attention(*tensors, **options)  # type: ignore[call-overload]
        return out + (out.detach().to(narrower[dtype]).to(dtype) - out.detach()), lse

    assert run_self_test("cpu", dtype).passed
    with mock.patch.object(doctor, "attention", narrow):
        test = run_self_test("cpu", dtype)
    assert not test.passed
    assert test.result == "out"


def test_nan_results_fail() -> None:
    def broken(*tensors: Tensor, **options: object) -> object:
        out, lse = rs.attention(*tensors, **options)  # type: ignore[call-overload]
        return out * torch.nan, lse

    with mock.patch.object(doctor, "attention", broken):
        assert run_self_test("cpu", torch.float32).failure == "ArithmeticError: out is not finite"


def test_a_missing_device_fails_with_its_error() -> None:
    test = run_self_test("cuda:7", torch.float32)
    assert not test.passed
    assert test.failure


def test_only_rank_0_prints() -> None:
    assert run("--json", RANK="1", TORCHELASTIC_RUN_ID="here", WORLD_SIZE="2") == ""
    found = json.loads(run("--json", RANK="0", TORCHELASTIC_RUN_ID="here", WORLD_SIZE="2"))
    assert found["launch"] == "under torchrun: rank 0 of 2"
    assert "torchrun --standalone" in json.loads(run("--json"))["launch"]


def test_why_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "built without CUDA" in why_no_cuda("2.13.0+cpu", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "built for CUDA 12.8" in why_no_cuda("2.13.0", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES='-1' hides all devices" in why_no_cuda("2.13.0", "12.8")
