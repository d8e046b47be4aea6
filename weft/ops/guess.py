"""Guesses: names that an unknown operator might be cut along, from what its output shapes do when sizes change.

In: a Form that the operator takes. A name is guessed by changing the size of one dim, with dims of other operands that
have the same size, and with whole numbers among the arguments that are equal to it, until the operator takes the
change: an output dim that grows in proportion holds the name, and if no output changes the name may be summed away. A
dim may hold a name beside something else: `(n u)`, blocks of u, or `(u n)`, u groups. Out: Guesses, the simplest
first, and Rules made of them. A Guess is a question only: `discover.py` answers it by running cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.ir.graph import Op
from weft.ir.ranges import count
from weft.ops.arguments import call_with
from weft.ops.build import refuse_empty
from weft.ops.rule import Call, CellView, Dim, Dims, Local, Rule, dim, fixed
from weft.ops.specimen import Form, Path, Where, numbers_in, shapes_of, with_numbers

MANY = 60
"""So many combinations of dims are tried for one dim."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Held:
    """Where a name stands: in one dim of an operand or output, alone (`unit` 1), as `(n u)` or, `inner`, as `(u n)`."""

    where: Where
    unit: int = 1
    inner: bool = False


@dataclass(frozen=True)
class Guess:
    """A name that might be cut.

    Args:
        size: of the name.
        outputs: where it stands in each output; nothing if it is summed away.
        ties: whole numbers among the arguments that grow with the name: where they stand, and how many times its size.
    """

    size: int
    inputs: tuple[Held, ...]
    outputs: tuple[Held, ...]
    ties: tuple[tuple[Path, int], ...] = ()

    @property
    def summed(self) -> bool:
        return not self.outputs

    def grown(self, form: Form, size: int) -> Form:
        """The form with the name at another size."""
        sizes = {one.where: size * one.unit for one in self.inputs}
        return form.resized(sizes, {path: size * factor for path, factor in self.ties})

    def size_in(self, form: Form, makes: Shapes) -> int | None:
        """The size of the name in another form of the op; None if that cannot be told."""
        numbers = numbers_in(form.op)
        for one in (*self.inputs, *self.outputs):
            if one.unit == 1:
                shape = form.reads[one.where[0]].sizes if one in self.inputs else makes[one.where[0]]
                return shape[one.where[1]]
        for path, factor in self.ties:
            if factor == 1 or not self.inputs:
                return numbers[path] // factor if numbers.get(path, 1) % factor == 0 else None
        if not self.inputs:
            return None
        first = self.inputs[0]
        size = form.reads[first.where[0]].sizes[first.where[1]]
        return size // first.unit if size % first.unit == 0 else None


def guesses_at(form: Form, makes: Shapes, where: Where | None, known: Sequence[Guess]) -> Iterator[Guess]:
    """Names that a dim of an operand may hold, given those found already; of no operand at all if `where` is None."""
    if where is None:
        for number in dict.fromkeys(one for one in numbers_in(form.op).values() if one > 1):
            yield from _grown(form, makes, number, (), must_tie=True)
        return
    for size, held in _room(form, where, known):
        for others in _partners(form, where, size, held, known):
            yield from _grown(form, makes, size, (held, *others))


