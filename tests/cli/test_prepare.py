"""The commands that `redraft serve MODEL` runs before it serves, and those that it leaves out."""

from __future__ import annotations

import itertools
import runpy
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer

from redraft import home
from redraft.bundle import manifest
from redraft.cli import prepare, steps
from redraft.cli.drafter_swap import named, options_with
from redraft.cli.prepare import prepared
from redraft.home import SHIPPED
from redraft.learning.generations import FILE, Generation, generation_folder
from redraft.model_defs.weights.folder import GGUF, model_digest
from redraft.serving.settings import ServeSettings


class Commands:
    """What would run, and the exit status of each command; 0 for those that are not named."""

    def __init__(self) -> None:
        self.ran: list[list[str]] = []
        self.status: dict[str, int] = {}

    def __call__(self, words: list[str]) -> int:
        self.ran.append(words)
        return self.status.get(words[0], 0)

    @property
    def names(self) -> list[str]:
        return [command[0] for command in self.ran]


@pytest.fixture
def commands(tmp_path, monkeypatch) -> Commands:
    """An empty home, where nothing is built or tuned yet."""
    runs = Commands()
    for module in ("home", "cli.prepare", "cli.bundles", "cli.options", "cli.drafter_swap"):
        monkeypatch.setattr(f"redraft.{module}.HOME", tmp_path)
    monkeypatch.setattr(prepare, "one_process", lambda: nullcontext(runs))
    return runs


def options(command: list[str]) -> dict[str, str]:
    """The options of a command that have a value."""
    return {name: value for name, value in itertools.pairwise(command) if name.startswith("--")}


def bundle_of(source: str = "default", drafter: Path | None = None, tp: int = 1, precision: str = "bf16") -> Path:
    backend = "tensorrt" if precision == "fp8" else "openvino"
    settings = {"source": source, "drafter": drafter, "tp": tp, "precision": precision}
    return prepared(ServeSettings(backend=backend, **settings))


def fetched(folder_of_all: Path, name: str) -> Path:
    folder = folder_of_all / "models" / name
    folder.mkdir(parents=True)
    (folder / "source.json").write_text("{}")
    return folder


def test_the_default_model_is_fetched_built_with_its_drafter(commands, tmp_path):
    bundle = bundle_of()
    assert bundle == tmp_path / "engines" / "SmolLM2-135M-Instruct-redrafter-bf16"
    fetch, build = commands.ran
    assert fetch[:2] == ["fetch", "default"]
    assert options(fetch)["--output"] == str(tmp_path / "models")
    built = options(build)
    assert "--replace" in build, "what was built there from another model or by other settings gives way"
    assert (built["--model"], built["--output"]) == (str(tmp_path / "models" / bundle.name[:21]), str(bundle))
    assert built["--drafter"] == str(SHIPPED / "drafters" / "SmolLM2-135M-Instruct")


@pytest.mark.parametrize(("backend", "precision"), [("openvino", "source"), ("tensorrt_rtx", "bf16")])
def test_a_quantized_model_is_served_as_it_is_where_that_is_possible(commands, tmp_path, backend, precision):
    folder = fetched(tmp_path, "Tiny-1B")
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "gguf"}}')
    prepared(ServeSettings(source="Tiny-1B", backend=backend))
    (build,) = commands.ran
    assert options(build)["--precision"] == precision


def test_a_cpu_without_the_instructions_is_said_before_anything_is_fetched(commands, monkeypatch, capsys):
    monkeypatch.setattr(manifest, "cpu_features", lambda: {"sse4_2", "fma"})
    with pytest.raises(typer.Exit):
        bundle_of()
    assert "--backend openvino needs avx2, f16c, which this CPU lacks: take --backend torch" in capsys.readouterr().err
    assert not commands.ran
    prepared(ServeSettings(backend="torch"))
    assert commands.ran


def test_what_is_there_is_not_made_again(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "needs_build", lambda _: False)
    folder = fetched(tmp_path, "SmolLM2-135M-Instruct")
    bundle_of()
    assert commands.names == ["fetch"], "a former version has widened it"
    (folder / GGUF).touch()
    bundle_of()
    assert commands.names == ["fetch"]


@pytest.mark.parametrize("source", ["owner/Tiny-1B", "Tiny-1B.gguf", "models/Tiny-1B/"])
def test_a_model_without_a_drafter_drafts_from_ngrams(commands, tmp_path, source):
    assert bundle_of(source) == tmp_path / "engines" / "Tiny-1B-ngrams-bf16"
    fetch, build = commands.ran
    assert fetch[1] == source
    assert "--no-drafter" in build
    assert "--ngram" in build


def test_a_draft_lm_of_the_models_name_is_refused_before_anything_runs(commands, tmp_path, capsys):
    with pytest.raises(typer.Exit):
        bundle_of("Tiny-1B.gguf", drafter=tmp_path / "Tiny-1B.gguf")
    assert not commands.ran
    assert "rename one of the two" in capsys.readouterr().err


def test_ones_own_drafter_goes_before_the_one_that_ships(commands, tmp_path):
    own = tmp_path / "drafters" / "SmolLM2-135M-Instruct"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    bundle_of()
    assert options(commands.ran[1])["--drafter"] == str(own)
    bundle_of(drafter=tmp_path / "other")
    assert options(commands.ran[-1])["--drafter"] == str(tmp_path / "other")


def test_a_draft_lm_of_a_gguf_file_is_fetched_too(commands, tmp_path):
    bundle_of("Tiny-1B.gguf", drafter=tmp_path / "Draft-0.5B-Q4_K_M.gguf")
    assert commands.names == ["fetch", "fetch", "build"]
    assert commands.ran[1][1] == str(tmp_path / "Draft-0.5B-Q4_K_M.gguf")
    assert options(commands.ran[2])["--drafter"] == str(tmp_path / "models" / "Draft-0.5B-Q4_K_M")


