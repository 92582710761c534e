"""Hatch build hook: compiles the operators and CUDA kernels into the wheel, which then needs no compiler."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class OperatorsHook(BuildHookInterface):
    """Adds the compiled operators and the platform's tag to a wheel; an editable install compiles at first use."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile. Raises BuildError without g++ or nvcc, and RuntimeError without the OpenVINO that the operators
        extend."""
        if version == "editable":
            return
        if importlib.util.find_spec("openvino") is None:
            raise RuntimeError("openvino is missing: its extension is compiled into the wheel; `make wheel` has it")
        sys.path.insert(0, self.root)
        from redraft.plugins import library
        from redraft.plugins.cuda import compile as kernels

        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        for file in library.compile_for_wheel(folder) + kernels.compile_for_wheel(folder):
            build_data["force_include"][str(file)] = f"redraft/plugins/compiled/{file.name}"
        newest = max(int(found) for file in folder.iterdir()
                     for found in re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes()))  # fmt: skip
        build_data["tag"] = f"py3-none-manylinux_2_{newest}_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if version != "editable":
            self._folder.cleanup()
