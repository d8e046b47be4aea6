"""Specimens: an op at sizes of our choice, with values of our choice.

In: an Op and the tensors it reads. Out: Forms of it (the same call at other sizes, small enough to be run often) and
Specimens (a Form with values, run whole). Sizes that are equal stay equal and whole-number ratios between them stay;
a size is only changed if the operator takes the change, first alone, then together with the whole numbers among the
arguments that are equal to it. Indices are drawn below every size they could be meant for. Promised: the same values
in every run.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.ir.graph import Op, Size, Tensor
from weft.ops.precision import LowerMode, widen_dtype
from weft.ops.rule import floating
from weft.ops.trial import FAILURES, Specimen, Values, gradients_of, leaves_of, precision, run

SMALL, LARGE, LARGER = 1 << 12, 1 << 18, 1 << 20
"""Numbers in all operands and outputs together: of a form that is run often, and of those that are run now and then."""
QUICK = 0.1
"""Seconds, forward and backward, that a form of the larger kind may take."""

FRIENDLY = (12, 8, 6, 10, 16, 24, 36, 48, 96, 192)
"""Sizes to shrink to, best first: they divide evenly into two and three parts."""

Path = tuple[int, ...]
"""Where a whole number stands in an op's arguments: positions in (args, values of kwargs), nested."""

Where = tuple[int, int]
"""An operand and one of its dims."""


@dataclass(frozen=True)
class Form:
    """One call at certain sizes: whole numbers stand in the op's arguments, sizes in the tensors it reads.

    `recipe`: the first of the `RECIPES` whose values the op takes. `lower`: it computes in a lower float dtype than
    float64, forward or backward, unless it is kept from it.
    """

    op: Op
    reads: tuple[Tensor, ...]
    recipe: int = 0
    lower: bool = True

    @property
    def size(self) -> int:
        return sum(math.prod(one.sizes) for one in self.reads)

    def resized(self, sizes: Mapping[Where, int], numbers: Mapping[Path, int] | None = None) -> Form:
        """The same call at other sizes."""
        reads = tuple(
            replace(one, shape=tuple(sizes.get((i, d), size) for d, size in enumerate(one.sizes)))
            for i, one in enumerate(self.reads)
        )
        return replace(self, op=with_numbers(self.op, numbers or {}), reads=reads)

    def dims(self) -> Iterator[tuple[Where, int]]:
        """All dims of all operands, with their sizes."""
        for i, one in enumerate(self.reads):
            yield from (((i, d), size) for d, size in enumerate(one.sizes))


def form_of(op: Op, reads: Sequence[Tensor]) -> Form:
    """The form of an op as it stands, free sizes at their example's value, floats as float64."""
    wide = tuple(
        replace(one, shape=one.sizes, dtype=widen_dtype(one.dtype), needs_grad=one.needs_grad and op.grad)
        for one in reads
    )
    args = _without_sizes(op.args)
    return Form(replace(op, args=args, kwargs=tuple((k, _without_sizes(v)) for k, v in op.kwargs)), wide)


def _without_sizes(arg: Any) -> Any:
    if isinstance(arg, Size):
        return arg.hint
    return tuple(map(_without_sizes, arg)) if isinstance(arg, tuple | list) else arg


def numbers_in(op: Op) -> dict[Path, int]:
    """The whole numbers among an op's arguments."""

    def walk(arg: Any, path: Path) -> Iterator[tuple[Path, int]]:
        if isinstance(arg, tuple | list):
            for i, item in enumerate(arg):
                yield from walk(item, (*path, i))
        elif isinstance(arg, int) and not isinstance(arg, bool):
            yield path, arg

    return dict(walk((op.args, tuple(value for _, value in op.kwargs)), ()))


def with_numbers(op: Op, numbers: Mapping[Path, int]) -> Op:
    """The op with some whole numbers among its arguments replaced."""
    if not numbers:
        return op
    args, values = replaced((op.args, tuple(value for _, value in op.kwargs)), numbers)
    return replace(op, args=args, kwargs=tuple(zip((name for name, _ in op.kwargs), values, strict=True)))


def replaced(tree: Any, numbers: Mapping[Path, int], path: Path = ()) -> Any:
    """An argument tree with the numbers at some places replaced."""
    if path in numbers:
        return numbers[path]
    if isinstance(tree, tuple | list):
        return tuple(replaced(item, numbers, (*path, i)) for i, item in enumerate(tree))
    return tree


# Sizes.


def shapes_of(form: Form) -> tuple[tuple[int, ...], ...] | None:
    """Shapes of what the op makes, found by running it; None if it does not take the form."""
    try:
        with torch.no_grad():
            made = run(form.op, draw(form, RECIPES[form.recipe], 0))
    except FAILURES:
        return None
    return tuple(tuple(one.shape) for one in made)


