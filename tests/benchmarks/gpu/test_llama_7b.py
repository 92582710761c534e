import pytest
import typer

from benchmarks.gpu import llama_7b
from redraft.bundle.backends import Precision


def test_an_unknown_drafter_is_named(tmp_path):
    with pytest.raises(typer.BadParameter, match="--systems medusa: expected some of redrafter, "):
        llama_7b.main(device="cpu", output=tmp_path / "steps.json", systems=["eagle3", "medusa"])


def test_a_precision_that_computes_otherwise_is_named(tmp_path):
    with pytest.raises(typer.BadParameter, match="--precision fp32: expected bf16 or fp8"):
        llama_7b.main(device="cpu", output=tmp_path / "steps.json", precision=Precision.fp32)
