"""What the build script refuses, and how it says so."""

from __future__ import annotations

import inspect
import re
import resource
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from redraft.bundle.backends import OPENVINO, TORCH, Precision
from redraft.bundle.config import BundleConfig
from redraft.cli import build
from redraft.compiler.bundle import require_gpu, weight_bytes
from redraft.compiler.calibration import calibrate
from redraft.compiler.methods import READS, MethodSettings, check_method, read_methods
from redraft.console import resources
from redraft.errors import BundleError
from redraft.model_defs.drafters.registry import DRAFTERS
from redraft.model_defs.files import read_tensors
from redraft.model_defs.weights.folder import GGUF
from tests.cli.commands import invoke
from tests.engines.tiny import DRAFTING, LIMITS, tiny_drafter, tiny_drafter_of, tiny_target
from tests.model_defs.weights.folders import write_folder

ROOT = Path(__file__).resolve().parents[2]
run = partial(invoke, build.main)


NEEDED = 4_000_000_000
"""To build a target with weights of 1 GB for `openvino`."""
RTX = ["--no-drafter", "--backend", "tensorrt_rtx"]
RANDOM = ["--drafter", "DRAFTER", "--construction"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a table for each method, found none"),
        ("[a]\nbeam_with = 3", "methods.toml, [a]: beam_with: unknown field"),
        ("[a]\nngram = true\nbeam_width = 0", "[a]: beam_width: input should be greater than or equal to 1, got 0"),
        ("[a]\nngram = true\nconstruction = 'chain'", "drafts by the n-gram branch only, which has no drafter"),
        ("[a]\nconstruction = 'chain'", "--construction chain: expected a drafter or ngram = true too"),
        ("['a/b']\nngram = true", "a/b"),
        ("[a]\nngram = true\n[b]\nngram = true\ntree_budget = 90", "b: --tree-budget 90: expected less than"),
        ("[a]\ndrafter = 'nowhere'", "nowhere"),
    ],
)
def test_methods_that_cannot_be_are_refused(model, tmp_path, text, message):
    (tmp_path / "methods.toml").write_text(text)
    done = run("--model", model, "--max-len", 64, "--methods", tmp_path / "methods.toml", "--output", tmp_path / "b")
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "b").exists()


def test_flags_of_one_method_do_not_go_with_methods(model, tmp_path):
    done = run("--model", model, "--methods", "m.toml", "--beam-width", 3, "--no-drafter", "--output", tmp_path / "b")
    assert "--methods describes all methods: expected it without --no-drafter, --beam-width" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "DRAFTER", "--no-drafter"], "give one of --drafter FOLDER, --methods FILE and --no-drafter"),
        (["--no-drafter", "--precision", "fp16"], "--precision fp16: openvino takes fp32, bf16, int8, int4, source"),
        ([*RTX, "--form", "plugin"], "--form plugin: tensorrt_rtx takes native"),
        ([*RTX, "--precision", "fp8"], "--precision fp8 needs --calibration, from redraft calibrate"),
        (["--no-drafter", "--max-len", "500"], "--max-len 500: the target's context has 128 positions"),
        (["--drafter", "DRAFTER", "--candidates", "51"], "--candidates 51: expected at most 50, all that the drafter"),
        (
            ["--backend", "torch", "--drafter", "DRAFTER", "--beam-width", "42", "--candidates", "49"],
            "--beam-width 42 --candidates 49: expected a product of at most 2048",
        ),
        (
            [*RTX[1:], "--drafter", "DRAFTER", "--support", "9"],
            "--support 9: drafters of tensorrt_rtx are in native form",
        ),
        (
            [*RANDOM, "gumbel_top_k", "--levels", "2,4", "--support", "3"],
            "--levels 2,4: 8 draws without replacement below 2 nodes, expected at most --support 3 of each",
        ),
        ([*RANDOM, "stochastic_beam", "--ngram"], "'recursive_rejection' does not go with merged trees"),
        ([*RANDOM, "independent", "--verification", "recursive_rejection"], "these draws repeat"),
        (["--drafter", "DRAFTER", "--bigrams", "SHORT"], "has shape (3,), expected a successor of each of 111"),
        (["--drafter", "GGUF"], "d.gguf is a GGUF file, of which no drafter is read: give the folder that it was"),
    ],
)
def test_what_cannot_work_is_refused(model, tmp_path, options, message):
    tiny_drafter(tiny_target()).save(tmp_path / "drafter")
    np.save(tmp_path / "short.npy", np.zeros(3, np.int32))
    (tmp_path / "d.gguf").touch()
    files = {"DRAFTER": tmp_path / "drafter", "SHORT": tmp_path / "short.npy", "GGUF": tmp_path / "d.gguf"}
    options = [str(files.get(option, option)) for option in options]
    if "--max-len" not in options:
        options = ["--max-len", "64", *options]
    done = run("--model", model, "--output", tmp_path / "b", *options)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    assert not list(tmp_path.glob("*b*partial")) + list(tmp_path.glob("b"))