def _fake_size(form: Form) -> int | None:
    """How many numbers the form takes and makes, without running it; None if the op does not take the form."""
    try:
        with torch.no_grad(), _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
            made = run(form.op, [torch.empty(one.sizes, dtype=one.dtype) for one in form.reads])
            return form.size + sum(math.prod(one.shape) for one in made)
    except FAILURES:
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """While this is entered, torch does not log that an operator does not take a form: that is the question."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def shrunk(form: Form, limit: int) -> Form:
    """The form with sizes reduced until all tensors together hold no more than `limit` numbers, as far as it goes."""
    size = _fake_size(form)
    total = form.size if size is None else size
    while total > limit:
        for candidate in _smaller(form):
            size = _fake_size(candidate)
            if size is not None and size < total:
                form, total = candidate, size
                break
        else:
            break
    return form


def as_large_as_cheap(form: Form) -> Form:
    """The form itself if it can be run in a moment, or one close to it: what an op does may depend on its sizes."""
    large = shrunk(form, LARGER)
    if large.size <= LARGE:
        return large
    begun = time.perf_counter()
    try:
        specimen(replace(large, lower=False), RECIPES[0])
    except FAILURES:
        return shrunk(large, LARGE)
    return large if time.perf_counter() - begun < QUICK else shrunk(large, LARGE)


def _smaller(form: Form) -> Iterator[Form]:
    """The form with one size reduced, or with all sizes that are multiples of it, the largest first."""
    sizes = sorted({size for _, size in form.dims()}, reverse=True)
    numbers = numbers_in(form.op)
    for size in (one for one in sizes if one > 3):
        steps = [one for one in FRIENDLY if one < size and (one not in sizes or size % one)]
        steps += [k * m for k in sorted(set(numbers.values())) if k > 1 for m in (2, 3) if k * m < size]
        for new in (*steps, *(size // p for p in (2, 3, 5) if size % p == 0)):
            alone = {where: new for where, one in form.dims() if one == size}
            scaled = {where: one // size * new for where, one in form.dims() if one % size == 0}
            for changes, ratio in ((alone, False), (scaled, True)):
                yield form.resized(changes)
                tied = {
                    path: value // size * new
                    for path, value in numbers.items()
                    if value == size or (ratio and value > size and value % size == 0)
                }
                if tied:
                    yield form.resized(changes, tied)


# Values.


Recipe = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _repeated(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=generator).to(torch.float64)


def _huge(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return _normal(shape, generator) * 1e6


def _unit(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.9 + 0.05


def _positive(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 50 + 1.5


def _with_one(odd: float, scale: float = 1.0) -> Recipe:
    """Ordinary numbers, times a scale, and one that is odd: an op that looks for it finds it in one part only."""

    def recipe(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        made = _normal(shape, generator) * scale
        if made.numel() > 1:
            made.view(-1)[int(torch.randint(made.numel(), (), generator=generator))] = odd
        return made

    return recipe


EXTREME: tuple[Recipe, ...] = (_huge, *map(_with_one, (-1e7, 1e7, float("inf"), float("nan"))))
"""Numbers far from one, and ordinary ones with a single one that is not: rounding is magnified, and allowed for."""

RECIPES: tuple[Recipe, ...] = (_normal, _repeated, _unit, _positive, _with_one(0.0), *EXTREME)
"""Ordinary numbers; zeros, signs and many that are equal; between nought and one; above one; one zero; extremes."""

GRADIENTS: tuple[Recipe, ...] = (
    *(_with_one(odd) for odd in (0.0, float("inf"), float("nan"))),
    *(_with_one(sign, 0.0) for sign in (1.0, -1.0)),
    *(_with_one(sign * 1e8 * scale, scale) for scale in (1e-8, 1e-4, 1.0) for sign in (1.0, -1.0)),
)
"""Gradients with one number that is not as the others: whatever limit backward compares a norm, a sum or an element
with, from 1e-8 to 1e8, for some of these the whole gradient lies above it and a part of it below."""


def draw(form: Form, recipe: Recipe, seed: int) -> Values:
    """Values for the operands of a form."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(_value(form, i, recipe, generator) for i in range(len(form.reads)))


