"""Where the settings of a service come from, what they refuse, and that a process gets them whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from redraft.serving import launcher
from redraft.serving.processes import ServingError
from redraft.serving.rundir import RunDir, State
from redraft.serving.settings import OPTIONS, ServeSettings, SettingsError, environment_of, read, toml
from tests.cli.commands import run_command


def written(folder: Path, text: str) -> Path:
    file = folder / "serve.toml"
    file.write_text(text)
    return file


@pytest.fixture
def asked(monkeypatch) -> list[ServeSettings]:
    """What `redraft serve` would start."""
    settings: list[ServeSettings] = []

    def serve(wanted: ServeSettings, *_: object) -> None:
        settings.append(wanted)
        raise ServingError("enough")

    monkeypatch.setattr(launcher, "serve", serve)
    monkeypatch.setattr(launcher, "check", lambda *_: None)
    return settings


def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(tmp_path, monkeypatch, asked):
    file = written(tmp_path, 'bundle = "b"\nthreads = 1\nmax_queue = 1\nhttp_port = 1\nprefix_reuse = false\n')
    for name, value in (
        ("THREADS", "2"),
        ("MAX_QUEUE", "2"),
        ("ALLOW_HOST", "a.example b.example"),
        ("MODEL_NAME", ""),
    ):
        monkeypatch.setenv(f"REDRAFT_{name}", value)
    run_command(["serve", "--config", str(file), "--threads", "3", "--prefix-reuse"])
    (settings,) = asked
    assert (settings.bundle, settings.threads, settings.max_queue, settings.http_port) == (Path("b"), 3, 2, 1)
    assert settings.prefix_reuse, "a flag that repeats the default"
    assert settings.allow_host == ["a.example", "b.example"]
    assert (settings.model_name, settings.grpc_port) == (None, 8001)


def test_a_model_on_the_command_line_goes_before_a_bundle_in_the_file(tmp_path, monkeypatch, asked):
    monkeypatch.setattr("redraft.cli.prepare.prepared", lambda settings: Path(settings.source, "built"))
    run_command(["serve", "owner/model", "--config", str(written(tmp_path, 'bundle = "b"'))])
    assert asked[0].bundle == Path("owner/model/built")


@pytest.mark.parametrize("words", ["--allow-host a.example ./model", "./model --allow-host a.example"])
def test_a_word_after_a_value_is_the_model(monkeypatch, asked, words):
    monkeypatch.setattr("redraft.cli.prepare.prepared", lambda settings: Path(settings.source))
    run_command(["serve", *words.split()])
    assert (asked[0].source, asked[0].allow_host) == ("./model", ["a.example"])


@pytest.mark.parametrize(
    ("words", "text", "refusal"),
    [
        ("owner/model --bundle b", "", "SOURCE and --bundle"),
        ("--bundle b --precision int8", "", "--precision and --bundle"),
        ("--tp 2", 'bundle = "b"', "--tp and FILE: bundle"),
        ("", 'bundle = "b"\ndrafter = "d"', "FILE: drafter and FILE: bundle"),
        ("BUNDLE --backend torch", "", "--backend and SOURCE"),
        ("BUNDLE --bundle b", "", "SOURCE and --bundle"),
        ("BUNDLE", 'precision = "int8"', ""),
        ("--bundle b", 'source = "m"\ntp = 2', ""),
        ("m --precision int8", 'bundle = "b"', ""),
    ],
)
def test_a_bundle_is_not_served_against_what_is_asked_for(tmp_path, monkeypatch, asked, words, text, refusal):
    """A bundle as SOURCE is served as `--bundle` is: nothing is prepared, and its own ranks count."""
    monkeypatch.setattr("redraft.cli.prepare.prepared", lambda settings: Path(settings.source, "built"))
    (tmp_path / "manifest.json").touch()
    options = [str(tmp_path) if word == "BUNDLE" else word for word in words.split()]
    done = run_command(["serve", *options, "--config", str(file := written(tmp_path, text))])
    if refusal:
        both = refusal.replace("FILE", str(file))
        expected = f"redraft serve: {both}: a bundle is served as it is, expected one of the two\n"
        assert (done.exit_code, done.output, asked) == (2, expected, [])
    else:
        assert asked[0].bundle in (tmp_path, Path("b"), Path("m/built"))
        assert (asked[0].tp, asked[0].precision == "int8") == (1, words.startswith("m"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http_prt = 1", "serve.toml: http_prt: no such setting; did you mean http_port?"),
        ('worker_command = ["x"]', "serve.toml: worker_command: no such setting"),
        ('http_port = "x"', "serve.toml: http_port: input should be a valid integer, .*, got 'x'"),
        ("http_port = 70000", "serve.toml: http_port: .* less than or equal to 65535, got '70000'"),
        ("silence_s = nan", "serve.toml: silence_s: .*, got 'nan'"),
        ("learn_days = inf", "serve.toml: learn_days: input should be a finite number, got 'inf'"),
        ("learn_gb = 0.01", "serve.toml: learn_gb: .* greater than or equal to 0.1, got '0.01'"),
        ('learn_redact = ["k", ".*"]', "serve.toml: learn_redact: .*'.*' is found in any text, .* no answer"),
        ('backend = "x"', "serve.toml: backend: unknown backend 'x'; known are openvino, "),
        ('default_chat_template_kwargs = "["', "serve.toml: default_chat_template_kwargs: expected a JSON object"),
        ('api_key = "hush"', "serve.toml: api_key: a secret .*: set REDRAFT_API_KEY"),
        ("threads =", "serve.toml: Invalid value"),
    ],
)
def test_a_file_is_refused_in_one_line_that_names_it_and_the_key(tmp_path, text, message):
    done = run_command(["serve", "--config", str(written(tmp_path, text))])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    with pytest.raises(SettingsError, match=rf"^{tmp_path}/{message}"):
        read({}, tmp_path / "serve.toml")
    assert "hush" not in done.output


def test_whose_value_is_refused(tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match=r"^--config .*/serve.toml: No such file or directory$"):
        read({}, tmp_path / "serve.toml")
    with pytest.raises(SettingsError, match=r"^--default-chat-template-kwargs: .* a valid dictionary, got '3'$"):
        read({"default_chat_template_kwargs": "3"})
    with pytest.raises(SettingsError, match=r"^--trusted-proxy: .*expected an address or a network"):
        read({"trusted_proxy": ["10.0.0.0/8", "proxy.example"]})
    monkeypatch.setenv("REDRAFT_TP", "0")
    with pytest.raises(SettingsError, match=r"^REDRAFT_TP: .* greater than or equal to 1, got '0'$"):
        read({})


def test_what_status_prints_serves_the_same_again(tmp_path, monkeypatch):
    settings = ServeSettings(
        bundle=Path('/a "bundle"\\ü\x7f'),
        source="what/it/was/made/of",
        precision="int8",
        api_key="hush",
        allow_host=["a.example", "*"],
        default_chat_template_kwargs={"enable_thinking": False, "none": None, "text": '"\n'},
        tool_parser="llama3",
        decoupled=False,
        drain_s=0.5,
    )
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    run_dir.write_state(State(phase="ready", settings=settings))
    monkeypatch.setattr(launcher, "is_running", lambda _: True)
    printed = run_command(["status", "--config", "--run-dir", str(run_dir.path)]).stdout
    assert printed == toml(settings)
    assert "hush" not in printed + run_dir.state_file.read_text()
    again = settings.model_copy(update={"api_key": None, "source": "default", "precision": None})
    assert read({}, written(tmp_path, printed)) == again


def test_a_process_gets_all_settings_whole_whatever_the_variables_say(monkeypatch):
    settings = ServeSettings(threads=3, default_chat_template_kwargs={"a": None}, worker_command=["x"])
    program = "from redraft.serving.settings import process_settings; print(process_settings().model_dump_json())"
    monkeypatch.setenv("REDRAFT_THREADS", "nine")

    def started(environment: dict[str, str]) -> tuple[str, str]:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip(), done.stderr.strip()

    assert started(environment_of(settings)) == (settings.model_dump_json(), "")
    assert started(dict(os.environ))[1].startswith("REDRAFT_THREADS: "), "started by hand"
    by_hand = started(os.environ | {"REDRAFT_THREADS": "9"})[0]
    assert ServeSettings.model_validate_json(by_hand) == ServeSettings(threads=9)


def test_empty_lines_of_a_variable_are_no_patterns(monkeypatch):
    monkeypatch.setenv("REDRAFT_LEARN_REDACT", "secret\n\n \n[0-9]{9}\n^.{0,200}$\n\\w\n")
    assert read({}).learn_redact == ["secret", "[0-9]{9}", "^.{0,200}$", r"\w"]


def test_every_option_has_a_sentence_and_a_value_that_toml_can_hold():
    assert all(field.description and field.description.endswith(".") for field in OPTIONS.values())
    assert set(ServeSettings.model_fields) - set(OPTIONS) == {"worker_command"}
