"""What bundles take for the text of their operators."""

from __future__ import annotations

from redraft.plugins import library


def test_a_bundle_depends_on_the_operators_of_networks_only(tmp_path, monkeypatch):
    """It would catch a change of how the host samples that asks to build every bundle again."""
    changes = {"noise.h": True, "operators/linear/kernel.h": True, "operators/sampling/kernel.h": False}
    for name in changes:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(library, "PLUGINS", tmp_path)
    before = library.operators_digest()
    for name, counts in changes.items():
        (tmp_path / name).write_text("2")
        assert (library.operators_digest() != before) == counts, name
        (tmp_path / name).write_text("1")