def _value(form: Form, position: int, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    tensor = form.reads[position]
    if tensor.dtype.is_complex:
        return torch.complex(recipe(tensor.sizes, generator), recipe(tensor.sizes, generator))
    if tensor.dtype.is_floating_point:
        return recipe(tensor.sizes, generator).to(tensor.dtype)
    if tensor.dtype == torch.bool:
        return torch.rand(tensor.sizes, generator=generator) > (0.5 if recipe is not _repeated else 0.85)
    high = index_limit(form, position)
    low = high - 1 if recipe is _repeated else high
    return torch.randint(0, max(low, 1), tensor.sizes, generator=generator).to(tensor.dtype)


def index_limit(form: Form, position: int) -> int:
    """Whatever the whole numbers of an operand point into, they point inside it if they are below this."""
    others = [size for (i, _), size in form.dims() if i != position]
    found = [size for size in (*others, *numbers_in(form.op).values()) if size > 1]
    return min([*found, 100])


def specimen(form: Form, recipe: Recipe, seed: int = 0, gradient: Recipe = _normal) -> Specimen:
    """The form with values, run whole, and told a gradient. Raises what the operator raises."""
    values = draw(form, recipe, seed)
    made, told, gradients = _whole(form, values, seed, gradient)
    makes = tuple(Tensor(f"made{i}", tuple(one.shape), one.dtype, one.requires_grad) for i, one in enumerate(made))
    results = tuple(one.detach() for one in made)
    noise: tuple[float, ...] = ()
    if recipe in EXTREME or gradient in GRADIENTS:
        moved = tuple(one * (1 + 1e-15 * torch.randn_like(one)) if floating(one) else one for one in values)
        others, _, slopes = _whole(form, moved, seed, gradient)
        pairs = zip((*results, *gradients), (*others, *slopes), strict=True)
        noise = tuple(0.0 if a is None or b is None else _gap(a, b.detach()) for a, b in pairs)
    return Specimen(form.op, form.reads, makes, values, results, told, gradients, form.lower, noise)


def _whole(
    form: Form, values: Values, seed: int, gradient: Recipe
) -> tuple[Values, Values, tuple[torch.Tensor | None, ...]]:
    """What the op makes of values, gradients of that, and the gradients of its operands."""
    leaves = leaves_of(values, form.reads)
    generator = torch.Generator().manual_seed(seed + 1)
    with precision(form.lower):
        results = run(form.op, leaves)
        told = tuple(_cotangent(one, gradient, generator) for one in results)
        return results, told, gradients_of(results, told, leaves)


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far two runs lie apart where both are finite."""
    if not floating(a) or a.shape != b.shape or not a.numel():
        return 0.0
    return float((a - b).abs().nan_to_num(nan=0.0, posinf=0.0).max())


def _cotangent(result: torch.Tensor, gradient: Recipe, generator: torch.Generator) -> torch.Tensor:
    return gradient(tuple(result.shape), generator).to(result.dtype) if floating(result) else result.detach()


def with_recipe(form: Form) -> Form:
    """The form with the first kind of values that the op takes, and whether it computes in a lower dtype then.

    Raises what the op raises if it takes none.
    """
    failure: BaseException | None = None
    for number, recipe in enumerate(RECIPES):
        try:
            specimen(form, recipe)
        except FAILURES as error:
            failure = failure or error
            continue
        with LowerMode() as mode:
            specimen(replace(form, lower=False), recipe)
        return replace(form, recipe=number, lower=mode.met)
    assert failure is not None
    raise failure


def specimens(form: Form, recipes: Iterable[Recipe], seed: int, *, gradients: bool = False) -> Iterator[Specimen]:
    """The form with every kind of values, of those given, that the op takes and makes numbers of; with every kind of
    gradients too, if it has any that are asked for."""
    pairs: list[tuple[Recipe, Recipe]] = [(recipe, _normal) for recipe in recipes]
    if gradients and any(one.needs_grad for one in form.reads):
        pairs += [(RECIPES[form.recipe], gradient) for gradient in GRADIENTS]
    for recipe, gradient in pairs:
        try:
            it = specimen(form, recipe, seed, gradient)
        except FAILURES:
            continue
        if all(not floating(one) or not one.numel() or bool(one.isfinite().any()) for one in it.results):
            yield it


def impurity(form: Form) -> str:
    """Why the op is no function of its operands' values; empty if it is one."""
    given = draw(form, RECIPES[form.recipe], 1)
    made: list[Values] = []
    with torch.no_grad():
        for seed in (0, 1, 1):
            torch.manual_seed(seed)
            values = [one.clone() for one in given]
            made.append(tuple(one.clone() for one in run(form.op, values)))
            if not _equal(values, given):
                return "it changes its operands"
    for a, b in itertools.pairwise(made):
        if not _equal(a, b):
            return "it gives other results each time it is run with the same operands"
    return ""


def ignored(form: Form) -> frozenset[int]:
    """The operands whose values do not matter to the op."""
    found = set(range(len(form.reads)))
    with torch.no_grad():
        for recipe, seed in ((_normal, 1), (_repeated, 1), (_unit, 1)):
            try:
                given, others = draw(form, recipe, seed), draw(form, recipe, seed + 1)
                made = run(form.op, given)
                for i in tuple(found):
                    changed = run(form.op, [others[j] if j == i else one for j, one in enumerate(given)])
                    if not _equal(made, changed):
                        found.discard(i)
            except FAILURES:
                continue
    return frozenset(found)


def _equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """True if two lists hold the same values, nonsense included."""
    return len(a) == len(b) and all(
        one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
        for one, other in zip(a, b, strict=True)
    )
