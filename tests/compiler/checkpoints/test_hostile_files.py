"""Hostile and damaged checkpoints: each ends in a message of one line, within time and memory, or is read as it is."""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
from contextlib import contextmanager

import gguf
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from redraft.cli import fetch as command
from redraft.compiler.checkpoints.folder import FolderCheckpoint
from redraft.compiler.checkpoints.gguf import GgufCheckpoint
from redraft.compiler.checkpoints.source import load_tokenizer
from redraft.model_defs.drafters.hub.folder import HubFolder
from redraft.model_defs.files import INDEX, read_json, weight_files
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from tests.compiler.checkpoints.tiny_llama import fetch
from tests.conftest import at_most
from tests.model_defs.drafters.hub.forms import eagle

MEMORY, SECONDS, LONGEST = 2 << 30, 5, 1500


@contextmanager
def bounded():
    """Little memory and time beyond what the process has already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, hard))
    try:
        with at_most(SECONDS):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def message(read, *args) -> str | None:
    """What is said of a checkpoint, None if it is read."""
    with bounded():
        try:
            read(*args)
            return None
        except (ValueError, OSError) as error:
            said = str(error)
    assert len(said) < LONGEST, said
    return said


def read_gguf(path):
    checkpoint = GgufCheckpoint(path, "hostile")
    Target.check_weights(checkpoint.shapes(), TargetConfig.from_hf(checkpoint.config))
    for name in checkpoint.shapes():
        list(checkpoint.chunks(name))


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 20) + b"general.architecture"
HUGE = [2**62, 2**64 - 1, 2**20]


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("kind", [0, 8, 9, 2**31])
def test_a_short_gguf_with_a_long_array(tmp_path, count, kind):
    """94 bytes took all memory."""
    text = HEADER + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, kind, count)
    (tmp_path / "a.gguf").write_bytes(text + bytes(94 - len(text)))
    said = message(read_gguf, tmp_path / "a.gguf")
    assert "its 94 bytes do not hold what its header says" in said


def test_a_gguf_of_nested_arrays(tmp_path):
    nested = struct.pack("<IQ", gguf.GGUFValueType.ARRAY, 1) * 5000
    text = HEADER + struct.pack("<I", gguf.GGUFValueType.ARRAY) + nested + struct.pack("<IQ", 0, 0)
    (tmp_path / "a.gguf").write_bytes(text)
    assert "an array of arrays" in message(read_gguf, tmp_path / "a.gguf")


@pytest.mark.parametrize("counts", [(2**62, 1), (1, 2**62), (2**20 + 1, 0)])
def test_a_gguf_of_many_fields_or_tensors(tmp_path, counts):
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(64))
    assert "do not hold what its header says" in message(read_gguf, tmp_path / "a.gguf")


NUMBERS = [
    0,
    1,
    3,
    2**31 - 1,
    2**32 - 1,
    2**62,
    2**64 - 1,
    *struct.unpack("<2I", struct.pack("<2f", -1, float("nan"))),
]


def places_of(path) -> list[tuple[int, int]]:
    """Where a GGUF file's lengths, types, counts, offsets and values lie, and how many bytes each has."""
    reader = gguf.GGUFReader(path)
    places = [(4, 4), (8, 8), (16, 8)]
    for field in [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]:
        at = field.offset
        for part in field.parts[:8]:
            if field.offset > 16 and part.nbytes <= 32:
                places.append((at, min(part.nbytes, 8)))
            at += part.nbytes
    return places


def test_a_gguf_with_any_number_of_its_header_changed(gguf_file, tmp_path):
    whole, path, rng, read = gguf_file.read_bytes(), tmp_path / "a.gguf", random.Random(1), 0
    changes = [(place, number) for place in places_of(gguf_file) for number in NUMBERS]
    for (at, width), number in rng.sample(changes, 80):
        value = (number % (1 << 8 * width)).to_bytes(width, "little")
        path.write_bytes(whole[:at] + value + whole[at + width :])
        read += message(read_gguf, path) is None
    for at in rng.sample(range(len(whole)), 10):
        path.write_bytes(whole[:at])
        assert message(read_gguf, path)
    assert 0 < read < 60


def test_a_name_does_not_control_the_terminal(gguf_file, tmp_path):
    whole = gguf_file.read_bytes().replace(b"output_norm", b"out\x1b[2J\n_nm")
    (tmp_path / "a.gguf").write_bytes(whole)
    app = command.typer.Typer()
    app.command()(command.main)
    result = CliRunner().invoke(app, [str(tmp_path / "a.gguf"), "--output", str(tmp_path / "models")])
    assert result.exit_code == 1
    assert r"such as out\x1b[2J\n_nm" in result.output
    assert "\x1b" not in result.output


def folder_with(checkpoint, tmp_path, **config):
    folder = tmp_path / "hostile"
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def read_folder(folder):
    checkpoint = FolderCheckpoint(folder, "hostile")
    config = TargetConfig.from_hf(checkpoint.config)
    Target.check_weights(checkpoint.shapes(), config)
    config.rope.inverse_frequencies(config.head_size, 100)


