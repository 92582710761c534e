import pytest
import typer

from benchmarks.gpu import llama_7b


def test_an_unknown_drafter_is_named(tmp_path):
    with pytest.raises(typer.BadParameter, match="--drafters medusa: expected some of redrafter, "):
        llama_7b.main(device="cpu", output=tmp_path / "steps.json", drafters=["eagle3", "medusa"])