def test_a_fetched_models_folder_is_a_model(commands, tmp_path):
    folder = fetched(tmp_path / "elsewhere", "Mine")
    assert bundle_of(str(folder)).name == "Mine-ngrams-bf16"
    assert commands.names == ["build"]


def test_a_folder_goes_before_a_fetched_model_of_its_name(commands, tmp_path, monkeypatch):
    fetched(tmp_path, "Mine")
    monkeypatch.chdir(tmp_path)
    bundle_of("Mine")
    assert commands.names == ["build"], "there is none of that name here"
    (tmp_path / "Mine").mkdir()
    bundle_of("Mine")
    assert commands.ran[1][:2] == ["fetch", "Mine"], "fetch refuses another model of that name"
    monkeypatch.chdir(tmp_path / "models" / "Mine")
    assert bundle_of(".").name == "Mine-ngrams-bf16"


def test_a_model_is_split_over_ranks(commands):
    bundle = bundle_of(tp=2)
    assert bundle.name.endswith("-bf16-tp2")
    assert options(commands.ran[1])["--tp"] == "2"


def test_a_target_in_fp8_is_calibrated_first_where_the_backend_asks_for_it(commands):
    bundle_of(precision="fp8")
    assert commands.names == ["fetch", "calibrate", "build"]
    commands.ran.clear()
    prepared(ServeSettings(backend="torch", precision="fp8"))
    assert commands.names == ["fetch", "build"]


def test_a_step_that_fails_ends_it(commands, capsys):
    commands.status["build"] = 1
    with pytest.raises(typer.Exit) as ending:
        bundle_of()
    assert ending.value.exit_code == 1
    assert commands.names == ["fetch", "build"]
    assert "`redraft build` ended with status 1" in capsys.readouterr().err


def test_a_command_can_be_pasted(commands, capsys):
    bundle_of("a model.gguf")
    assert "redraft fetch 'a model.gguf' --output" in capsys.readouterr().err.replace("\n", "")


def test_the_home_is_the_clones_artifacts_or_as_the_variable_says(tmp_path, monkeypatch):
    assert home.CLONE is not None
    monkeypatch.delenv(home.HOME_VARIABLE, raising=False)
    assert home._home() == home.CLONE / "artifacts"
    monkeypatch.setenv(home.HOME_VARIABLE, str(tmp_path))
    assert home._home() == tmp_path
    monkeypatch.delenv(home.HOME_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "site" / "redraft" / "home.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(Path(home.__file__).read_text())
    installed = runpy.run_path(str(copy))
    assert installed["HOME"] == tmp_path / "cache" / "redraft"
    assert installed["SHIPPED"] == copy.parent


@pytest.fixture
def model(tmp_path) -> Path:
    """A fetched model."""
    folder = fetched(tmp_path, "SmolLM2-135M-Instruct")
    for name in ("config.json", GGUF):
        (folder / name).write_text("{}")
    return folder


def learned(folder: Path, model: Path) -> tuple[Path, Path]:
    """A folder of answers whose third generation is served, a drafter for a model, and the bundle's folder."""
    generation = generation_folder(folder, 3)
    generation.mkdir(parents=True)
    (generation / "config.json").write_text(str(folder))
    Generation(number=3, model=model_digest(model)).write(generation)
    (folder / "served").symlink_to(generation)
    bundle = Path(named({"--model": str(model), "--drafter": str(generation), **BUILD})["--output"])
    bundle.mkdir(parents=True)
    return generation, bundle


BUILD = {"--backend": "openvino", "--precision": "bf16"}


def test_with_learn_it_drafts_as_the_service_of_the_folder_did_last(tmp_path, commands, model):
    """And the bundle says which generation that is; a drafter that is named goes first."""
    generation, bundle = learned(tmp_path / "learned", model)
    settings = ServeSettings(learn=tmp_path / "learned", precision="bf16")
    assert prepared(settings) == bundle
    assert options(commands.ran[-1])["--drafter"] == str(generation)
    assert Generation.of(bundle) == Generation.of(generation)
    prepared(settings.model_copy(update={"drafter": tmp_path / "other"}))
    assert options(commands.ran[-1])["--drafter"] == str(tmp_path / "other")


def test_what_was_learned_of_another_model_is_left_alone(tmp_path, commands, model):
    other = fetched(tmp_path, "Other-1B")
    (other / "config.json").write_text("{1}")
    (other / GGUF).touch()
    learned(tmp_path / "learned", other)
    prepared(ServeSettings(learn=tmp_path / "learned", precision="bf16"))
    assert options(commands.ran[-1])["--drafter"] == str(SHIPPED / "drafters" / "SmolLM2-135M-Instruct")


def test_generations_of_two_folders_have_bundles_of_their_own_which_a_swap_finds(tmp_path, commands, model):
    bundles = []
    for name in ("one", "two"):
        generation, bundle = learned(tmp_path / name, model)
        for settings in ({"learn": tmp_path / name}, {"drafter": generation}):
            assert prepared(ServeSettings(precision="bf16", **settings)) == bundle
            (bundle / FILE).unlink()  # no bundle is built there
        bundles.append(bundle)
        command = f"redraft {shlex.join(commands.ran[-1])}"
        assert options_with(command, generation)["--output"] == str(bundle)
        assert options_with(f"{command} --tp 2", generation)["--output"] != str(bundle)
    assert bundles[0] != bundles[1]
