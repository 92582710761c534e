"""The kernels' script as far as it runs on the CPU: packing, and what compute-sanitizer's tools say."""

import json
import sys

import pytest
import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.kernels import check_packing, sanitize

CPU = torch.device("cpu")


def test_packing_is_compared(monkeypatch):
    for sizes in ((1, 1, 1), (3, 6, 5)):
        check_packing(*sizes, CPU)
    run = kernels.run

    def wrong(*arguments):
        outputs = run(*arguments)
        outputs[1][2, 1] += 1
        return outputs

    monkeypatch.setattr(kernels, "run", wrong)
    with pytest.raises(ArithmeticError, match="packing 3 x 6 x 5: sequence 2 has another tree"):
        check_packing(3, 6, 5, CPU)


def test_what_the_tools_say(tmp_path):
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f'#!{sys.executable}\nimport sys\nprint("ran", *sys.argv[1:3])\nsys.exit(9 * ("racecheck" in sys.argv))\n'
    )
    program.chmod(0o755)
    said = sanitize(str(program))
    assert said["memcheck"] == {"clean": True, "says": "ran --tool memcheck"}
    assert said["racecheck"] == {"clean": False, "says": "ran --tool racecheck"}
    assert "comes with CUDA's toolkit" in sanitize(None)["missing"]


def test_a_report_of_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "check_all", lambda device, small: [{"device": device, "small": small}])
    assert kernels.main(["--device", "cpu", "--output", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["attention"] == [{"device": "cpu", "small": True}]
    assert "timings" not in report
