"""Bundles: verified at load, written whole or not at all."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

import redraft.bundle.manifest as bundle_module
from redraft.bundle.config import BundleConfig, LimitsInfo, TargetInfo
from redraft.bundle.folder import bundle_ranks
from redraft.bundle.manifest import Bundle
from redraft.bundle.writer import finish_bundle, new_bundle, share_files
from redraft.errors import BundleError, how_to_rebuild, program

CONFIG = BundleConfig(
    name="b",
    backend="openvino",
    precision="bf16",
    target=TargetInfo(
        num_layers=1,
        hidden_size=8,
        feature_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        vocab_size=9,
        eos_token_ids=(1,),
        max_position=64,
    ),
    limits=LimitsInfo(slots=1, max_len=8, max_tree=4, prefill_chunk=4),
    methods={},
)


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(bundle_module, "cpu_features", lambda: {"avx2", "fma", "f16c"})
    with new_bundle(tmp_path / "b", 100) as folder:
        (folder / "target.onnx").write_bytes(b"network" * 100)
        finish_bundle(folder, CONFIG, {"openvino": "1"}, "0123", "redraft build --output b")
    return tmp_path / "b"


def test_a_bundle_is_loaded(path):
    bundle = Bundle.load(path)
    assert bundle.config == CONFIG
    assert bundle.manifest.target_fingerprint == "0123"
    (path / "scores.json").write_text("{}")
    Bundle.load(path)


def test_files_with_the_same_bytes_are_on_the_disk_once(path, tmp_path, monkeypatch):
    with new_bundle(tmp_path / "other", 100) as folder:
        (folder / "target.onnx").write_bytes(b"network" * 100)
        (folder / "drafter.onnx").write_bytes(b"drafter")
        finish_bundle(folder, CONFIG, {"openvino": "1"}, "0123", "redraft build --output other")
    for _ in range(2):
        share_files(tmp_path / "other", path)
    assert (path / "target.onnx").samefile(tmp_path / "other" / "target.onnx")
    assert not (path / "manifest.json").samefile(tmp_path / "other" / "manifest.json")
    assert not list(tmp_path.rglob("*.partial"))
    Bundle.load(tmp_path / "other")
    with new_bundle(path, 100) as folder:  # built anew with other bytes: the other one has its own still
        (folder / "target.onnx").write_bytes(b"changed")
        finish_bundle(folder, CONFIG, {"openvino": "1"}, "0123", "redraft build --output b")
    share_files(tmp_path / "other", path)
    Bundle.load(tmp_path / "other")
    assert (tmp_path / "other" / "target.onnx").read_bytes() == b"network" * 100


@pytest.mark.parametrize("reason", ["another disk", "damaged"])
def test_files_that_cannot_be_shared_stay(path, tmp_path, monkeypatch, reason):
    other = tmp_path / "other"
    shutil.copytree(path, other)
    if reason == "damaged":
        corrupt(path / "target.onnx")
    else:
        monkeypatch.setattr(Path, "hardlink_to", lambda *_: (_ for _ in ()).throw(OSError(errno.EXDEV, reason)))
    share_files(other, path)
    assert not (path / "target.onnx").samefile(other / "target.onnx")
    assert not list(tmp_path.rglob("*.partial"))
    Bundle.load(other)


def corrupt(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def edit_manifest(path: Path, **changes: object) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: corrupt(path / "target.onnx"), "target.onnx is corrupted"),
        (lambda path: (path / "target.onnx").write_bytes(b"net"), "has 3 bytes, expected 700: truncated"),
        (lambda path: (path / "target.onnx").unlink(), "target.onnx is missing"),
        (lambda path: (path / "config.json").write_text("{}"), "config.json has 2 bytes"),
        (lambda path: edit_manifest(path, format_version=0), "has bundle format 0, this version reads format 3"),
        (lambda path: edit_manifest(path, files=3), "manifest.json is corrupted: files"),
    ],
)
def test_a_damaged_bundle_says_what_to_rebuild(path, damage, message):
    damage(path)
    with pytest.raises(BundleError, match=message) as caught:
        Bundle.load(path)
    assert f"rebuild it with: {program('redraft')} build --output b" in str(caught.value)


def test_a_bundle_for_another_cpu_says_what_this_one_takes(path):
    edit_manifest(path, cpu_features=["avx2", "sve2"])
    said = "another CPU: it needs sve2, which this CPU lacks; build one with --backend torch"
    with pytest.raises(BundleError, match=said):
        Bundle.load(path)


def test_programs_that_messages_name_run_where_no_environment_is_active(monkeypatch, tmp_path):
    command = tmp_path / ".venv" / "bin" / "redraft"
    command.parent.mkdir(parents=True)
    command.touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    assert program("redraft") == str(command)
    assert program("mpiexec") == "mpiexec", "it is not there"
    monkeypatch.chdir(tmp_path)
    assert how_to_rebuild("redraft build -x") == "rebuild it with: .venv/bin/redraft build -x"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert program("redraft") == str(command)


def test_a_folder_that_is_no_bundle(tmp_path):
    with pytest.raises(BundleError, match="is not an engine bundle"):
        Bundle.load(tmp_path)
    with pytest.raises(BundleError, match="does not exist; `redraft build` "):
        Bundle.load(tmp_path / "nothing")


@pytest.mark.parametrize("error", [RuntimeError("compiler"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_failed_build_leaves_the_old_bundle(path, error):
    def failing_build() -> None:
        with new_bundle(path, 100) as folder:
            (folder / "target.onnx").write_bytes(b"half")
            raise error

    with pytest.raises((type(error), BundleError)):
        failing_build()
    assert Bundle.load(path).config == CONFIG
    assert [entry.name for entry in path.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError("269632768 requested and 1024 written")])
def test_a_disk_that_fills_up_is_said(tmp_path, error):
    with pytest.raises(BundleError, match="no space left on disk"), new_bundle(tmp_path / "b", 0):
        raise error


def test_a_build_replaces_the_old_bundle(path):
    with new_bundle(path, 100) as folder:
        finish_bundle(folder, CONFIG, {}, "4567", "again")
    assert Bundle.load(path).manifest.command == "again"
    assert not (path / "target.onnx").exists()


def test_a_folder_of_other_files_and_a_file_are_not_replaced(tmp_path):
    other = tmp_path / "thesis"
    other.mkdir()
    with new_bundle(other, 100) as folder:  # an empty one may be
        (folder / "chapter").touch()
    for path, why in ((other, "holds other files, which would be deleted"), (other / "chapter", "is a file")):
        with pytest.raises(BundleError, match=f"{path} {why}"), new_bundle(path, 100):
            pass
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis", "chapter"]


def test_two_builds_do_not_share_a_folder(path):
    with new_bundle(path, 100) as folder:
        (folder / "half").touch()
        with pytest.raises(BundleError, match=f"another process is writing {path}"), new_bundle(path, 100):
            pass
        assert (folder / "half").exists()
        finish_bundle(folder, CONFIG, {}, "4567", "first")
    killed = path.with_name(".b.partial")
    (killed / "target").mkdir(parents=True)
    with new_bundle(path, 100) as folder:
        assert (folder, list(folder.iterdir())) == (killed, []), "what a killed one left is gone"
        finish_bundle(folder, CONFIG, {}, "4567", "second")
    assert Bundle.load(path).manifest.command == "second"


@pytest.mark.parametrize(
    ("config", "count"),
    [('{"tensor_parallel": 3}', 3), ("{}", 1), ('{"tensor_parallel": 0}', 1), ("[]", 1), ("no JSON", 1)],
)
def test_ranks_of_a_bundle(tmp_path, config, count):
    (tmp_path / "config.json").write_text(config)
    assert bundle_ranks(tmp_path) == count
