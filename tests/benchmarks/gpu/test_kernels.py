"""The kernels' script as far as it runs on the CPU: what compute-sanitizer's tools say, the report, the exit status."""

import itertools
import json
import sys

import pytest
import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.kernels import sanitize
from redraft.plugins.cuda import check_on_gpu


@pytest.fixture
def program(tmp_path):
    """compute-sanitizer, of which racecheck complains."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        'print("ran", *sys.argv[1:3], "caching off:", os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"])\n'
        'sys.exit(9 * ("racecheck" in sys.argv))\n'
    )
    program.chmod(0o755)
    return program


def test_what_the_tools_say(program):
    said = sanitize(str(program))
    assert list(said) == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert said["memcheck"] == {"clean": True, "says": "ran --tool memcheck caching off: 1"}
    assert said["racecheck"] == {"clean": False, "says": "ran --tool racecheck caching off: 1"}
    assert "comes with CUDA's toolkit" in sanitize(None)["missing"]


def test_what_the_tools_run_checks_attention(monkeypatch):
    """The command that runs under compute-sanitizer."""
    arguments = [*kernels.CHECKS[2:], "--device", "cpu"]
    attend = check_on_gpu.attend
    monkeypatch.setattr(check_on_gpu, "attend", lambda *given: attend(*given) * 2)
    with pytest.raises(ArithmeticError, match="differs from the reference"):
        check_on_gpu.main(arguments)


@pytest.mark.parametrize(
    ("options", "there", "status"),
    [
        (["--tools", "memcheck"], True, 0),
        (["--tools", "memcheck", "racecheck"], True, 1),
        ([], False, 1),
        (["--no-sanitizer"], False, 0),
    ],
)
def test_complaints_and_a_missing_sanitizer_are_errors(options, there, status, program, tmp_path, monkeypatch):
    found = str(program) if there else None
    monkeypatch.setattr(kernels, "device_of", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(kernels, "describe", lambda _: {})
    monkeypatch.setattr(kernels, "check_attention", lambda *_: [])
    monkeypatch.setattr(kernels, "tool", lambda _: found)
    assert kernels.main(["--no-times", "--output", str(tmp_path / "r.json"), *options]) == status


def test_the_whole_script_on_the_cpu(tmp_path):
    """Every check of the kernels' own source, at the sizes of a CPU; neither times nor compute-sanitizer."""
    assert kernels.main(["--device", "cpu", "--output", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert set(report) == {"machine", "attention"}
    cases = [(case["shape"], case["batch"], case["precision"]) for case in report["attention"]]
    assert cases == list(itertools.product(check_on_gpu.SHAPES, check_on_gpu.CASES, ("bf16", "fp32")))
    assert all(0 < case["rms_error"] <= case["max_error"] < 0.03 for case in report["attention"])
