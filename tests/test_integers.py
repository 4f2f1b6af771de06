"""How arrays become integers: the formulas against float64, whatever a layer's input looks like."""

from __future__ import annotations

import numpy as np
import pytest

from nlpconvert import integers
from nlpconvert.integers import INT8, SATURATING, Preparation, Sample, Sampler

CHANNELS, OUTPUTS, TOKENS = 48, 24, 400


def gelu(x: np.ndarray) -> np.ndarray:
    """The tanh form."""
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))), np.float32)


def even() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((TOKENS, CHANNELS)).astype(np.float32)


def one_sided() -> np.ndarray:
    """After a GELU: from -0.17 up."""
    return gelu(even() * 3)


def with_outliers() -> np.ndarray:
    """Two channels carry two hundred times the rest."""
    rows = even()
    rows[:, [5, 31]] *= 200
    return rows


def with_dead_channels() -> np.ndarray:
    """One channel is always zero, another always the same, a third tiny."""
    rows = even()
    rows[:, 3], rows[:, 4], rows[:, 7] = 0, 2.5, 1e-30
    return rows


def huge() -> np.ndarray:
    """Past what half precision can hold."""
    return even() * np.float32(1e6)


INPUTS = pytest.mark.parametrize("rows", [even(), one_sided(), with_outliers(), with_dead_channels(), huge()])


def weight(seed: int = 1) -> np.ndarray:
    """(CHANNELS, OUTPUTS) with columns of very unlike size."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((CHANNELS, OUTPUTS)) * np.geomspace(1e-3, 10, OUTPUTS)).astype(np.float32)


def sample_of(rows: np.ndarray) -> Sample:
    sampler = Sampler(rows.shape[1], len(rows))
    sampler.add(rows)
    return sampler.sample()


def unrounded(prepared: Preparation, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The right-hand side of the module's formula without a bias, in float64."""
    inner = integers.folded(prepared, weights).astype(np.float64)
    moved = (rows.astype(np.float64) - prepared.shift) * prepared.multiplier
    apart = list(prepared.outliers)
    return np.asarray(moved @ inner + rows[:, apart] @ weights[apart] + prepared.shift @ weights)


# -- what is seen of an input ------------------------------------------------------------------------------------------


def test_ranges_are_those_of_all_batches_and_memory_is_bounded() -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((257, CHANNELS)) * (1 + n)).astype(np.float32) for n in range(20)]
    batches[3][100, 7], batches[11][0, 9] = 1e4, -1e5
    sampler = Sampler(CHANNELS, 64)
    for batch in batches:
        sampler.add(batch)
        kept = sampler.sample()
        assert len(kept.rows) <= 64 + 16
    every = np.concatenate(batches)
    np.testing.assert_array_equal(kept.low, every.min(0))
    np.testing.assert_array_equal(kept.high, every.max(0))
    assert kept.seen == len(every)
    assert 1e4 in kept.rows[:, 7] and -1e5 in kept.rows[:, 9]  # the tokens with the extremes are among those kept
    assert len({row.tobytes() for row in kept.rows} - {row.tobytes() for row in every}) == 0


def test_every_text_has_the_same_chance() -> None:
    """One text of 900 tokens and 100 of 9: a token of the long one is a hundredth as likely."""
    sampler = Sampler(1, 200)
    long, short = np.zeros((900, 1), np.float32), np.ones((900, 1), np.float32)
    sampler.add(long, np.full(900, 900))
    sampler.add(short, np.full(900, 9))
    assert sampler.sample().rows[:200].mean() > 0.9


def test_the_same_texts_give_the_same_sample() -> None:
    first, again = sample_of(even()), sample_of(even())
    np.testing.assert_array_equal(first.rows, again.rows)


def test_nothing_seen_and_not_finite_are_errors() -> None:
    sampler = Sampler(2, 8)
    sampler.add(np.zeros((0, 2), np.float32))
    with pytest.raises(ValueError, match="no token was seen"):
        sampler.sample()
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="not finite"):
            sampler.add(np.array([[0, bad]], np.float32))


# -- the rewrite of an input -------------------------------------------------------------------------------------------


@INPUTS
@pytest.mark.parametrize("outliers", [0, 1, 6])
def test_the_rewrite_is_exact_without_rounding(rows: np.ndarray, outliers: int) -> None:
    weights = weight()
    prepared = integers.prepare(sample_of(rows), weights, outliers=outliers)
    exact = rows.astype(np.float64) @ weights
    np.testing.assert_allclose(unrounded(prepared, rows, weights), exact, atol=2e-6 * np.abs(exact).max())


@INPUTS
@pytest.mark.parametrize("outliers", [0, 6])
def test_scales_are_sane_and_nothing_that_was_seen_is_clipped(rows: np.ndarray, outliers: int) -> None:
    prepared = integers.prepare(sample_of(rows), weight(), outliers=outliers)
    assert np.isfinite(prepared.shift).all() and np.isfinite(prepared.multiplier).all()
    assert isinstance(prepared.scale, float) and 0 < prepared.scale < 1e6
    assert len(prepared.outliers) == outliers
    assert (prepared.multiplier[list(prepared.outliers)] == 0).all() and not prepared.shift[
        list(prepared.outliers)
    ].any()
    assert (prepared.multiplier >= 0).all() and np.count_nonzero(prepared.multiplier == 0) == outliers
    steps = (rows - prepared.shift) * prepared.multiplier / prepared.scale
    assert np.abs(steps).max() <= INT8 + 1e-3
    # WIDER leaves room for other texts, and no more than that.
    assert np.abs(steps).max() >= INT8 / integers.WIDER - 1


