"""Typical mistakes end a command with status 1 or 2 and one line that says what to do, before it does anything."""

from __future__ import annotations

import pytest

from redraft.cli import main

NO_MODEL, NO_BUNDLE = "no model at none: `redraft fetch none` fetches one", "none"
MISTAKES = [
    ("fetch none.gguf", "none.gguf"),
    ("fetch --revision", "requires an argument"),
    ("build --model none", NO_MODEL),
    ("build --model FOLDER --no-drafter", "config.json"),
    ("build --model FOLDER --backend cuda", "openvino"),
    ("build --model FOLDER --precision fp7", "fp32"),
    ("build --model FOLDER --slots 0", "--slots"),
    ("build --model FOLDER --methods none.toml", "--methods none.toml"),
    ("build --model FOLDER --no-drafter --backend tensorrt --precision fp8", "--calibration"),
    ("tune", "--bundle"),
    ("tune --bundle none", NO_BUNDLE),
    ("tune --bundle FOLDER --prompts none", "prompts none"),
    ("tune --bundle FOLDER --minutes -1", "--minutes"),
    ("inspect none", NO_BUNDLE),
    ("inspect FOLDER", "redraft build"),
    ("export eagle3 --model FOLDER --output out", "--drafter"),
    ("export trtllm --model FOLDER --drafter FOLDER --output out", "config.json"),
    ("export trtllm --model FOLDER --drafter FOLDER --output out --tp 0", "--tp"),
    ("export from-trtllm none --output out", "none"),
    ("distill --model none", NO_MODEL),
    ("distill --model FOLDER --prompts none", "none"),
    ("distill --model FOLDER --tokens many", "--tokens"),
    ("train --model none", NO_MODEL),
    ("train --model FOLDER --kind lyanna", "recurrent"),
    ("train --model FOLDER --data none", "none"),
    ("drafter --model none", NO_MODEL),
    ("drafter --model FOLDER --kind lyanna", "recurrent"),
    ("drafter --model FOLDER --hours 0", "--hours"),
    ("drafter --model FOLDER --prompts none", "none"),
    ("calibrate --model none", NO_MODEL),
    ("calibrate --model FOLDER --prompts none", "none"),
    ("serve --bundle none --run-dir FOLDER", "none"),
    ("serve --backend cuda", "--backend"),
    ("serve --http-port 0", "--http-port"),
    ("serve --http-port 70000", "--http-port"),
    ("serve --config none.toml", "none.toml"),
    ("serve --precison bf16", "--precision"),
    ("swap --bundle none --run-dir FOLDER", "redraft serve"),
    ("generate hi --run-dir FOLDER", "redraft serve"),
    ("generate hi --max-tokens 0", "--max-tokens"),
    ("chat none", NO_BUNDLE),
    ("chat FOLDER --schema none.json", "none.json"),
    ("loadtest --run-dir FOLDER", "redraft serve"),
    ("loadtest --bundle FOLDER --url 127.0.0.1:9 --protocol ftp", "grpc"),
    ("loadtest --bundle FOLDER --url 127.0.0.1:9", "tokenizer.json"),
    ("loadtest --bundle FOLDER --url 127.0.0.1:9 --num-prompts 0", "--num-prompts"),
    ("doctor none", NO_BUNDLE),
    ("quantize", "quantize"),
    ("-- stop", "expected a command as the first word"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_told_in_one_line(words, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(*words.replace("FOLDER", "folder").split())
    output = capsys.readouterr()
    lines = [line for line in (output.out + output.err).splitlines() if line.strip()]
    assert ended.value.code in (1, 2), lines
    assert said in lines[-1]
    assert lines[-1].startswith(("redraft", "error")), "the line says which command it is of"
    assert len(lines) <= 3, "at most two lines about what it reads come before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"], "nothing is written"
