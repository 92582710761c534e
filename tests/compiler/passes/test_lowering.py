"""What a network becomes for the CPU engine, and the form in which it needs none of our operators.

The slow cases would catch a drafter or a construction with an operation that stays outside of its one program.
"""

import dataclasses
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
import torch

from redraft.compiler.passes.fusing import fuse
from redraft.compiler.passes.graph import constant_of
from redraft.compiler.passes.lowering import lower
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.model_defs.export.drafter import export_drafter_plugin
from redraft.model_defs.export.networks import export_network
from redraft.model_defs.export.target import CacheShape, export_target_native, export_target_plugin
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.loops.random_draws import RandomDraws
from redraft.model_defs.target.families.base import Experts
from redraft.model_defs.target.model import MixtureOfExperts
from redraft.plugins.operators.linear.blocks import BlockWeight, block_form
from redraft.plugins.operators.linear.pack import PRECISIONS
from tests.conftest import slow, slow_but
from tests.engines.draws import LEVELS as LEVELS_OF
from tests.engines.tiny import tiny_drafter, tiny_drafter_of, tiny_of, tiny_target

LEVELS = 3
CACHE = CacheShape(4, 40, 8)


def lowered_drafter(initial_state: str = "embedding", levels: int = LEVELS) -> ir.Model:
    drafter = tiny_drafter(tiny_target(), initial_state=initial_state)
    with torch.no_grad():
        return lower(export_drafter_plugin(BeamSearch(drafter, 3, levels, 4)), "int8")


@pytest.mark.parametrize(("initial_state", "levels"), [("embedding", LEVELS), ("zero", 2)])
def test_a_drafter_is_one_program(initial_state, levels):
    assert [node.op_type for node in fuse(lowered_drafter(initial_state, levels)).graph] == ["Program"]


@pytest.mark.parametrize("construction", ["stochastic_beam", slow("independent")])
def test_a_drafter_that_draws_is_one_program(construction):
    rule = RANDOM_CONSTRUCTIONS[construction].rule
    drawing = RandomDraws(tiny_drafter(tiny_target()), rule, LEVELS_OF[construction], 7)
    with torch.no_grad():
        lowered = lower(export_drafter_plugin(drawing), "int8")
    assert Counter(node.op_type for node in lowered.graph)["DrawStep"] == len(LEVELS_OF[construction])
    assert [node.op_type for node in fuse(lowered).graph] == ["Program"]


@pytest.mark.parametrize(
    "variant", slow_but(["eagle", "eagle3"], ["eagle", "eagle3", "hidden_state", "draft_lm, model", "medusa"])
)
def test_a_drafter_of_any_other_kind_is_one_program(variant):
    drafter = tiny_drafter_of(tiny_target(), variant)
    drafter.prepare(90, 2)
    with torch.no_grad():
        network = lower(export_drafter_plugin(BeamSearch(drafter, 3, 2, 4)), "int8")
    assert [node.op_type for node in fuse(network).graph] == ["Program"]


def test_what_surrounds_a_projection_is_part_of_it():
    lowered = lowered_drafter()
    inputs = Counter(
        (node.op_type, getattr(node.attributes.get("activation"), "value", None), node.attributes["inputs"].value)
        for node in lowered.graph
        if node.op_type.startswith("Linear")
    )
    blocks = len(tiny_drafter(tiny_target()).blocks)
    assert inputs == {
        ("Linear", "none", "bias"): 1,  # the context, once
        ("Linear", "none", "residual"): 1,  # the root's state with its own context
        ("Linear", "none", "residual,residual_rows"): LEVELS - 1,
        ("Linear", "silu", "bias,residual"): LEVELS * blocks,
        ("Linear", "none", ""): LEVELS + LEVELS - 1,  # the output layer, and the part of a token in a state
        ("Linear", "silu_last", "bias,residual,rows"): LEVELS - 1,
        ("LinearTopK", None, "ids"): LEVELS,
    }
    tables = {node.inputs[-1] for node in lowered.graph if node.op_type == "LinearTopK"}
    assert len(tables) == 1, "the hot ids are stored once"


def test_the_native_form_has_standard_operators_alone():
    network = export_target_native(tiny_target(), CACHE)
    counts = Counter(node.op_type for node in network.graph)
    assert {node.domain for node in network.graph} == {""}
    assert (counts["RotaryEmbedding"], counts["TensorScatter"], counts["Attention"]) == (4, 4, 2)


@pytest.fixture(scope="module")
def plugin_form() -> ir.Model:
    """The tiny target's network."""
    return export_target_plugin(tiny_target(), CACHE)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_lowering_fuses_everything_around_a_multiplication(plugin_form, precision):
    before = [str(node) for node in plugin_form.graph]
    lowered = lower(plugin_form, precision)
    assert [str(node) for node in plugin_form.graph] == before
    counts = Counter(node.op_type for node in lowered.graph)
    assert counts == {"Embedding": 1, "Linear": 9, "TreeAttention": 2, "Norm": 1}
    inputs = [node.attributes["inputs"].value for node in lowered.graph if node.op_type == "Linear"]
    layer = ["bias,norm", "residual", "norm", "residual"]
    assert inputs == [*layer, *layer, "norm,rows"]


