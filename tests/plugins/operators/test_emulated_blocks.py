"""AVX-512's code for weights in blocks, on a CPU without: SIMDe carries its instructions out."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.speed import kernel_calls
from redraft.plugins.library import AVX2, PLUGINS
from redraft.plugins.operators.linear.pack import pack_blocks
from tests.conftest import ROOT
from tests.plugins.operators.test_block_products import NAMES, random_rows, random_weight

EMULATED = ROOT / "tests" / "plugins" / "emulated"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/include/simde").is_dir(), reason="needs Debian's libsimde-dev")
@pytest.mark.parametrize("flags", [[], ["-DREDRAFT_EMULATED_VNNI"]])
def test_avx512_has_the_bits_of_avx2(tmp_path, rng, flags):
    sources = [EMULATED / "blocks.cpp", PLUGINS / "cpu" / "pool.cpp"]
    library = tmp_path / "emulated.so"
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-w", f"-I{EMULATED}", *AVX2]
    options += ["-DREDRAFT_ISA_NAMESPACE=emulated_isa", *flags]
    subprocess.run(["g++", *options, *map(str, sources), "-o", str(library)], check=True)
    emulated = ctypes.CDLL(str(library))
    for name in NAMES:
        for rows, k, n in ((3, 111, 111), (21, 288, 33)):
            packed, x = pack_blocks([random_weight(rng, name, n, k)]), random_rows(rng, rows, k)
            with kernel_calls.Recording() as recording:
                outs = [
                    kernel_calls.linear(x, packed, n, packed.dtype),
                    kernel_calls.embedding(np.arange(n, dtype=np.int32), packed, k, n, packed.dtype),
                ]
            expected = [out.copy() for out in outs]
            for out in outs:
                out.fill(np.nan)
            for kernel, (_, arguments) in zip(("linear", "embedding"), recording.calls, strict=True):
                getattr(emulated, f"emulated_{kernel}")(*arguments)
            for out, want in zip(outs, expected, strict=True):
                np.testing.assert_array_equal(out, want)
