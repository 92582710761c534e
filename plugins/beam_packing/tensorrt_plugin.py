"""Declaration of kernel.cu as a TensorRT plugin. On a GPU: not run."""

from pathlib import Path

from plugins.cuda.declaration import Argument, Kernel, Sizes

MOST_DRAFTED = 1024
"""width * length at most: kMostDrafted in kernel.cu."""

_SEQUENCES, _BEAMS, _NODES = ("sequences",), ("sequences", "width", "length"), ("sequences", "nodes")


def nodes(sizes: Sizes) -> int:
    """Of the largest tree. Raises ValueError for beams that the kernel's shared memory does not hold, and for none."""
    width, length = sizes.known(sizes["width"]), sizes.known(sizes["length"])
    if width is not None and length is not None and not 0 < width * length <= MOST_DRAFTED:
        raise ValueError(
            f"PackBeams: beam width {width} x length {length} is {width * length} tokens: expected 1 to {MOST_DRAFTED}"
        )
    return sizes["width"] * sizes["length"] + 1


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
        "nodes": nodes,
        "words": lambda sizes: (sizes["nodes"] + 31) // 32,
        "one": lambda _: 1,
    },
)
