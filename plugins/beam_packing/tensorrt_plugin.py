"""Declaration of kernel.cu as a TensorRT plugin."""

from pathlib import Path

from plugins.cuda.declaration import Argument, Kernel

MOST_DRAFTED = 1024
"""width * length at most."""

_SEQUENCES, _BEAMS, _NODES = ("sequences",), ("sequences", "width", "length"), ("sequences", "nodes")

PACK_BEAMS = Kernel(
    name="PackBeams",
    source=Path(__file__).parent / "kernel.cu",
    entry="pack_beams",
    attributes=(),
    inputs=(
        *(Argument("roots", "int32", _SEQUENCES), Argument("beams", "int32", _BEAMS)),
        *(Argument("log_probs", "float32", _BEAMS), Argument("cache_lengths", "int32", _SEQUENCES)),
    ),
    scalars=("width", "length", "words"),
    outputs=(
        *(Argument(name, "int32", _NODES) for name in ("tokens", "parents", "positions")),
        Argument("tree_mask", "int32", (*_NODES, "words")),
        *(Argument("scores", "float32", _NODES), Argument("sizes", "int32", _SEQUENCES)),
    ),
    grid=("sequences", "one", "one"),
    threads=128,
    derived={
        "nodes": lambda sizes: sizes["width"] * sizes["length"] + 1,
        "words": lambda sizes: (sizes["nodes"] + 31) // 32,
        "one": lambda _: 1,
    },
)
