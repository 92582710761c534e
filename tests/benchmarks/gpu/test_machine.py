"""Which device a script takes, and what it says without one."""

import argparse

import pytest
import torch

from benchmarks.gpu import machine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no CUDA device that torch can use: run on a GPU machine with torch's CUDA build, or --device cpu"),
        (["--device", "cpu"], "--device cpu needs --output"),
    ],
)
def test_what_is_missing_is_said(given, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parser = argparse.ArgumentParser()
    machine.add_device(parser, __file__)
    with pytest.raises(SystemExit):
        machine.device_of(parser, parser.parse_args(given))
    assert message in capsys.readouterr().err
