"""Typical mistakes end a command with status 1 or 2 and one line that says what to do, before it does anything."""

from __future__ import annotations

import re

import pytest

from redraft.cli import main

NO_MODEL, NO_BUNDLE = "no model at none: `redraft fetch none` fetches one", "none"
MISTAKES = [
    ("fetch none.gguf", "none.gguf"),
    ("fetch --revision", "requires an argument"),
    ("fetch FOLDER --name ../up", "--name ../up: expected a name, not a path; --output says"),
    ("fetch FOLDER --name ..", "--name ..: expected a name, not a path; --output says"),
    ("fetch FOLDER --name .", "--name .: expected a name"),
    ("fetch FOLDER --output FILE", "cannot use file: File exists"),
    ("fetch FOLDER --chat-template none", "--chat-template none: No such file"),
    ("fetch FOLDER --chat-template BYTES", "--chat-template bytes: not a text file in UTF-8"),
    ("build --model none", NO_MODEL),
    ("build --model FOLDER --no-drafter", "config.json"),
    ("build --model FOLDER --backend cuda", "openvino"),
    ("build --model FOLDER --precision fp7", "fp32"),
    ("build --model FOLDER --slots 0", "--slots"),
    ("build --model FOLDER --methods none.toml", "--methods none.toml: No such file"),
    ("build --model FOLDER --methods FOLDER", "--methods folder: Is a directory"),
    ("build --model FOLDER --no-drafter --output LINK", "link is a link that leads nowhere: choose another --output"),
    ("build --model FOLDER --no-drafter --output FILE/b", "file is a file; expected a folder; choose another --output"),
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
    ("drafter --model FOLDER --output FILE", "--output file: "),
    ("drafter --model FOLDER --data FILE/data", "--data file/data: "),
    ("distill --model FOLDER --output FILE", "is a file; expected a folder"),
    ("train --model FOLDER --kind medusa --data FOLDER --output LINK", "link is a link that leads nowhere"),
    ("distill --model FOLDER --held-out FILE", "--held-out file: "),
    ("train --model FOLDER --output FILE", "--output file: "),
    ("calibrate --model none", NO_MODEL),
    ("calibrate --model FOLDER --output FOLDER", "--output folder: expected a file, not a folder"),
    ("calibrate --model FOLDER --output FILE/x", "the folder of --output file: "),
    ("calibrate --model FOLDER --prompts none", "none"),
    ("serve --bundle none --run-dir FOLDER", "none"),
    ("serve --backend cuda", "--backend"),
    ("serve --http-port 0", "--http-port"),
    ("serve --http-port 70000", "--http-port"),
    ("serve --config none.toml", "none.toml"),
    ("serve --config BYTES", "--config bytes: not a text file in UTF-8"),
    ("serve --precison bf16", "--precision"),
    ("swap --bundle none --run-dir FOLDER", "redraft serve"),
    ("generate hi --run-dir FOLDER", "redraft serve"),
    ("generate hi --max-tokens 0", "--max-tokens"),
    ("chat none", NO_BUNDLE),
    ("chat FOLDER --schema none.json", "--schema none.json: No such file"),
    ("chat FOLDER --schema FOLDER", "--schema folder: Is a directory"),
    ("chat FOLDER --schema BYTES", "--schema bytes: not a text file in UTF-8"),
    ("loadtest --run-dir FOLDER", "redraft serve"),
    ("loadtest --bundle FOLDER --url 127.0.0.1:9 --protocol ftp", "grpc"),
    ("loadtest --bundle FOLDER --url 127.0.0.1:9", "tokenizer.json"),
    ("loadtest --bundle FOLDER --url 127.0.0.1:9 --num-prompts 0", "--num-prompts"),
    ("loadtest --bundle FOLDER --url 127.0.0.1:9 --baseline none", "none: no rate-*.json; expected the --output of"),
    ("doctor none", NO_BUNDLE),
    ("quantize", "quantize"),
    ("-- stop", "expected a command as the first word"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_told_in_one_line(words, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(*re.sub("FOLDER|FILE|BYTES|LINK", lambda name: name[0].lower(), words).split())
    output = capsys.readouterr()
    lines = [line for line in (output.out + output.err).splitlines() if line.strip()]
    assert ended.value.code in (1, 2), lines
    assert said in lines[-1]
    assert lines[-1].startswith(("redraft", "error")), "the line says which command it is of"
    assert len(lines) <= 3, "at most two lines about what it reads come before"
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file", "bytes", "link"}, "nothing is written"
