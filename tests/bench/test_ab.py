"""Numbers of `bench/ab.py`: medians of ratios, and intervals that hold the true one with 95%."""

from __future__ import annotations

import random

import pytest

from bench.ab import AGAIN, OTHER, THIS, Run, ratio, summary, table


def test_few_values_give_the_smallest_and_the_largest() -> None:
    found = ratio([1.1, 0.9, 1.0])
    assert (found.median, found.low, found.high) == (1.0, 0.9, 1.1)


@pytest.mark.parametrize(("number", "outside"), [(6, 0), (9, 1), (20, 5), (30, 9)])
def test_intervals_are_those_of_order_statistics(number: int, outside: int) -> None:
    """As in tables of the sign test."""
    found = ratio([float(value) for value in random.Random(0).sample(range(number), number)])
    assert (found.low, found.high) == (outside, number - 1 - outside)


def test_a_pair_is_compared_with_itself_alone() -> None:
    """What slows the machine down for a pair slows both of its runs."""
    runs = {
        THIS: [Run(1.0, 200.0), Run(10.0, 200.0), Run(2.0, 200.0)],
        OTHER: [Run(2.0, 100.0), Run(20.0, 100.0), Run(4.0, 100.0)],
        AGAIN: [Run(1.0, 200.0), Run(10.0, 200.0), Run(2.0, 200.0)],
    }
    found = summary(runs)
    assert found["ratios"][OTHER]["seconds"] == {"median": 0.5, "low": 0.5, "high": 0.5}
    assert found["ratios"][OTHER]["memory"]["median"] == 2.0 and found["ratios"][AGAIN]["seconds"]["median"] == 1.0
    assert table({"dp=2": found}, again=True).row_count == 1
