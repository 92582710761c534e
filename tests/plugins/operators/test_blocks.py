import gguf
import numpy as np
import pytest

from redraft.plugins.operators.linear.blocks import FORMS, GGUF_FORMS, BlockWeight, block_form


def random_blocks(rng: np.random.Generator, name: str, rows: int, features: int) -> np.ndarray:
    """Rows of a GGUF tensor whose codes and integer scales are any bytes, and whose floats are small."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, features // block, size), np.uint8)
    minimum = "minimum" in (part.name for part in FORMS[GGUF_FORMS[name]].parts)
    floats = {"q6_k": [208], "q3_k": [108]}.get(name, [0, 2] if minimum else [0])
    for at in floats:
        values = rng.standard_normal((rows, features // block, 1)).astype(np.float16)
        raw[..., at : at + 2] = values.view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", GGUF_FORMS)
def test_gguf_blocks_are_read_as_the_format_says(rng, name):
    raw = random_blocks(rng, name, 3, 512)
    weight = BlockWeight.from_gguf(name.upper(), raw)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
    assert weight.shape == (3, 512)
    np.testing.assert_array_equal(weight.dequantized().view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(weight.rows(np.array([2, 0])).dequantized(), expected[[2, 0]])


@pytest.mark.parametrize("span", [32, 96, 160])
def test_spans_of_any_multiple_of_32_features(rng, span):
    codes = rng.integers(0, 256, (3, 111), np.uint8)
    spans = -(-111 // span)
    scale, zero = rng.standard_normal((3, spans)).astype(np.float32), rng.integers(0, 256, (3, spans), np.uint8)
    weight = BlockWeight(block_form(f"i8g{span}"), codes, {"scale": scale, "zero": zero})
    for feature in (0, 31, 95, 110):
        expected = scale[:, feature // span] * (codes[:, feature].astype(np.float32) - zero[:, feature // span])
        np.testing.assert_array_equal(weight.dequantized()[:, feature], expected)


def test_rounding_to_four_bits(rng):
    weight = rng.standard_normal((3, 111)).astype(np.float32) - 5
    weight[1, 32:64], weight[2, 64:96] = 0, 0.75
    rounded = BlockWeight.quantized(weight, "int4")
    assert (rounded.form.name, rounded.shape, rounded.parts["scale"].shape) == ("q4_1", (3, 111), (3, 4))
    steps = rounded.parts["scale"].astype(np.float32).repeat(32, axis=1)[:, :111]
    # Minima are rounded to 16 bits.
    assert (np.abs(rounded.dequantized() - weight) <= 0.52 * steps + np.abs(weight) * 2**-11).all()
    np.testing.assert_array_equal(rounded.dequantized()[1, 32:64], 0)
    np.testing.assert_array_equal(rounded.dequantized()[2, 64:96], 0.75)
    ends = np.sort(rounded.codes[0, :96].reshape(3, 32))
    assert (ends[:, 0] == 0).all()
    assert (ends[:, -1] == 15).all()


def test_rounding_to_eight_bits(rng):
    weight = rng.standard_normal((3, 111)).astype(np.float32)
    weight[1, 32:64], weight[2, 64:96] = 0, -0.75
    rounded = BlockWeight.quantized(weight, "int8")
    assert (rounded.form.name, rounded.shape, list(rounded.parts)) == ("q8_0", (3, 111), ["scale"])
    steps = rounded.parts["scale"].astype(np.float32).repeat(32, axis=1)[:, :111]
    # Scales are rounded to 11 bits, of which the largest magnitude takes 127.
    assert (np.abs(rounded.dequantized() - weight) <= 0.5 * steps + np.abs(weight) * 2**-11).all()
    np.testing.assert_array_equal(rounded.dequantized()[1, 32:64], 0)
    groups = rounded.codes[:, :96].reshape(3, 3, 32)
    assert np.abs(groups.astype(int) - 128).max(-1).tolist() == [[127] * 3, [127, 0, 127], [127] * 3]
    assert (groups[2, 2] == 1).all()


def test_what_does_not_fit_is_named(rng):
    with pytest.raises(ValueError, match=r"block type MXFP4: expected one of Q4_0, Q4_1, .*, Q3_K, IQ4_NL"):
        BlockWeight.from_gguf("MXFP4", np.zeros((1, 17), np.uint8))
    with pytest.raises(ValueError, match=r"uint8 \(2, 19\): expected uint8 rows of whole q4_0 blocks, 18 bytes each"):
        BlockWeight.from_gguf("Q4_0", np.zeros((2, 19), np.uint8))
    for name in ("i4g48", "i4g0", "i5g32", "q2_k"):
        with pytest.raises(ValueError, match=f"block form '{name}': expected one of q4_0"):
            block_form(name)
    codes = np.zeros((3, 64), np.uint8)
    with pytest.raises(ValueError, match=r"scale of q4_0: float32 \(3, 2\), expected float16 \(3, 2\)"):
        BlockWeight(FORMS["q4_0"], codes, {"scale": np.zeros((3, 2), np.float32)})
    with pytest.raises(ValueError, match=r"scale of q4_0: float16 \(3, 1\), expected float16 \(3, 2\)"):
        BlockWeight(FORMS["q4_0"], codes, {"scale": np.zeros((3, 1), np.float16)})