def test_any_drafter_that_leaves_a_chain_may_be_drafted_from_again(monkeypatch):
    config = BundleConfig.model_construct(limits=LIMITS)
    method = DRAFTING.model_copy(update={"drafter": "recurrent", "resample_above": 0})
    with pytest.raises(BundleError, match="'block' leave a chain behind, this is 'recurrent'"):
        check_method("a", method, config)
    monkeypatch.setattr(DRAFTERS["recurrent"], "has_raw_logits", True)
    check_method("a", method, config)


def test_every_setting_matters_to_some_method():
    assert set.union(*READS.values()) == set(MethodSettings.model_fields)


def test_the_methods_that_ship_and_the_thresholds_that_work(monkeypatch):
    monkeypatch.chdir(ROOT)
    files = [ROOT / "build" / "drafters.toml", *(ROOT / "benchmarks" / "methods").glob("*.toml")]
    usual = inspect.signature(build.main).parameters["max_tree"].default
    own = {"flags": MethodSettings(drafter="drafters/SmolLM2-135M-Instruct", beam_width=4)}
    lyanna = {"drafter": "drafters/SmolLM2-135M-Instruct-hidden_state", "beam_length": 4}
    own |= {f"{r}, {s}": MethodSettings(**lyanna, resample_above=r, skip_above=s) for r, s in ((0, 0), (1, 2), (2, 2))}
    built = [(own, usual)]
    for file in files:
        given = re.search(r"redraft build .*--max-tree (\d+)", file.read_text())
        built.append((read_methods(file), int(given[1]) if given else usual))
    for chosen, max_tree in built:
        config = BundleConfig.model_construct(limits=LIMITS.model_copy(update={"max_tree": max_tree}))
        for name, settings in chosen.items():
            check_method(name, settings.config(), config)
    assert ROOT / "benchmarks" / "methods" / "methods.toml" in files


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--backend", "tensorrt_rtx", "--token-info", "int8"],
            "--token-info int8: tensorrt_rtx takes bf16, low_rank",
        ),
        (
            ["--resample-above", "4"],
            "--resample-above 4: expected less than 4, the most steps that are left of a draft of --beam-length 5",
        ),
        (
            ["--resample-above", "2", "--skip-above", "1"],
            "--skip-above 1: expected --resample-above of 1 or less, got 2: where more steps than 1 are left nothing",
        ),
    ],
)
def test_what_a_drafter_with_a_context_cannot_do_is_refused(model, tmp_path, options, message):
    tiny_drafter_of(tiny_target(), "hidden_state").save(tmp_path / "drafter")
    drafter = ["--drafter", tmp_path / "drafter", "--max-len", "64", "--verification", "sampled_walk"]
    done = run("--model", model, "--output", tmp_path / "b", *drafter, *options)
    assert done.exit_code == 1
    assert message in done.output