NAN, INF = float("nan"), float("inf")
ODD = [-1, 0, 1.5, NAN, 2**62, True, "2", [1], {}, None]
COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("field", [*COUNTS, "num_key_value_heads", "head_dim", "max_position_embeddings"])
def test_numbers_of_a_configuration_have_bounds(checkpoint, tmp_path, field):
    for value in [*ODD, 1_000_000 if field != "max_position_embeddings" else 2**30]:
        said = message(read_folder, folder_with(checkpoint, tmp_path, **{field: value}))
        if value == 1_000_000:
            assert "expected" in said
        elif value is not None:
            assert f"{field} is" in said, value
        elif field in (*COUNTS, "max_position_embeddings"):
            assert f"field '{field}' is missing" in said


ODD_FIELDS = {
    "model_type": ODD,
    "rms_norm_eps": [-1, NAN, INF, 2, "x", [1], True],
    "tie_word_embeddings": ["false", 1, [], 0.5],
    "rope_parameters": [5, "x", [1], {"rope_type": "linear", "factor": -1}, {"rope_type": ["a"]}, {"rope_theta": NAN}],
    "rope_scaling": [
        5,
        "x",
        [1],
        {"rope_type": "yarn"},
        {"rope_type": "longrope", "short_factor": 5, "long_factor": []},
        {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]},
        {"rope_type": "linear", "factor": 0},
    ],
    "eos_token_id": [-1, 1.5, NAN, "x", {}, {"a": 1}, [[1]], [None], 2**62],
    "quantization_config": [5, [1], {"quant_method": ["x"]}, {"quant_method": "gptq", "bits": {}}],
    "attention_bias": [True, "x", 1],
    "hidden_act": ["gelu", 5, [1]],
    "layer_types": [5, ["x"], ["sliding_attention"] * 2],
    "num_experts": [8],
    "logit_scale": [0.5],
    "residual_multiplier": [0.2, "x"],
}


@pytest.mark.parametrize("field", ODD_FIELDS)
def test_odd_fields_of_a_configuration_are_refused(checkpoint, tmp_path, field):
    for value in ODD_FIELDS[field]:
        assert message(read_folder, folder_with(checkpoint, tmp_path, **{field: value})), value


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[1]",
        b"\xff\xfe{}",
    ],
)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json"]
)
def test_json_that_is_none_or_too_deep(checkpoint, tmp_path, name, text):
    folder = folder_with(checkpoint, tmp_path)
    if name == INDEX:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message(load_tokenizer if name.startswith("tokenizer") else read_folder, folder)


def test_a_device_or_a_pipe_is_no_configuration(tmp_path):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with bounded(), pytest.raises(ValueError, match="expected a file"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", "\0", 5, ["x"]])
def test_an_index_names_files_of_its_folder(checkpoint, tmp_path, name):
    folder = folder_with(checkpoint, tmp_path)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": name}}))
    for read in (read_folder, weight_files):
        assert "expected a file in its folder" in message(read, folder)
    drafter = eagle().write(tmp_path / "drafter")
    (drafter / "model.safetensors").rename(drafter / "a.safetensors")
    shutil.copy(folder / INDEX, drafter)
    assert "expected a file in its folder" in message(HubFolder(drafter).tensors)


def test_links_out_of_a_folder_are_followed(checkpoint, tmp_path):
    """As in the hub's cache, with shards in a folder below too."""
    folder, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    (folder / "parts").mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(checkpoint.iterdir()):
        shutil.copy(file, blobs / str(number))
        into = folder / ("parts/a.safetensors" if file.suffix == ".safetensors" else file.name)
        into.symlink_to(blobs / str(number))
    names = load_file(checkpoint / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "parts/a.safetensors")}))
    fetch(folder, tmp_path)


def test_a_safetensors_file_with_a_hostile_header(checkpoint, tmp_path):
    folder = folder_with(checkpoint, tmp_path)
    whole = (checkpoint / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header, body = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    name = "model.layers.0.mlp.up_proj.weight"
    changes = [
        *({"shape": shape} for shape in ([2**62], [-1, 3], [1.5], [2**64], [2] * 70, None, [0, 2**62], [2048])),
        *({"dtype": dtype} for dtype in ("F64", "I32", "F8_E4M3", "F4", "C64", "zz", 5, None)),
        *({"data_offsets": offsets} for offsets in ([0, 2**63], [5, 1], [-1, 4], [0], "x", [2**64, 2**64])),
    ]
    texts = [json.dumps(header | {name: header[name] | change}).encode() for change in changes]
    texts += [b"[" * 100_000, b'{"a":' * 100_000]
    for text in texts:
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
        assert message(read_folder, folder), text[:200]
    for length in (0, 2**63, 2**64 - 1, 99_000_000):
        (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + whole[8:])
        assert message(read_folder, folder)


@pytest.mark.parametrize(
    "settings", [{"chat_template": 5}, {"model_max_length": "x"}, {"eos_token": 5}, {"added_tokens_decoder": [1]}]
)
def test_odd_settings_of_a_tokenizer_are_refused(checkpoint, tmp_path, settings):
    folder = folder_with(checkpoint, tmp_path)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert "tokenizer" in message(fetch, folder, tmp_path)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_number_is_no_weight(checkpoint, tmp_path, name):
    for tied in (True, False):
        folder = folder_with(checkpoint, tmp_path, tie_word_embeddings=tied)
        save_file(load_file(folder / "model.safetensors") | {name: torch.ones(())}, folder / "model.safetensors")
        assert "is a single number, expected rows" in message(read_folder, folder)
    shapes = load_file(checkpoint / "model.safetensors") | {"model.norm.weight": torch.ones(())}
    with pytest.raises(ValueError, match=r"has shape \(\)"):
        Target.check_weights(shapes, TargetConfig.load(checkpoint))
