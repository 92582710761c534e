"""The torch operator's two implementations: sequence by sequence, and by the CUDA kernels (here on the CPU)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from redraft.plugins.operators.tree_attention import torch_op
from tests.plugins.attention_case import Case, Sequence, make_case

SEQUENCES = [
    Sequence(slot=1, length=12, parents=[-1, 0, 0, 1, 3], commits=(0, 2)),
    Sequence(slot=0, length=0, parents=7),
]


def arguments(case: Case, qkv: torch.dtype, cache: torch.dtype, norm_eps: float | None = None) -> list:
    """The operator's, positional; the caches are copies."""
    tensors = {name: torch.from_numpy(array.copy()) for name, array in case.arrays.items()}
    tensors |= {"qkv": tensors["qkv"].to(qkv)}
    tensors |= {name: tensors[name].to(cache) for name in ("k_cache", "v_cache")}
    starts = tensors.pop("starts", None)
    norms = [torch.from_numpy(norm) for norm in case.norms or ()]
    last = [starts, 0, *norms, norm_eps] if norms else [] if starts is None else [starts]
    return [*tensors.values(), case.num_heads, 1, 64, *last]


@pytest.mark.parametrize("norm_eps", [None, 0.0, 1e-3])
@pytest.mark.parametrize(
    ("qkv", "cache", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.float32, torch.bfloat16, 0.04),
        (torch.bfloat16, torch.bfloat16, 0.04),
    ],
)
def test_the_kernels_give_what_the_cpu_gives(rng, qkv, cache, tolerance, norm_eps):
    case = make_case(rng, SEQUENCES, heads=2, kv_heads=1, head_size=64)
    if norm_eps is not None:
        weights = (1 + rng.standard_normal((2, 64)) / 4).astype(np.float32)
        case = replace(case, norms=(weights[0], weights[1]))
        case.arrays["qkv"] *= np.float32(0.1)
    ours, theirs = (arguments(case, qkv, cache, norm_eps) for _ in range(2))
    found, expected = torch_op.by_kernels(*ours), torch.ops.redraft.tree_attention(*theirs)
    assert found.dtype == expected.dtype == qkv
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    for place in (9, 10):
        torch.testing.assert_close(ours[place], theirs[place], atol=tolerance, rtol=2**-7)


def test_arguments_left_out_are_the_operators_defaults():
    """The dispatcher leaves out those at the end that equal them."""
    arguments = torch.ops.redraft.tree_attention.default._schema.arguments
    assert tuple(argument.default_value for argument in arguments[14:]) == torch_op.DEFAULTS


def test_a_sequence_without_rows_is_committed(rng):
    """As the specification says of each sequence; here, by the CUDA kernels and on the CPU."""
    sequences = [Sequence(slot=1, length=12, parents=0, commits=(1, 3)), *SEQUENCES[1:]]
    case = make_case(rng, sequences, heads=2, kv_heads=1, head_size=64)
    _, *expected = case.reference()
    ours, theirs = arguments(case, torch.float32, torch.float32), arguments(case, torch.float32, torch.float32)
    torch_op.by_kernels(*ours)
    torch.ops.redraft.tree_attention(*theirs)
    case.run()
    on_cpu = case.arrays["k_cache"], case.arrays["v_cache"]
    for name, caches in (("CUDA", ours[9:11]), ("torch", theirs[9:11]), ("CPU", on_cpu)):
        for found, cache in zip(caches, expected, strict=True):
            np.testing.assert_allclose(found, cache, atol=1e-5, rtol=0, err_msg=name)


def test_a_drafters_rows_without_mask_and_commits(rng):
    """As a chain's level gives them: mask [0, 0], nothing committed, rows behind earlier ones."""
    case = make_case(rng, [Sequence(slot=0, length=9, parents=2)], heads=2, kv_heads=1)
    empty = np.zeros(0, np.int32)
    case.arrays |= {"tree_mask": np.zeros((0, 0), np.int32), "commit_src": empty, "commit_offsets": empty}
    case.arrays["starts"] = case.arrays["cache_lengths"] + np.int32(1)
    ours, theirs = (arguments(case, torch.float32, torch.float32) for _ in range(2))
    torch.testing.assert_close(torch_op.by_kernels(*ours), torch.ops.redraft.tree_attention(*theirs), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[9], theirs[9], atol=1e-6, rtol=0)


def test_a_gpu_takes_the_kernels():
    assert torch._C._dispatch_has_kernel_for_dispatch_key("redraft::tree_attention", "CUDA")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(rng):
    case = make_case(rng, SEQUENCES, heads=2, kv_heads=1, head_size=64)
    expected = torch.ops.redraft.tree_attention(*arguments(case, torch.float32, torch.float32))
    on_gpu = [
        given.cuda() if isinstance(given, torch.Tensor) else given
        for given in arguments(case, torch.float32, torch.float32)
    ]
    torch.testing.assert_close(torch.ops.redraft.tree_attention(*on_gpu).cpu(), expected, atol=1e-5, rtol=0)