@pytest.mark.parametrize("depth", ["--beam-length 6", "--levels 1,1,1,1,1,1"])
def test_a_method_deeper_than_its_drafter_goes_is_named(model, tmp_path, depth):
    tiny_drafter_of(tiny_target(), "medusa").save(tmp_path / "drafter")
    drafter = f'drafter = "{tmp_path / "drafter"}"\n'
    deep = 'construction = "random_chain"\nlevels = "1,1,1,1,1,1"' if "levels" in depth else "beam_length = 6"
    (tmp_path / "methods.toml").write_text(f"[a]\n{drafter}[b]\n{drafter}{deep}\n")
    options = ["--methods", tmp_path / "methods.toml", "--output", tmp_path / "b", "--max-len", 64]
    done = run("--model", model, *options)
    assert done.exit_code == 1
    said = " ".join(done.output.split())
    assert f"b: {depth}: expected at most 5, as many steps as this drafter 'medusa' drafts" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden size 64"),
        ({"vocab_size": 500}, "vocabulary 500"),
        ({"target_fingerprint": "feed"}, "was trained for another target: fingerprint feed"),
    ],
)
def test_a_drafter_of_another_target_is_refused(model, tmp_path, change, message):
    tiny_drafter(tiny_target()).save(tmp_path / "drafter", change)
    done = run("--model", model, "--drafter", tmp_path / "drafter", "--output", tmp_path / "b", "--max-len", 64)
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("folder", "file", "content", "message"),
    [
        ("drafter", "drafter.safetensors", None, "drafter.safetensors: truncated or corrupted"),
        ("drafter", "config.json", "[]", "config.json: expected a JSON object"),
        ("drafter", "config.json", '{"drafter": "recurrent"}', "whole drafter: config.json does not say hidden_size"),
        ("model", "config.json", "{", "config.json: not JSON"),
    ],
)
def test_a_broken_file_is_named(model, tmp_path, folder, file, content, message):
    shutil.copytree(model, tmp_path / "model")
    tiny_drafter(tiny_target()).save(tmp_path / "drafter")
    broken = tmp_path / folder / file
    broken.write_bytes(broken.read_bytes()[:1000] if content is None else content.encode())
    options = ["--model", tmp_path / "model", "--drafter", tmp_path / "drafter", "--max-len", 64]
    done = run(*options, "--output", tmp_path / "b")
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("place", "error", "said"),
    [
        ("finish_bundle", MemoryError(), "(MemoryError)"),
        (
            "Target.from_folder",
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory\n"),
            "enforce fail",
        ),
        ("Target.from_folder", RuntimeError("std::bad_alloc"), "(std::bad_alloc)"),
    ],
)
def test_too_little_memory_says_what_would_fit(model, tmp_path, monkeypatch, place, error, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(f"redraft.compiler.bundle.{place}", fail)
    monkeypatch.setattr("redraft.engines.memory.host_bytes", lambda: 160_000_000)
    done = run("--model", model, "--output", tmp_path / "b", "--no-drafter", "--max-len", 64, "--backend", "torch")
    assert done.exit_code == 1
    assert "redraft build: out of memory (" in done.output
    assert said in done.output
    assert "0.16 GB are free; a target with weights of 0.09 GB would fit: choose one" in done.output
    assert not list(tmp_path.iterdir())


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine's memory: bytes in all, available, of swap; files of control groups, and which this one is."""

    def make(total, available=0, swap=0, groups="", address=resource.RLIM_INFINITY, **limits):
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=total, available=available))
        monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(total=swap))
        monkeypatch.setattr("psutil.Process.memory_info", lambda _: SimpleNamespace(rss=0))
        monkeypatch.setattr("resource.getrlimit", lambda _: (address, address))
        monkeypatch.setattr(resources, "CGROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(resources, "OWN_CGROUPS", tmp_path / "own")
        (tmp_path / "own").write_text(groups)
        for path, limit in limits.items():
            file = tmp_path / "cgroup" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{limit}\n")

    return make


@pytest.mark.parametrize("limits", [{"total": NEEDED - 1}, {"total": NEEDED, "address": NEEDED - 1}])
def test_a_target_too_large_for_the_machine_is_refused_before_it_is_loaded(
    model, tmp_path, monkeypatch, machine, limits
):
    """Where Linux would end the build without a word."""
    monkeypatch.setattr("redraft.model_defs.target.model.Target.from_folder", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("redraft.compiler.bundle.count_numbers", lambda _: 500_000_000)
    machine(**limits)
    done = run("--model", model, "--output", tmp_path / "b", "--no-drafter", "--max-len", 64)
    assert done.exit_code == 1
    assert "out of memory (foreseen, with 4.00 GB in all): about 4.00 GB are needed (4 times the weights" in done.output
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(("available", "warned"), [(NEEDED, False), (NEEDED - 1, True)])
def test_memory_that_other_programs_hold_is_a_warning(model, tmp_path, monkeypatch, machine, available, warned):
    monkeypatch.setattr("redraft.compiler.bundle.count_numbers", lambda _: 500_000_000)
    monkeypatch.setattr("redraft.compiler.writers.openvino.write", lambda *_: {})
    machine(NEEDED - 5, available, swap=5)
    done = run("--model", model, "--output", tmp_path / "b", "--no-drafter", "--max-len", 64)
    assert done.exit_code == 0, done.output
    assert ("if it is killed, memory ran out: about 4.00 GB are needed" in done.output) == warned


@pytest.mark.parametrize(
    ("groups", "limits", "most"),
    [
        ("0::/", {}, 100),
        ("0::/", {"memory.max": 60}, 60),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": 50, "memory.max": 60}, 50),
        ("0::/a", {"b/memory.max": 50}, 100),
        ("0::/../..", {"memory.max": 60}, 60),
        ("5:cpu,cpuacct:/a\n4:memory:/a", {"memory/a/memory.limit_in_bytes": 50, "a/memory.max": 40}, 50),
        ("4:memory:/outside", {"memory/memory.limit_in_bytes": 60}, 60),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": 2**63 - 4096}, 100),
    ],
)
def test_a_containers_limit_counts(machine, groups, limits, most):
    machine(100, 90, 7, groups, **limits)
    assert resources.most_bytes() == most + 7
    assert resources.host_bytes() == min(most, 90)


def test_weights_count_by_their_number_not_their_width(model):
    """A checkpoint in float32, as this one, takes no more memory than one in bfloat16."""
    assert weight_bytes(model, Precision.bf16) == 2 * sum(
        w.numel() for w in read_tensors(model / "model.safetensors").values()
    )


def test_blocks_count_as_their_file_has_them(tmp_path):
    folder = write_folder(tmp_path / "quantized")
    assert weight_bytes(folder, Precision.source) == (folder / GGUF).stat().st_size
    assert OPENVINO.copies_to_build(Precision.source) < OPENVINO.copies_to_build(Precision.int8) == 4


def test_what_has_no_blocks_is_not_built_with_those_of_its_source(model, tmp_path):
    done = run("--model", model, "--output", tmp_path / "b", "--no-drafter", "--precision", "source")
    assert done.exit_code == 1
    assert "holds no blocks to serve as they are: fetch the model again" in done.output
    assert not (tmp_path / "b").exists()


def test_blocks_are_split_between_groups_only(tmp_path):
    """Heads of 32 features, of which three ranks have eight, four and four, in groups of 256."""
    sizes = {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 4}
    folder = write_folder(tmp_path / "quantized", **sizes)
    (folder / "tokenizer.json").write_text(Tokenizer(WordLevel({"a": 0}, "a")).to_str())
    done = run("--model", folder, "--output", tmp_path / "b", "--no-drafter", "--tp", 3, "--precision", "source")
    assert done.exit_code == 1
    said = " ".join(done.output.split())
    assert "o_proj.weight is stored in groups of 256 features, and a part of it would have those from 256 to" in said
    assert "choose other ranks than 3, or another precision than source" in said
    assert not (tmp_path / "b").exists()


def test_another_error_is_no_lack_of_memory(model, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr("redraft.model_defs.target.model.Target.from_folder", fail)
    done = run("--model", model, "--output", tmp_path / "b", "--no-drafter")
    assert isinstance(done.exception, RuntimeError)
    assert "out of memory" not in done.output


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0)])
def test_fp8_is_refused_where_the_gpu_is_too_old(monkeypatch, capability):
    """Where there is none, the bundle is for another machine."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "A100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    said: list[str] = []
    for backend, precision in ((TORCH, Precision.bf16), (OPENVINO, Precision.source)):
        require_gpu(backend, precision, said.append)
    assert not said
    if capability == (8, 0):
        with pytest.raises(BundleError, match=r"A100 .*8\.0: fp8 .* 8\.9 .* bf16, or .* empty CUDA_VISIBLE_DEVICES"):
            require_gpu(TORCH, Precision.fp8, said.append)
    else:
        require_gpu(TORCH, Precision.fp8, said.append)
    needs = "fp8 takes a GPU of compute capability 8.9 or later; on a CPU it is slow"
    assert said == [needs] * (capability is None)


def test_a_calibration_of_another_target_is_refused(model, tmp_path):
    calibration = calibrate(tiny_target(), "feed", [[1, 2]])
    calibration.save(tmp_path / "c.json")
    options = ["--precision", "fp8", "--calibration", tmp_path / "c.json", "--max-len", 64]
    done = run("--model", model, *RTX, *options, "--output", tmp_path / "b")
    assert done.exit_code == 1
    assert "c.json was made for another target: fingerprint feed, this one has" in done.output
    assert not (tmp_path / "b").exists()