def test_norms_and_activations_of_other_families_are_parts_of_our_operators():
    """All that Gemma 3 computes is one program, the embeddings' scale too."""
    lowered = lower(export_target_plugin(tiny_of("gemma3"), CACHE), "bf16")
    counts = Counter(node.op_type for node in lowered.graph)
    assert counts == {"Embedding": 1, "Linear": 9, "TreeAttention": 2, "Norm": 5}
    assert [node.op_type for node in fuse(lowered).graph] == ["Program"]
    linear = [node.attributes["activation"].value for node in lowered.graph if node.op_type == "Linear"]
    assert linear.count("geglu") == 2
    factors = [node.attributes["factor"].value for node in lowered.graph if node.op_type == "Embedding"]
    assert factors == [pytest.approx(96**0.5)]
    attention = [node for node in lowered.graph if node.op_type == "TreeAttention"]
    assert [(len(node.inputs), node.attributes["window"].value) for node in attention] == [(13, 9), (13, 0)]


def test_opt_is_one_program():
    """With LayerNorm, ReLU and learned positions."""
    lowered = lower(export_target_plugin(tiny_of("opt"), CACHE), "bf16")
    counts = Counter(node.op_type for node in lowered.graph)
    assert counts == {"Embedding": 2, "Linear": 9, "TreeAttention": 2, "Norm": 1}
    assert [node.op_type for node in fuse(lowered).graph] == ["Program"]
    embeddings = [node.attributes for node in lowered.graph if node.op_type == "Embedding"]
    assert [each["clamped"].value for each in embeddings] == [1, 0], "the positions', then the tokens'"
    linear = [node.attributes for node in lowered.graph if node.op_type == "Linear"]
    layer = ["bias,norm,norm_bias", "bias,residual"] * 2
    assert [each["inputs"].value for each in linear] == [*layer, *layer, "norm,norm_bias,rows"]
    assert [each["activation"].value for each in linear] == [*["none", "none", "relu", "none"] * 2, "none"]


@pytest.mark.parametrize("family", ["opt", "qwen3"])
def test_features_are_put_in_the_order_of_a_weights(family):
    """Those of the norm before it too; all is still one program."""
    rng = np.random.default_rng(0)

    network = export_target_plugin(tiny_of(family), CACHE)

    def blocks_of(name: str) -> list[list[BlockWeight]] | None:
        if "layers." not in name:
            return None
        rows, features = network.graph.initializers[name].shape
        codes = rng.integers(0, 16, (rows, features), dtype=np.uint8)
        spans = -(-features // 32)
        parts = {"scale": np.ones((rows, spans), np.float32), "zero": np.ones((rows, spans), np.uint8)}
        return [[BlockWeight(block_form("i4g32"), codes, parts, rng.permutation(features).astype(np.int32))]]

    lowered = lower(network, "bf16", blocks_of)
    assert Counter(node.op_type for node in lowered.graph)["ReorderFeatures"] == 8
    assert [node.op_type for node in fuse(lowered).graph] == ["Program"]
    linear = next(node for node in lowered.graph if node.op_type == "Linear")
    order = constant_of(linear.inputs[0].producer().inputs[1])
    names = linear.attributes["inputs"].value.split(",")
    for name in {"norm", "norm_bias"} & set(names):
        reordered = linear.inputs[2 + names.index(name)]
        own = reordered.name.removesuffix(f".{linear.inputs[0].producer().inputs[1].name}")
        original = constant_of(network.graph.initializers[own])
        np.testing.assert_array_equal(constant_of(reordered), original[order])


@pytest.mark.parametrize(("shape", "expected"), [((8,), ["Norm"]), ((5, 8), ["LayerNormalization"])])
def test_a_norm_over_more_than_the_last_dimension_stays(shape, expected):
    network = export_network(torch.nn.LayerNorm(shape), (torch.zeros(5, 8),), ({},), ["x"], ["out"])
    assert [node.op_type for node in lower(network, "fp32").graph] == expected


@pytest.mark.parametrize("normalized", [True, False])
def test_a_mixture_of_experts_is_one_operator(normalized):
    config = dataclasses.replace(tiny_of("mixtral").config, experts=Experts(5, 2, normalized), activation="gelu")
    module = MixtureOfExperts(config).requires_grad_(False)
    for weight in module.parameters():
        weight.normal_()
    x = torch.zeros(3, config.hidden_size)
    lowered = lower(export_network(module, (x,), ({0: "T"},), ["x"], ["out"]), "int8")
    assert [node.op_type for node in lowered.graph] == ["Linear", "Experts"]
    attributes = {name: attribute.value for name, attribute in list(lowered.graph)[1].attributes.items()}
    sizes = {"count": 5, "chosen": 2, "normalized": int(normalized), "in_features": 96, "columns": 40}
    dtypes = {"dtype": "q8_0:40,q8_0:40", "down_dtype": "q8_0:96"}
    assert attributes == sizes | dtypes | {"activation": "geglu"}
    assert [node.op_type for node in fuse(lowered).graph] == ["Program"]


def test_an_unknown_precision_is_refused(plugin_form):
    with pytest.raises(ValueError, match="precision 'fp8'"):
        lower(plugin_form, "fp8")
