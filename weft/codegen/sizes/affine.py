"""Expressions over free sizes, found from samples.

    Expression := (coefficient * product of names + ... + constant) // divisor

In: what a number is at several sizes. Out: the simplest Expression that gives all of them, or None. Forms are tried
from simple to general: a constant, a multiple of one product, the same with a constant or with one of its sizes, a sum
over all sizes; each leaves samples over that confirm it. A divisor must divide what the samples have in common: all
are congruent to the example modulo the number of parts that the plan makes of a size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

DEGREE = 3
"""Products of up to so many sizes are tried."""

Names = tuple[str, ...]
Sample = Mapping[str, int]


@dataclass(frozen=True)
class Expression:
    """`terms`: coefficients and products of names; no names: the constant."""

    terms: tuple[tuple[int, Names], ...]
    divisor: int = 1

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for _, product in self.terms for name in product)

    def numerator(self, sizes: Sample) -> int:
        """The sum before the division."""
        return sum(times * math.prod(sizes[name] for name in product) for times, product in self.terms)

    def text(self, even: Mapping[str, int]) -> str:
        """In Python. `even`: what divides each size for certain.

        >>> Expression(((1, ("batch", "length")),), 2).text({"batch": 2})
        'batch // 2 * length'
        """
        shown = self._sum()
        if self.divisor == 1:
            return shown
        if len(self.terms) == 1 and self.terms[0][0] == 1:
            _, product = self.terms[0]
            first = next((name for name in product if even.get(name, 1) % self.divisor == 0), None)
            if first is not None:
                rest = list(product)
                rest.remove(first)
                return " * ".join([f"{first} // {self.divisor}", *rest])
        return f"{shown} // {self.divisor}" if len(self.terms) == 1 else f"({shown}) // {self.divisor}"

    def _sum(self) -> str:
        out = ""
        for times, product in self.terms:
            size = abs(times)
            words = " * ".join([*([str(size)] if size != 1 or not product else []), *product])
            sign = ("-" if times < 0 else "") if not out else (" - " if times < 0 else " + ")
            out += sign + words
        return out


def fit(values: Sequence[int], samples: Sequence[Sample], common: int) -> Expression | None:
    """The simplest expression with these values at these samples.

    Args:
        common: what a divisor must divide.
    """
    names = tuple(samples[0])
    for products in _forms(names):
        found = _solve(values, samples, products)
        if found is None or len(products) >= len(values):
            continue
        divisor = math.lcm(*(one.denominator for one in found))
        if common % divisor:
            continue
        terms = tuple((int(one * divisor), product) for one, product in zip(found, products, strict=True) if one)
        return Expression(terms or ((0, ()),), divisor)
    return None


def _forms(names: Names) -> Iterator[tuple[Names, ...]]:
    products = [
        product for degree in range(1, DEGREE + 1) for product in itertools.combinations_with_replacement(names, degree)
    ]
    yield ((),)
    yield from ((product,) for product in products)
    yield from ((product, ()) for product in products)
    # a dim of two sizes laid flat, one of them cut unevenly: (batch + 1) // 2 * length
    yield from ((two, (one,)) for two in products if len(two) == 2 for one in dict.fromkeys(two))
    if len(names) > 1:
        yield (*((name,) for name in names), ())


def _solve(values: Sequence[int], samples: Sequence[Sample], products: tuple[Names, ...]) -> list[Fraction] | None:
    """Coefficients that give all of the values; None if there are none, or not only one choice of them."""
    rows = [
        [*(Fraction(math.prod(sample[name] for name in product)) for product in products), Fraction(value)]
        for sample, value in zip(samples, values, strict=True)
    ]
    count = len(products)
    for column in range(count):
        pivot = next((i for i in range(column, len(rows)) if rows[i][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [one / rows[column][column] for one in rows[column]]
        for i, row in enumerate(rows):
            if i != column and row[column]:
                rows[i] = [a - row[column] * b for a, b in zip(row, rows[column], strict=True)]
    if any(row[count] for row in rows[count:]):
        return None
    return [rows[i][count] for i in range(count)]


def fit_quotient(values: Sequence[float], samples: Sequence[Sample]) -> str | None:
    """A number with a point that is 1 over a product of sizes, times a whole number: `2 / (batch * length)`."""
    for form in _forms(tuple(samples[0])):
        if len(form) != 1 or not form[0]:
            continue
        below = [math.prod(sample[name] for name in form[0]) for sample in samples]
        above = round(values[0] * below[0])
        if above and all(above / under == value for under, value in zip(below, values, strict=True)):
            return f"{above} / ({' * '.join(form[0])})" if len(form[0]) > 1 else f"{above} / {form[0][0]}"
    return None