def _room(form: Form, where: Where, known: Sequence[Guess]) -> Iterator[tuple[int, Held]]:
    """Names that still find room in a dim: their size, and how they stand there."""
    size = form.reads[where[0]].sizes[where[1]]
    taken = [(guess, held) for guess in known for held in guess.inputs if held.where == where]
    if len(taken) > 1 or size < 2 or any(held.unit == 1 for _, held in taken):
        return
    if taken:
        (guess, held) = taken[0]
        if held.unit > 1 and held.unit * guess.size == size:
            yield held.unit, Held(where, guess.size, not held.inner)
        return
    yield size, Held(where)
    numbers = {one for one in numbers_in(form.op).values() if 1 < one < size and size % one == 0}
    for unit in sorted({2, 3, *numbers, *(size // one for one in numbers)}):  # the longest names first
        if 1 < unit < size and size % unit == 0:
            yield size // unit, Held(where, unit, False)
            yield size // unit, Held(where, unit, True)


def _partners(form: Form, where: Where, size: int, held: Held, known: Sequence[Guess]) -> Iterator[tuple[Held, ...]]:
    """Dims of later operands that may hold the same name: none, all in line, then every combination."""
    loose = held.unit > 1 or size in numbers_in(form.op).values()
    taken = {one.where for guess in known for one in guess.inputs}
    choices: list[list[Held | None]] = []
    for i in range(where[0] + 1, len(form.reads)):
        own: list[Held | None] = [None]
        for d, found in enumerate(form.reads[i].sizes):
            if found == size and (i, d) not in taken:
                own.append(Held((i, d)))
            elif loose and found % size == 0 and found > size and (i, d) not in taken:
                own.append(Held((i, d), found // size, held.inner))
        choices.append(own)
    seen: set[tuple[Held, ...]] = set()
    num_dims = len(form.reads[where[0]].sizes)
    from_right = [len(one.sizes) for one in form.reads]

    def in_line(right: bool) -> tuple[Held, ...]:
        found = []
        for own in choices:
            for one in own:
                if one is not None:
                    i, d = one.where
                    if (d - from_right[i] == where[1] - num_dims) if right else d == where[1]:
                        found.append(one)
                        break
        return tuple(found)

    ordered = sorted(
        itertools.islice(itertools.product(*choices), 4 * MANY),
        key=lambda combination: sum(c is not None for c in combination),
    )
    combined = (tuple(one for one in combination if one is not None) for combination in ordered)
    for others in itertools.islice(itertools.chain([(), in_line(False), in_line(True)], combined), MANY):
        if others not in seen:
            seen.add(others)
            yield others


def _grown(form: Form, makes: Shapes, size: int, inputs: tuple[Held, ...], must_tie: bool = False) -> Iterator[Guess]:
    """The guesses that the output shapes allow, when these dims grow together."""
    for ties in _ties(form, size, inputs):
        if must_tie and not ties:
            continue
        question = Guess(size, inputs, (), ties)
        for new in (size + 1, 2 * size, size - 1):
            found = shapes_of(question.grown(form, new)) if new > 0 else None
            if found is not None and len(found) == len(makes):
                yield from _answers(question, makes, found, new)
                break


def _ties(form: Form, size: int, inputs: Sequence[Held]) -> Iterator[tuple[tuple[Path, int], ...]]:
    """Whole numbers among the arguments that may grow with the name: none, all that are equal to it, single ones."""
    yield ()
    numbers = numbers_in(form.op)
    factors = dict.fromkeys([1, *(one.unit for one in inputs)])
    for factor in factors:
        alike = [(path, factor) for path, value in numbers.items() if value == size * factor]
        if alike:
            yield tuple(alike)
        if len(alike) > 1:
            yield from ((one,) for one in alike[:6])
    multiples = [(path, value // size) for path, value in numbers.items() if value > size and value % size == 0]
    yield from ((one,) for one in multiples[:6] if one[1] not in factors)


def _answers(question: Guess, makes: Shapes, found: Shapes, new: int) -> Iterator[Guess]:
    held: list[Held] = []
    for i, (before, after) in enumerate(zip(makes, found, strict=True)):
        if len(before) != len(after):
            return
        changed = [d for d in range(len(before)) if before[d] != after[d]]
        if len(changed) > 1:
            return
        for d in changed:
            unit, rest = divmod(before[d], question.size)
            if rest or unit * new != after[d]:
                return
            held.append(Held((i, d), unit))
    if held and len(held) < len(makes):
        return
    if not held and not question.inputs:
        return
    several = [one for one in held if one.unit > 1]
    for inner in (False, True) if several else (False,):
        outputs = tuple(Held(one.where, one.unit, inner and one.unit > 1) for one in held)
        yield Guess(question.size, question.inputs, outputs, question.ties)


# Rules.


def names_of(guesses: Sequence[Guess]) -> list[str]:
    """A name for each guess: numbered, k for those summed away."""
    counters = {"d": itertools.count(), "k": itertools.count()}
    return [f"{letter}{next(counters[letter])}" for letter in ("k" if one.summed else "d" for one in guesses)]


def rule_of(
    form: Form,
    makes: Shapes,
    guesses: Sequence[Guess],
    added: frozenset[int] = frozenset(),
    never_empty: frozenset[str] = frozenset(),
) -> Rule | None:
    """The rule that some guesses make for a form; None if they do not fit it."""
    names = names_of(guesses)
    sizes: dict[str, int] = {}
    for name, guess in zip(names, guesses, strict=True):
        size = guess.size_in(form, makes)
        if size is None or size < 1:
            return None
        sizes[name] = size
    inputs = [_dims(i, one.sizes, [g.inputs for g in guesses], names, sizes) for i, one in enumerate(form.reads)]
    outputs = [_dims(i, shape, [g.outputs for g in guesses], names, sizes) for i, shape in enumerate(makes)]
    if any(one is None for one in (*inputs, *outputs)):
        return None
    return Rule(
        inputs=tuple(one for one in inputs if one is not None),
        outputs=tuple(one for one in outputs if one is not None),
        sizes=sizes,
        summed=frozenset(name for name, guess in zip(names, guesses, strict=True) if guess.summed),
        added=added,
        local=_local(dict(zip(names, (guess.ties for guess in guesses), strict=True)), form.op, sizes, never_empty),
        source="discovered",
    )


def _dims(
    operand: int, shape: Sequence[int], held: Sequence[Sequence[Held]], names: Sequence[str], sizes: Mapping[str, int]
) -> Dims | None:
    found: list[Dim] = []
    for d, size in enumerate(shape):
        here = [(n, one) for n, own in zip(names, held, strict=True) for one in own if one.where == (operand, d)]
        made = _dim(size, here, sizes)
        if made is None:
            return None
        found.append(made)
    return tuple(found)


def _dim(size: int, here: Sequence[tuple[str, Held]], sizes: Mapping[str, int]) -> Dim | None:
    """One dim that holds some names."""
    if not here:
        return fixed(size)
    if len(here) == 1:
        ((name, held),) = here
        unit, rest = divmod(size, sizes[name])
        if rest or (unit > 1 and held.unit == 1):
            return None
        return dim(name) if unit == 1 else dim(unit, name) if held.inner else dim(name, unit)
    if len(here) > 2 or here[0][1].inner == here[1][1].inner:
        return None
    outer, inner = (here[1], here[0]) if here[0][1].inner else (here[0], here[1])
    return dim(outer[0], inner[0]) if sizes[outer[0]] * sizes[inner[0]] == size else None


def _local(
    ties: Mapping[str, Sequence[tuple[Path, int]]], op: Op, sizes: Mapping[str, int], never_empty: frozenset[str]
) -> Local | None:
    """The call of a cell: the op's own, with the numbers that follow a name's size at the size of the part."""
    if not any(ties.values()) and not never_empty:
        return None
    whole = numbers_in(op)

    def local(op: Op, cell: CellView) -> Call:
        refuse_empty(op, cell, cell.cut & never_empty)
        numbers: dict[Path, int] = {}
        for name in cell.cut:
            held = count(cell.names[name])
            # a number may follow several names: it is their product
            numbers.update(
                (path, numbers.get(path, whole[path]) // sizes[name] * held) for path, _ in ties.get(name, ())
            )
        return call_with(with_numbers(op, numbers))

    return local
