"""Small pieces of which the computed rules are made: dims with names, and a Rule that is checked on the spot.

In: dims and tensors. Out: a Rule whose every dim has exactly the size of the tensor's, whose names all have a
size, and whose linear sets only hold floating-point operands. A mistake in a computed rule fails here, not in a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict, Unpack

from weft.ir.graph import Tensor
from weft.ops.rule import Dim, Dims, Factor, Local, Rule, dim

Linear = Iterable[Iterable[int]]


def named(name: str, size: int) -> Dim:
    """A dim of that name; one that holds a single index, or none, has no name, for it cannot be cut."""
    return dim(name) if size > 1 else fixed(size)


def fixed(size: int) -> Dim:
    """A dim that nobody may cut."""
    return dim() if size == 1 else dim(size)


def numbered_dims(sizes: Sequence[int], prefix: str = "d") -> Dims:
    """`d0 d1 ...`, without names for dims of size 1."""
    return tuple(named(f"{prefix}{i}", size) for i, size in enumerate(sizes))


def aligned(dims: Dims, shape: Sequence[int], sizes: Sequence[int]) -> Dims | None:
    """Dims of an operand of `sizes` that broadcasts to `shape`; None if it does not."""
    missing = len(shape) - len(sizes)
    if missing < 0:
        return None
    found = []
    for one, whole, size in zip(dims[missing:], shape[missing:], sizes, strict=True):
        if size not in (whole, 1):
            return None
        found.append(one if size == whole else dim())
    return tuple(found)


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The common shape of operands that broadcast, from the right.

    >>> broadcast([(4, 1), (3,)])
    (4, 3)
    """
    length = max(map(len, shapes), default=0)
    padded = [(1,) * (length - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def product_dim(*factors: Factor, sizes: Mapping[str, int]) -> Dim:
    """One dim of several factors, those of size 1 left out."""
    return dim(*(factor for factor in factors if (sizes[factor] if isinstance(factor, str) else factor) != 1))


def extent(one: Dim, sizes: Mapping[str, int]) -> int:
    """The size of a dim."""
    return sum(math.prod(sizes[f] if isinstance(f, str) else f for f in factors) for factors in one.products)


class Marks(TypedDict, total=False):
    """What else a rule says, as in `Rule`; `sizes` only for names that stand alone in no dim."""

    sizes: Mapping[str, int]
    summed: Iterable[str]
    frozen: Iterable[str]
    added: Iterable[int]
    linear: Linear
    local: Local | None
    source: str


def build(
    inputs: Sequence[Dims],
    outputs: Sequence[Dims],
    reads: Sequence[Tensor],
    makes: Sequence[Tensor],
    **marks: Unpack[Marks],
) -> Rule:
    """A checked Rule. Names that stand alone in a dim get their size from the tensor, others from `sizes`."""
    bound = dict(marks.get("sizes", {}))
    pairs = list(zip((*inputs, *outputs), (*reads, *makes), strict=True))
    for dims, tensor in pairs:
        assert len(dims) == len(tensor.sizes), f"{tensor} has dims {' '.join(map(str, dims))}"
        for one, size in zip(dims, tensor.sizes, strict=True):
            if len(one.products) == 1 and len(one.products[0]) == 1 and isinstance(one.products[0][0], str):
                bound.setdefault(one.products[0][0], size)
    for dims, tensor in pairs:
        assert tuple(extent(one, bound) for one in dims) == tensor.sizes, f"{tensor}: {' '.join(map(str, dims))}"
    present = {name for dims in (*inputs, *outputs) for one in dims for name in one.names}
    return Rule(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        sizes={name: size for name, size in bound.items() if name in present},
        summed=frozenset(marks.get("summed", ())) & present,
        frozen=frozenset(marks.get("frozen", ())) & present,
        added=frozenset(marks.get("added", ())),
        linear=linear_sets(marks.get("linear", ()), reads, makes),
        local=marks.get("local"),
        source=marks.get("source", "table"),
    )


def linear_sets(sets: Linear, reads: Sequence[Tensor], makes: Sequence[Tensor]) -> tuple[frozenset[int], ...]:
    """The sets whose operands, and the outputs, can hold addends: whole numbers and truth values are never cut so."""
    if not all(_floating(tensor) for tensor in makes):
        return ()
    found = (frozenset(one) for one in sets)
    return tuple(dict.fromkeys(one for one in found if one and all(_floating(reads[i]) for i in one)))


def _floating(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
