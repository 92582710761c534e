"""The backends' records: what they name exists."""

from __future__ import annotations

import inspect
from pkgutil import resolve_name

import pytest

from redraft.bundle.backends import BACKENDS, Backend
from redraft.bundle.config import BundleConfig
from redraft.model_defs.drafters.token_info import InfoForm
from tests.bundle.test_bundle import CONFIG


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=str)
def test_engine_and_writer_are_there(backend: Backend):
    assert {"execute", "close"} <= {*dir(resolve_name(backend.engine))}
    assert [*inspect.signature(resolve_name(backend.writer)).parameters] == [
        *("config", "target", "loops", "folder", "features")
    ]
    assert backend.usual_precision in backend.precisions
    assert all(InfoForm(form) for form in backend.token_info)


def test_a_bundles_backend_is_a_record_here_and_a_name_in_its_file(tmp_path):
    for name, backend in BACKENDS.items():
        (tmp_path / "config.json").write_text(CONFIG.model_copy(update={"backend": backend}).model_dump_json())
        assert f'"backend":"{name}"' in (tmp_path / "config.json").read_text()
        assert BundleConfig.read(tmp_path).backend is backend
