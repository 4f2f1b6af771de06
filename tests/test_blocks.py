"""Weights in blocks of integers: the packing is ONNX Runtime's, and the scales are better than its own."""

from __future__ import annotations

import numpy as np
import pytest
from onnxruntime.capi import _pybind_state as ort

from nlpconvert import blocks


def drawn(inputs: int, outputs: int, seed: int = 0) -> np.ndarray:
    """A weight (inputs, outputs) with a few large values."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((inputs, outputs)) * rng.gamma(2, 1, (inputs, 1))).astype(np.float32)


def theirs(weight: np.ndarray, bits: int, block: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed integers, scales and zero points as ONNX Runtime's own quantizer makes them."""
    inputs, outputs = weight.shape
    count = -(-inputs // block)
    padded = np.zeros((count * block, outputs), np.float32)
    padded[:inputs] = weight
    packed = np.zeros((outputs, count, block * bits // 8), np.uint8)
    scales = np.zeros((outputs, count), np.float32)
    zeros = np.zeros((outputs, -(-count * bits // 8)), np.uint8)
    quantize = ort.quantize_matmul_4bits if bits == 4 else ort.quantize_matmul_8bits
    quantize(packed, padded, scales, zeros, block, outputs, inputs, symmetric)
    return packed, scales, zeros


@pytest.mark.parametrize("inputs", [128, 96, 80])
@pytest.mark.parametrize(("bits", "block"), [(4, 16), (4, 32), (8, 32)])
def test_the_packing_is_onnx_runtimes(bits: int, block: int, inputs: int) -> None:
    """Its scales, our packing of the integers they lead to: its bytes."""
    weight = drawn(inputs, 24)
    packed, scales, zeros = theirs(weight, bits, block, symmetric=False)
    count = scales.shape[1]
    zero = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(24, -1)[:, :count] if bits == 4 else zeros
    spread = np.zeros((24, count * block), np.float32)
    spread[:, :inputs] = weight.T
    spread = spread.reshape(24, count, block)
    whole = np.clip(np.rint(spread / scales[..., None]) + zero[..., None], 0, 2**bits - 1).astype(np.uint8)
    ours = blocks.pack(whole, bits)
    assert ours.shape == packed.shape
    real = ours.reshape(24, -1)[:, : inputs * bits // 8], packed.reshape(24, -1)[:, : inputs * bits // 8]
    np.testing.assert_array_equal(*real)
    used = np.full(zeros.shape, 255, np.uint8)
    if bits == 4 and count % 2:
        used[:, -1] = 15  # what stands in the other half of the last byte, nothing reads
    np.testing.assert_array_equal(blocks.pack(zero, bits) & used, zeros & used)


def test_the_first_value_is_in_the_lowest_bits() -> None:
    values = np.array([[1, 2, 3]], np.uint8)
    np.testing.assert_array_equal(blocks.pack(values, 4), [[0x21, 0x03]])
    np.testing.assert_array_equal(blocks.pack(values, 8), values)


@pytest.mark.parametrize("inputs", [64, 100, 7])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("bits", "block"), [(4, 16), (4, 32), (8, 128)])
def test_what_is_restored_is_close(bits: int, block: int, zero_points: bool, inputs: int) -> None:
    weight = drawn(inputs, 9)
    made = blocks.round_blocks(weight, bits=bits, block=block, zero_points=zero_points)
    back = blocks.restored(made)
    assert back.shape == weight.shape
    assert made.whole.max() < 2**bits
    assert (made.scale != 0).all()
    # At worst half a step of the scale that holds the largest value, on average over all blocks.
    count = -(-inputs // block)
    spread = np.zeros((count * block, 9), np.float32)
    spread[:inputs] = weight
    step = np.abs(spread.reshape(count, block, 9)).max(1) / 2 ** (bits - 1)
    assert np.square(back - weight).mean() < np.square(step / 2).mean()


@pytest.mark.parametrize("zero_points", [False, True])
def test_the_search_beats_the_largest_value(zero_points: bool) -> None:
    """Less error than ONNX Runtime's scales leave; less where it counts when told what counts."""
    weight = drawn(256, 64)
    importance = np.random.default_rng(1).gamma(0.5, 1, 256).astype(np.float32)
    packed, scales, zeros = theirs(weight, 4, 32, symmetric=not zero_points)
    zero = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(64, -1) if zero_points else np.full((64, 8), 8, np.uint8)
    whole = np.stack([packed & 15, packed >> 4], axis=-1).reshape(64, 8, 32)
    before = np.square(blocks.restored(blocks.Blocks(whole, scales, zero, 4, 256)) - weight)
    even = np.square(blocks.restored(blocks.round_blocks(weight, bits=4, block=32, zero_points=zero_points)) - weight)
    told = blocks.round_blocks(weight, bits=4, block=32, importance=importance, zero_points=zero_points)
    weighted = np.square(blocks.restored(told) - weight)
    assert even.mean() <= before.mean() * (1.02 if zero_points else 1)
    for other in (before, even):
        assert (weighted * importance[:, None]).mean() < 0.95 * (other * importance[:, None]).mean()


def test_a_block_of_zeros_stays_zero() -> None:
    weight = drawn(64, 4)
    weight[:32] = 0
    for zero_points in (False, True):
        made = blocks.round_blocks(weight, bits=4, block=32, zero_points=zero_points)
        assert not blocks.restored(made)[:32].any()
        assert np.isfinite(made.scale).all()


def test_an_importance_of_zeros_is_none() -> None:
    weight = drawn(64, 4)
    made = blocks.round_blocks(weight, bits=4, block=32, importance=np.zeros(64, np.float32))
    np.testing.assert_array_equal(made.whole, blocks.round_blocks(weight, bits=4, block=32).whole)


def test_a_weight_that_is_not_finite_is_refused() -> None:
    weight = drawn(32, 4)
    weight[3, 2] = np.nan
    with pytest.raises(ValueError, match="a weight is not finite"):
        blocks.round_blocks(weight, bits=4, block=32)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(96, 40)
    whole = blocks.round_blocks(weight, bits=4, block=32, zero_points=True)
    monkeypatch.setattr(blocks, "CHUNK", 200)
    parts = blocks.round_blocks(weight, bits=4, block=32, zero_points=True)
    np.testing.assert_array_equal(whole.whole, parts.whole)
    np.testing.assert_array_equal(whole.scale, parts.scale)


def test_factors_are_finer_where_much_comes_in() -> None:
    importance = np.array([1, 100, 1e4, 0], np.float32)
    found = blocks.factors(importance, 0.25)
    assert (np.diff(found[[3, 0, 1, 2]]) >= 0).all()
    assert np.log(found).sum() == pytest.approx(0, abs=1e-5)
    np.testing.assert_array_equal(blocks.factors(importance, 0.0), np.ones(4, np.float32))
    assert np.isfinite(blocks.factors(np.zeros(4, np.float32), 0.25)).all()


def test_the_output_error_is_that_of_the_output() -> None:
    weight, rows = drawn(64, 16), drawn(50, 64, seed=2)
    coarse = blocks.round_blocks(weight, bits=4, block=32)
    fine = blocks.round_blocks(weight, bits=8, block=32)
    exact = rows @ weight
    by_hand = blocks.relative_energy(blocks.rounded_input(rows, 32) @ blocks.restored(coarse) - exact, exact)
    assert blocks.output_error(coarse, weight, rows) == pytest.approx(by_hand)
    assert blocks.output_error(fine, weight, rows) < 0.1 * by_hand
