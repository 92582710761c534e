"""What bundles take for the text of their operators."""

from __future__ import annotations

import pytest

from redraft.plugins import library
from redraft.plugins.library import BuildError


def test_a_bundle_depends_on_the_operators_of_networks_only(tmp_path, monkeypatch):
    """It would catch a change of how the host samples or drafts that asks to build every bundle again."""
    changes = {"noise.h": True, "operators/linear/kernel.h": True}
    changes |= {"operators/sampling/kernel.h": False, "trees/growth.h": False}
    for name in changes:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(library, "PLUGINS", tmp_path)
    before = library.operators_digest()
    for name, counts in changes.items():
        (tmp_path / name).write_text("2")
        assert (library.operators_digest() != before) == counts, name
        (tmp_path / name).write_text("1")


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    compiler, cache = tmp_path / "compiler", tmp_path / "cache"
    compiler.write_text("#!/bin/sh\necho 'as: cannot write: No space left on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "CACHE", cache)
    with pytest.raises(BuildError, match=rf"no space left .*: free some in {cache} "):
        library._built("0" * 16)
    assert [file.name for file in cache.iterdir()] == ["lock"]


def test_what_is_missing_to_compile_is_said_before(tmp_path, monkeypatch):
    """A service checks it before its bundle is built, and a folder that cannot be made is no traceback."""
    monkeypatch.setattr(library, "are_built", lambda: False)
    monkeypatch.setattr(library, "CACHE", tmp_path)
    library.check_build()
    (tmp_path / "file").touch()
    monkeypatch.setattr(library, "CACHE", tmp_path / "file" / "cache")
    for build in (library.check_build, lambda: library._built("0" * 16)):
        with pytest.raises(BuildError, match=r"cannot keep .*: Not a directory; REDRAFT_PLUGIN_CACHE names another"):
            build()
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    with pytest.raises(BuildError, match=r"g\+\+ not found"):
        library.check_build()
