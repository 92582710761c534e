"""Drafters of the hub that draft a block at once compute what their form's definition says, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redraft.model_defs.drafters.block import BlockDrafter
from redraft.model_defs.drafters.context_drafter import ChainDrafter
from redraft.model_defs.drafters.eagle3 import ParallelEagle3Drafter
from redraft.model_defs.drafters.registry import hub_form, kind_of, load_drafter
from redraft.model_defs.loops.chains import ChainPaths
from redraft.model_defs.loops.operators import TORCH
from redraft.model_defs.loops.random_draws import RandomDraws
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.model import Target
from tests.model_defs.drafters.hub.forms import (
    BLOCK,
    HEAD_SIZE,
    HIDDEN,
    MASK,
    Form,
    block_logits,
    block_speculators,
    block_tensors,
    dflash,
    dspark,
    modelopt_dspark,
    modelopt_without_head,
    parallel_logits,
    peagle,
    windowed,
    with_head_norms,
    within,
)
from tests.model_defs.drafters.hub.test_readers import assert_equal, entering, target_of

TEXTS = [[5, 98, 6, 60, 17], [3, 90, 2]]
"""Texts with their roots."""
PATH = [88, 3, 109, 4]
MASK_ID = "mask_token_id"


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(7)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


def features_of(target: Target, drafter: ChainDrafter, tokens: list[int]) -> Tensor:
    """What the target gives for the drafter [n, H]."""
    reading = target_of(7)
    reading.feature_readers.append(drafter.feature_reader())
    return reading(torch.tensor([tokens]), causal_attend(target.config, len(tokens))).features[0]


def drafted(target: Target, drafter: ChainDrafter, levels: int) -> ChainPaths:
    """The roots of TEXTS in one call, for the first of which two pairs were ingested before; slots are 2 and 0."""
    heads, rows = drafter.layer_config, 12 + (drafter.block_rows or levels)
    drafter.prepare(rows, levels)
    shape = (4, heads.num_kv_heads, rows, heads.head_size)
    caches = [torch.zeros(shape) for _ in range(2 * drafter.context_layers)]
    features = [features_of(target, drafter, text[:-1]) for text in TEXTS]

    def call(parts: list[tuple[int, int, int]]) -> ChainPaths:
        """Of texts by their numbers, and their pairs from one to another."""
        rows = torch.cat([features[text][first:end] for text, first, end in parts])
        tokens = [token for text, first, end in parts for token in TEXTS[text][first + 1 : end + 1]]
        offsets = torch.tensor([0] + [end - first for _, first, end in parts]).cumsum(0)
        ints = [offsets.tolist(), [2 - 2 * text for text, *_ in parts], [first for _, first, _ in parts]]
        inputs = [torch.tensor(numbers, dtype=torch.int32) for numbers in (tokens, *ints)]
        return drafter.paths(TORCH, rows, *inputs, *caches)

    call([(0, 0, 2)])
    return call([(0, 2, 4), (1, 0, 2)])


FORMS: dict[str, tuple[Callable[[], Form], bool]] = {
    "DFlash": (dflash, False),
    "DFlash of speculators": (lambda: block_speculators("dflash"), False),
    "DFlash of speculators, from the root": (lambda: block_speculators("dflash", sample_from_anchor=True), True),
    "DFlash of speculators, windows": (
        lambda: windowed(block_speculators("dflash", sliding_window_non_causal=False), 9),
        False,
    ),
    "DFlash of speculators, windows and blocks that are not causal": (
        lambda: windowed(block_speculators("dflash", sliding_window_non_causal=True), 9),
        False,
    ),
    "DSpark": (dspark, True),
    "DSpark of SpecForge": (lambda: as_specforge(dspark()), True),
    "DSpark, the root's own row": (lambda: dspark(dspark_bonus_anchor=True, sample_from_anchor=False), False),
    "DSpark of ModelOpt": (modelopt_dspark, True),
    "DFlash, causal": (lambda: dflash(is_causal=True), False),
    "DFlash of ModelOpt, causal": (lambda: within(dflash(), causal=True), False),
    "DSpark of speculators": (lambda: block_speculators("dspark", sample_from_anchor=True), True),
}


def as_specforge(form: Form) -> Form:
    """The configuration of SpecForge, with the fields of DSpark in `dflash_config`, and without a head."""
    names = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    own = {name: form.config.pop(name) for name in names} | {"projector_type": "dspark"}
    form.config |= {"architectures": ["DFlashDraftModel"], "dflash_config": own, "model_type": "dspark"}
    del form.tensors["lm_head.weight"], form.tensors["embed_tokens.weight"]
    return form


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_logits_are_those_of_the_definition(target, tmp_path, name):
    make, from_root = FORMS[name]
    form = make()
    drafter = load_drafter(form.write(tmp_path), target)
    assert isinstance(drafter, BlockDrafter)
    assert (kind_of(tmp_path), hub_form(tmp_path)) == ("block", name.replace(",", " ").split()[0])
    assert drafter.feature_layers == form.layers
    levels = BLOCK - (not from_root)
    paths = drafted(target, drafter, levels)
    assert paths.raw_logits.shape == (2 * levels, len(drafter.hot_ids))
    for b, text in enumerate(TEXTS):
        layers = [entering(target, layer, text[:-1]) for layer in form.layers]
        weights = target.embedding.weight, target.lm_head.weight
        expected = block_logits(form, *weights, layers, text[-1], PATH[: levels - 1], from_root)
        found = paths.raw_logits.unflatten(0, (2, levels))[b]
        if drafter.token_info is not None:
            z, up = drafter.token_info.factors(torch.tensor([text[-1], *PATH[: levels - 1]]))
            found = found + z @ up.T
        assert_equal(found, expected)
        best = expected[0].log_softmax(-1).topk(4)
        values, ids = paths.most_likely(4)
        torch.testing.assert_close(values[b], best.values, atol=1e-3, rtol=1e-3)
        assert ids[b].tolist() == drafter.hot_ids[best.indices].tolist()
    if "d2t" in form.tensors:
        assert drafter.hot_ids.tolist() == [i + int(offset) for i, offset in enumerate(form.tensors["d2t"])]


def test_heads_that_turn_adjacent_pairs_are_put_in_our_order(target, tmp_path):
    form = dflash()
    expected = load_drafter(form.write(tmp_path / "halves"), target).state_dict()
    half = HEAD_SIZE // 2
    order = [i // 2 + half * (i % 2) for i in range(HEAD_SIZE)]
    for name, tensor in form.tensors.items():
        if "q_norm" in name or "k_norm" in name:
            form.tensors[name] = tensor[order]
        if "q_proj" in name or "k_proj" in name:
            form.tensors[name] = tensor.unflatten(0, (-1, HEAD_SIZE))[:, order].flatten(0, 1)
    form.config["is_neox_style"] = False
    found = load_drafter(form.write(tmp_path / "pairs"), target).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: x[None].bfloat16(), lambda x: {"embedding": x, MASK_ID: MASK}])
def test_a_masks_embedding_may_stand_apart(target, tmp_path, wrap):
    mask, folder = torch.arange(HIDDEN).float(), dflash().write(tmp_path)
    torch.save(wrap(mask), folder / "mask_embedding.pt")
    drafter = load_drafter(folder, target)
    assert torch.equal(drafter.embedding[MASK], mask)
    others = [token for token in range(len(drafter.embedding)) if token != MASK]
    assert torch.equal(drafter.embedding[others], target.embedding.weight[others])


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (torch.zeros(HIDDEN + 1), r"expected an embedding of 24 numbers, found \(25,\)"),
        ({MASK_ID: 3, "embedding": torch.zeros(HIDDEN)}, "is for the token 3, and config.json says mask_token_id 7"),
        ({}, "expected an embedding of 24 numbers, found NoneType"),
    ],
)
def test_another_embedding_of_masks_is_refused(target, tmp_path, held, message):
    folder = dflash().write(tmp_path)
    torch.save(held, folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, target)


@pytest.mark.parametrize(("layers", "read"), [(2, (2, 5)), (1, (4,)), (3, (2, 3, 5))])
def test_without_ids_layers_are_evenly_spaced(target, tmp_path, layers, read):
    form = dflash(num_hidden_layers=layers, dflash_config={MASK_ID: MASK}, num_target_layers=7)
    form = with_head_norms(Form(form.config, block_tensors(layers)))
    form.tensors["fc.weight"] = torch.randn(HIDDEN, len(read) * HIDDEN)
    assert load_drafter(form.write(tmp_path), target).feature_layers == read


def test_an_answer_says_the_mask(target, tmp_path):
    folder = dflash(dflash_config={"target_layer_ids": [0, 3, 6]}).write(tmp_path)
    with pytest.raises(ValueError, match="does not say mask_token_id; give --read-as mask_token_id= and the id"):
        load_drafter(folder, target)
    assert load_drafter(folder, target, {MASK_ID: "9"}).config.mask_token == 9


@pytest.mark.parametrize("levels", [4, 1])
@pytest.mark.parametrize("changes", [{}, {"norm_before_fc": True, "norm_before_residual": True}])
@torch.no_grad()
def test_p_eagle(target, tmp_path, changes, levels):
    form = peagle(**changes)
    drafter = load_drafter(form.write(tmp_path), target)
    assert isinstance(drafter, ParallelEagle3Drafter)
    assert (kind_of(tmp_path), hub_form(tmp_path)) == ("parallel_eagle3", "P-EAGLE")
    paths = drafted(target, drafter, levels)
    for b, text in enumerate(TEXTS):
        layers = [entering(target, layer, text[:-1]) for layer in form.layers]
        expected = parallel_logits(form, target.embedding.weight, layers, text[1:], levels)
        assert_equal(paths.raw_logits.unflatten(0, (2, levels))[b], expected)
    assert drafter.hot_ids.tolist() == [i + int(offset) for i, offset in enumerate(form.tensors["d2t"])]


@torch.no_grad()
def test_random_draws_are_from_the_definitions_probabilities(target, tmp_path):
    """At the root, and below a token that was drawn: DSpark's rows add what it says of the next one."""
    form, text = dspark(), TEXTS[0]
    drafter = load_drafter(form.write(tmp_path), target)
    assert isinstance(drafter, BlockDrafter)
    heads, support = drafter.layer_config, 13
    drafter.prepare(30, 2)
    caches = [torch.zeros(1, heads.num_kv_heads, 30, heads.head_size) for _ in range(2 * drafter.context_layers)]
    drawing = RandomDraws(drafter, "stochastic_beam", (3, 2), support)
    ints = [torch.tensor(numbers, dtype=torch.int32) for numbers in (text[1:], [0, 4], [0], [0])]
    filters = torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.ones(1)
    noise = torch.zeros(1, drawing.noise_rows, support)
    ids, log_probs, _ = drawing([features_of(target, drafter, text[:-1]), *ints, *caches, noise, *filters])
    layers = [entering(target, layer, text[:-1]) for layer in form.layers]
    weights = target.embedding.weight, target.lm_head.weight
    for node, path in ((0, []), (1, [int(ids[0, 0, 0])])):
        expected = block_logits(form, *weights, layers, text[-1], [*path, *PATH][: BLOCK - 1], from_root=True)
        best = expected[len(path)].topk(support)
        assert ids[0, node].tolist() == best.indices.tolist()
        torch.testing.assert_close(log_probs[0, node], best.values.log_softmax(-1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("make", [dspark, lambda: block_speculators("dflash"), peagle, modelopt_without_head])
def test_they_are_stored_in_our_form_too(target, tmp_path, make):
    drafter = load_drafter(make().write(tmp_path), target)
    drafter.save(tmp_path / "ours")
    ours = load_drafter(tmp_path / "ours", target)
    assert ours.config == drafter.config
    assert torch.equal(ours.hot_ids, drafter.hot_ids)
    weights = drafter.state_dict()
    assert ours.state_dict().keys() == weights.keys()
    assert all(torch.equal(found, weights[name].bfloat16().float()) for name, found in ours.state_dict().items())


@pytest.mark.parametrize("answer", ["true", "false"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: block_speculators("dspark"),
        lambda: dspark(architectures=["DFlashDraftModel"]),
        lambda: dspark(sample_from_anchor=True, dspark_bonus_anchor=True),
    ],
)
def test_an_answer_says_whether_the_roots_row_predicts(target, tmp_path, make, answer):
    folder = make().write(tmp_path)
    drafter = load_drafter(folder, target, {"sample_from_anchor": answer})
    assert drafter.config.from_root == (answer == "true")
    assert drafter.config.info_rank == 6
    with pytest.raises(ValueError, match="--read-as sample_from_anchor=perhaps: expected true or false"):
        load_drafter(folder, target, {"sample_from_anchor": "perhaps"})


@pytest.mark.parametrize("answer", ["true", "false"])
def test_an_answer_says_whether_a_block_is_causal(target, tmp_path, answer):
    folder = windowed(block_speculators("dflash"), 9).write(tmp_path)
    drafter = load_drafter(folder, target, {"sliding_window_non_causal": answer})
    assert drafter.config.causal == (answer == "false")


def test_deeper_drafts_than_the_block_are_refused(target, tmp_path):
    drafter = load_drafter(dflash().write(tmp_path), target)
    with pytest.raises(ValueError, match=r"5 drafting steps: expected at most 4, as many .* 'block'"):
        drafter.prepare(40, 5)