def test_a_gelu_is_shifted_so_that_both_halves_are_used() -> None:
    rows = one_sided()
    prepared = integers.prepare(sample_of(rows), weight())
    np.testing.assert_allclose(prepared.shift, (rows.min(0) + rows.max(0)) / 2, rtol=1e-6)
    assert (prepared.shift > 1).all()
    steps = np.rint((rows - prepared.shift) * prepared.multiplier / prepared.scale)
    assert steps.min() < -100 and steps.max() > 100
    unshifted = integers.prepare(sample_of(np.concatenate([rows, -rows])), weight())
    assert not unshifted.shift.any()
    assert prepared.error < 0.5 * integers._error(unshifted, sample_of(rows).rows, weight(), INT8)


def test_outliers_are_the_widest_channels_and_help() -> None:
    rows = with_outliers()
    prepared = integers.prepare(sample_of(rows), weight(), outliers=2)
    assert prepared.outliers == (5, 31)
    assert prepared.error < 0.5 * integers.prepare(sample_of(rows), weight()).error


def test_the_strength_of_the_least_error_is_taken() -> None:
    for rows in (even(), with_outliers()):
        alone = {s: integers.prepare(sample_of(rows), weight(), strengths=[s]).error for s in integers.STRENGTHS}
        best = integers.prepare(sample_of(rows), weight())
        assert best.error == min(alone.values()) and alone[best.strength] == best.error


def test_a_weight_of_zeros_and_a_single_channel_are_no_trouble() -> None:
    prepared = integers.prepare(sample_of(even()), np.zeros((CHANNELS, OUTPUTS), np.float32))
    assert np.isfinite(prepared.multiplier).all() and 0 < prepared.scale < 1e6 and prepared.error == 0
    one = integers.prepare(sample_of(even()[:, :1]), weight()[:1])
    assert 0 < one.scale < 1e6


def test_not_every_channel_can_be_an_outlier() -> None:
    with pytest.raises(ValueError, match="every channel"):
        integers.prepare(sample_of(even()), weight(), outliers=CHANNELS)


def test_what_lies_beyond_is_clipped_not_wrapped() -> None:
    prepared = Preparation(np.zeros(1, np.float32), np.ones(1, np.float32), 0.5, (), 0.5)
    rows = np.array([[1e9], [-1e9], [63.6], [0.74], [0.76]], np.float32)
    np.testing.assert_array_equal(integers.rounded_input(prepared, rows)[:, 0], [63.5, -63.5, 63.5, 0.5, 1.0])


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [INT8, SATURATING])
def test_a_weight_is_rounded_by_column_symmetrically(largest: int) -> None:
    array = weight()
    array[:, 4] = 0
    array[2, 9] = -np.abs(array[:, 9]).max() * 2  # the largest is negative: never -128
    whole, scale = integers.round_weight(array, largest)
    assert whole.dtype == np.int8 and scale.dtype == np.float32
    assert whole.shape == array.shape and scale.shape == (OUTPUTS,)
    assert (scale > 0).all() and np.isfinite(scale).all() and scale[4] == 1 and not whole[:, 4].any()
    largest_of = np.abs(whole.astype(int)).max(0)
    assert (np.delete(largest_of, 4) == largest).all()
    assert whole.min() >= -largest and whole.max() <= largest
    assert (np.abs(whole * scale - array) <= scale / 2 * (1 + 1e-5)).all()


@INPUTS
@pytest.mark.parametrize("largest", [INT8, SATURATING])
def test_the_bias_takes_what_rounding_moves_on_average(rows: np.ndarray, largest: int) -> None:
    weights = weight()
    prepared = integers.prepare(sample_of(rows), weights, largest=largest)
    whole, scale = integers.round_weight(integers.folded(prepared, weights), largest)
    moved = integers.rounded_input(prepared, rows).astype(np.float64) @ (whole * scale)
    moved += prepared.shift @ weights
    exact = rows.astype(np.float64) @ weights
    correction = integers.moved_mean(prepared, rows, weights, largest)
    assert correction.shape == (OUTPUTS,) and correction.dtype == np.float32
    left = (moved - correction - exact).mean(0)
    assert (np.abs(left) <= 1e-2 * np.abs(moved - exact).mean(0) + 1e-6 * np.abs(exact).max()).all()


def test_the_error_told_is_the_error_made() -> None:
    rows, weights = with_outliers(), weight()
    sample = sample_of(rows)
    prepared = integers.prepare(sample, weights, outliers=1)
    whole, scale = integers.round_weight(integers.folded(prepared, weights))
    apart = list(prepared.outliers)
    made = integers.rounded_input(prepared, sample.rows) @ (whole * scale) + sample.rows[:, apart] @ weights[apart]
    exact = sample.rows @ weights
    moved = made - exact
    energy = np.square(moved - moved.mean(0)).sum() / np.square(exact - exact.mean(0)).sum()
    assert prepared.error == pytest.approx(energy, rel=0.02)
