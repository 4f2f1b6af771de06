"""The simulated queue against closed forms, against Triton's rules worked out by hand, and what is derived from it."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from nlpconvert.bench import queueing
from nlpconvert.bench.queueing import Policy, Surface
from nlpconvert.errors import UsageError

ONE = Surface((1,), (10,), ((0.01,),))
# A pass of n rows of 10 tokens takes 10 ms and 1 ms more for each row; twice as many tokens, twice the rows' part.
ROWS = Surface((1, 2, 4, 8), (10, 20), tuple((0.01 + 0.001 * n, 0.01 + 0.002 * n) for n in (1, 2, 4, 8)))


# -- closed forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_the_mean_wait_is_that_of_a_queue_with_constant_service(load: float) -> None:
    """M/D/1 (Pollaczek and Khinchine): the mean wait is rho * s / (2 * (1 - rho))."""
    rng = np.random.default_rng(1)
    arrivals = queueing.poisson(load / 0.01, 200_000, rng)
    served = queueing.simulate(arrivals, np.full(200_000, 10), ONE, Policy(1))
    expected = load * 0.01 / (2 * (1 - load))
    assert served.latencies[5_000:].mean() - 0.01 == pytest.approx(expected, rel=0.05)
    assert served.busy == pytest.approx(load, rel=0.01)


def test_the_share_that_waits_no_longer_than_a_time_is_erlangs() -> None:
    """M/D/1: P(W <= t) = (1 - rho) * sum over j <= t/s of (rate * (j s - t))^j / j! * exp(-rate * (j s - t))."""
    load, service = 0.7, 0.01
    rate = load / service
    rng = np.random.default_rng(2)
    served = queueing.simulate(queueing.poisson(rate, 300_000, rng), np.full(300_000, 10), ONE, Policy(1))
    waits = served.latencies[5_000:] - service
    for within in (0.0, 0.005, 0.013, 0.031, 0.052):
        terms = [
            (rate * (j * service - within)) ** j / math.factorial(j) * math.exp(-rate * (j * service - within))
            for j in range(int(within / service) + 1)
        ]
        assert float((waits <= within + 1e-9).mean()) == pytest.approx((1 - load) * sum(terms), abs=0.01)


def test_two_instances_wait_less_than_one_at_the_same_load() -> None:
    """M/D/2 at a load of 0.8: its mean wait is about half of M/D/1's (Cosmetatos' approximation, to 2 %)."""
    rng = np.random.default_rng(3)
    load, service = 0.8, 0.01
    rate = 2 * load / service
    served = queueing.simulate(queueing.poisson(rate, 300_000, rng), np.full(300_000, 10), ONE, Policy(1, instances=2))
    # M/M/2's wait by Erlang C, and Cosmetatos' correction for constant service.
    offered = 2 * load
    waits = offered**2 / 2 / (1 - load) / (1 + offered + offered**2 / 2 / (1 - load))
    exponential = waits * service / (2 * (1 - load))
    expected = exponential / 2 * (1 + (1 - load) * (2 - 1) * (math.sqrt(4 + 5 * 2) - 2) / (16 * load * 2))
    assert served.latencies[5_000:].mean() - service == pytest.approx(expected, rel=0.04)


# -- Triton's rules, by hand -------------------------------------------------------------------------------------------


def _latencies(
    arrivals: list[float], policy: Policy, lengths: list[int] | None = None
) -> tuple[list[float], list[int]]:
    served = queueing.simulate(np.array(arrivals), np.array(lengths or [10] * len(arrivals)), ROWS, policy)
    return [round(each, 6) for each in served.latencies.tolist()], served.batches.tolist()


def test_without_a_delay_a_free_instance_takes_what_is_there() -> None:
    found, batches = _latencies([0.0, 0.001, 0.002, 0.003], Policy(8))
    assert batches == [1, 3]  # the three that came meanwhile go together
    assert found == [0.011, 0.023, 0.022, 0.021]


def test_a_delay_waits_for_companions_and_no_longer() -> None:
    found, batches = _latencies([0.0, 0.001, 0.009], Policy(8, delay=0.005))
    assert batches == [2, 1]
    assert found == [0.017, 0.016, 0.019]  # 5 ms of waiting, 12 ms of work; the third starts when that is done


def test_a_full_batch_leaves_before_the_delay_is_over() -> None:
    found, batches = _latencies([0.0, 0.001], Policy(2, delay=0.1))
    assert (batches, found) == ([2], [0.013, 0.012])


def test_a_preferred_size_leaves_at_once_and_alone() -> None:
    found, batches = _latencies([0.0, 0.001, 0.002], Policy(8, delay=0.004, preferred=(2, 8)))
    assert batches == [2, 1]
    assert found[:2] == [0.013, 0.012]
    # The third waits for the instance; by then its own delay is over.
    assert found[2] == pytest.approx(0.022)


def test_past_the_delay_everything_goes_whatever_is_preferred() -> None:
    arrivals = [0.0, 0.001, 0.0012, 0.0014]
    _, batches = _latencies(arrivals, Policy(8, delay=0.0001, preferred=(2, 8)))
    assert batches == [1, 3]


def test_a_batch_costs_what_its_longest_text_costs() -> None:
    found, batches = _latencies([0.0, 0.0], Policy(8), [10, 20])
    assert batches == [2]
    assert found == [0.014, 0.014]


def test_where_only_equal_lengths_batch_another_length_closes_the_batch() -> None:
    found, batches = _latencies([0.0, 0.0, 0.0], Policy(8, delay=0.05, equal=True), [10, 10, 20])
    assert batches == [2, 1]
    assert found[0] == 0.012  # it waits for nobody: what stands behind it cannot join


def test_requests_are_answered_once_and_in_order() -> None:
    rng = np.random.default_rng(4)
    arrivals = queueing.poisson(300, 2000, rng)
    policy = Policy(8, delay=0.003, preferred=(4, 8), instances=2)
    served = queueing.simulate(arrivals, rng.integers(1, 21, 2000), ROWS, policy)
    assert int(served.batches.sum()) == 2000
    assert served.batches.max() <= 8
    assert served.latencies.min() >= 0.011 - 1e-9
    assert 0 < served.waste < 1


# -- the surface -------------------------------------------------------------------------------------------------------


def test_a_surface_is_linear_between_its_points_and_goes_on_past_the_longest() -> None:
    assert ROWS.at(1, 10) == pytest.approx(0.011)
    assert ROWS.at(3, 15) == pytest.approx(0.01 + 0.0015 * 3)
    assert ROWS.at(2, 5) == pytest.approx(0.012)  # shorter than measured: as dear as the shortest
    assert ROWS.at(2, 40) == pytest.approx(0.01 + 0.004 * 2)
    table = ROWS.table(25)
    assert table[3][15] == pytest.approx(ROWS.at(3, 15))


def test_no_batch_above_what_was_measured() -> None:
    with pytest.raises(UsageError, match="no batch above 8 was measured"):
        queueing.simulate(np.zeros(1), np.ones(1, np.int64), ROWS, Policy(16))


# -- what is derived ---------------------------------------------------------------------------------------------------


def test_a_goal_that_needs_batches_gets_them() -> None:
    """One at a time 91 requests a second are the most; 200 can only be had in batches."""
    derived = queueing.derive({1: ROWS}, 200, [10], 0.08)
    assert derived.met
    assert derived.best.policy.max_batch == 8
    assert derived.best.p99 + derived.best.p99_error <= 0.08
    assert derived.best.rate == pytest.approx(200, rel=0.05)
    assert derived.most > 200
    p99s = [each.p99 for each in derived.frontier]
    assert p99s == sorted(p99s)
    assert all(later.busy < earlier.busy for earlier, later in pairwise(derived.frontier))


def test_a_goal_below_one_pass_cannot_be_met_and_the_best_is_told() -> None:
    derived = queueing.derive({1: ROWS}, 20, [10], 0.005)
    assert not derived.met
    assert derived.most == 0
    assert derived.best.p99 > 0.01


def test_a_rate_above_what_full_batches_give_is_saturated() -> None:
    derived = queueing.derive({1: ROWS}, 5000, [10], 0.1)
    assert not derived.met
    assert derived.best.saturated
    assert derived.best.capacity == pytest.approx(8 / 0.018, rel=0.01)


def test_the_same_question_has_the_same_answer() -> None:
    surface = Surface((1, 4), (10,), ((0.01,), (0.016,)), spread=(0.9, 1.0, 1.3))
    first, second = (queueing.derive({1: surface}, 120, [10, 8], 0.1).to_dict() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("rate", "goal"), [(0, 0.1), (-1, 0.1), (float("inf"), 0.1), (10, 0)])
def test_a_rate_or_goal_that_makes_no_sense_is_refused(rate: float, goal: float) -> None:
    with pytest.raises(UsageError):
        queueing.derive({1: ROWS}, rate, [10], goal)
