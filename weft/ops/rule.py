"""Rule: how an operator may be cut.

    text  := operand ("," operand)* "->" output ("," output)*
    operand := ["&"] dim*                "&": added to the result (a bias), not a factor
    dim   := name ["+" | "^" | "!"] | "_" | "1" | number | "(" factor* ")" | (name | "_") "*"
    name+ : summed away; cutting it leaves addends.     name^ : nobody may cut it.
    name! : may be cut by the rule's algorithm only, which talks along the axis.
    name* : any number of dims (the same on every operand that has it; broadcast from the right).
    _     : a dim of any size that nobody may cut; it may have another size on every operand.
    (a b) : one dim that holds b inside a, as after a reshape.

`b* k+, n k+, &n -> b* n` is a linear layer. A Rule belongs to one op: names carry their sizes there, and dims of
size 1 that broadcast are written `1`. `local` turns the op into the call that one cell makes (a view needs the
cell's shape, a mean the whole count, a slice its own bounds).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from weft.ir.graph import Op, Tensor
from weft.ir.ranges import Ranges, count, product, shift, tidy, whole
from weft.runtime.operators.algorithms import Exchange

Factor = str | int
"""A name, or an anonymous size that nobody may cut."""

Product = tuple[Factor, ...]
"""Factors from outer to inner."""


@dataclass(frozen=True)
class Dim:
    """One dim of an operand: products laid end to end (nearly always one product of one name).

    `[(3 n)]` is three groups of n; `[(n 4) | (n 1) | (n 1)]` a fused grouped-query projection cut by groups.
    """

    products: tuple[Product, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(f for product_ in self.products for f in product_ if isinstance(f, str))

    def extent(self, sizes: Mapping[str, int]) -> int:
        """How many indices it has, given the size of each name."""
        return sum(math.prod(sizes[f] if isinstance(f, str) else f for f in factors) for factors in self.products)

    def __str__(self) -> str:
        texts = []
        for factors in self.products:
            inner = " ".join(map(str, factors)) or "1"
            texts.append(inner if len(factors) <= 1 else f"({inner})")
        return texts[0] if len(texts) == 1 else f"[{' | '.join(texts)}]"


def dim(*factors: Factor) -> Dim:
    """A dim of one product: `dim("h", "d")` is `(h d)`, `dim("n")` is `n`, `dim()` has size 1."""
    return Dim((tuple(factors),))


def fixed(size: int) -> Dim:
    """A dim that nobody may cut."""
    return dim() if size == 1 else dim(size)


Dims = tuple[Dim, ...]


def names_of(dims: Iterable[Dim]) -> tuple[str, ...]:
    """The names of some dims, in order."""
    return tuple(f for one in dims for factors in one.products for f in factors if isinstance(f, str))


@dataclass(frozen=True)
class Group:
    """Stands in a local call's arguments for the communicator along the axes that cut `name`."""

    name: str


@dataclass(frozen=True)
class Call:
    """What one cell runs: `target` is an ATen overload, `weft.FUNCTION` of the runtime, or `user:MODULE:NAME` with the
    `function` itself.

    Arguments hold `Ref(str(i))` for the i-th tensor operand of the op, and `Group`s.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    function: Callable[..., Any] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CellView:
    """What a rule's `local` may know about the cell: ranges of each name, of each operand, of each output."""

    names: Mapping[str, Ranges]
    inputs: tuple[tuple[Ranges, ...], ...]
    outputs: tuple[tuple[Ranges, ...], ...]
    cut: frozenset[str]
    """The names that some axis of the op cuts (into more than one part)."""

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        return tuple(count(ranges) for ranges in self.outputs[index])

    def input_shape(self, index: int = 0) -> tuple[int, ...]:
        return tuple(count(ranges) for ranges in self.inputs[index])


Local = Callable[[Op, CellView], Call]


@dataclass(frozen=True)
class Rule:
    """How one op may be cut.

    Args:
        inputs: dims of each tensor operand, in the order of `op.inputs`.
        outputs: dims of each output.
        sizes: size of every name.
        summed: names whose cut leaves addends.
        frozen: names nobody may cut.
        algorithms: names that an algorithm may cut, and what it exchanges.
        added: operands added to the result: along a summed cut, or where an addend is carried, their value goes
            into one cell and zeros into the others.
        linear: sets of operands in which the op is jointly linear, all others fixed. Every set holds the added ones.
        local: the call of one cell; None: the op's own call as it stands.
        source: table, view, algorithm, discovered, user.
        reason: why nothing may be cut, where that was found out.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    summed: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    algorithms: Mapping[str, Exchange] = field(default_factory=dict)
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    local: Local | None = None
    source: str = "table"
    reason: str = ""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names, in order of appearance."""
        return tuple(dict.fromkeys(name for dims in (*self.inputs, *self.outputs) for name in names_of(dims)))

    @cached_property
    def made(self) -> frozenset[str]:
        """The names that outputs have."""
        return frozenset(name for dims in self.outputs for name in names_of(dims))

    @cached_property
    def cuttable(self) -> tuple[str, ...]:
        """The names that may be cut."""
        return tuple(name for name in self.names if name not in self.frozen)

    def __str__(self) -> str:
        def show(dims: Dims, added: bool) -> str:
            words = []
            for one in dims:
                word = str(one)
                if len(one.names) == 1:
                    (name,) = one.names
                    word += "+" * (name in self.summed) + "^" * (name in self.frozen) + "!" * (name in self.algorithms)
                words.append(word)
            return ("&" if added else "") + " ".join(words)

        left = ", ".join(show(dims, i in self.added) for i, dims in enumerate(self.inputs))
        right = ", ".join(show(dims, False) for dims in self.outputs)
        return f"{left} -> {right}"


def dim_ranges(one: Dim, names: Mapping[str, Ranges], sizes: Mapping[str, int]) -> Ranges:
    """The indices of a dim, given the indices of each name in it.

    >>> dim_ranges(dim(3, "n"), {"n": ((0, 2),)}, {"n": 4})
    ((0, 2), (4, 6), (8, 10))
    """
    found: list[tuple[int, int]] = []
    offset = 0
    for factors in one.products:
        ranges: Ranges = ((0, 1),)
        extent = 1
        for factor in factors:
            size = sizes[factor] if isinstance(factor, str) else factor
            inner = names.get(factor, whole(size)) if isinstance(factor, str) else whole(size)
            ranges = product(ranges, size, inner)
            extent *= size
        found.extend(shift(ranges, offset))
        offset += extent
    # neighbours of different products may touch
    return tidy(found)


Linear = Iterable[Iterable[int]]
"""Sets of operands, by position."""


def linear_sets(sets: Linear, reads: Sequence[Tensor], makes: Sequence[Tensor]) -> tuple[frozenset[int], ...]:
    """The sets whose operands, and the outputs, can hold addends: whole numbers and truth values are never cut so."""
    if not all(map(floating, makes)):
        return ()
    found = (frozenset(one) for one in sets)
    return tuple(dict.fromkeys(one for one in found if one and all(floating(reads[i]) for i in one)))


def floating(tensor: Tensor | torch.Tensor) -> bool:
    """True for a tensor of real or complex floats."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
