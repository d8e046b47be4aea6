"""generate_for_sizes(): one program for all sizes of the dims that are marked in the example.

In: a Graph with symbols and a Plan. Out: files as `generate` gives them, for all sizes. The compiler works with plain
numbers; so the same plan is lowered, proven and emitted at several samples of the sizes, and `generalise` finds the
rule behind every number that differs. Samples are congruent to the example modulo the parts that the plan makes of a
size, so that uneven cuts stay uneven in the same way. Where the samples do not give programs of one shape (sizes that
happen to be equal, another way that is cheaper), more are taken, until enough agree.

Promised: the program of every sample used was proven by the static check; the conditions under which the program is
the right one stand in the form of its batches.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.capture.specialise import hints, specialise
from weft.codegen.form import form_of, guards_of
from weft.codegen.names import free_name
from weft.codegen.pipeline import generate
from weft.codegen.sheet import input_names
from weft.codegen.sizes.generalise import Files, Home, form, generalise
from weft.codegen.sizes.logical import logical_lines, tokens
from weft.errors import CaptureError, PlanError
from weft.ir.graph import Graph, Size
from weft.ir.program import Program
from weft.ir.ranges import count
from weft.lower import lower
from weft.lower.check import Report, check
from weft.plan.plan import Plan
from weft.runtime.program.files import PROGRAM, with_description
from weft.runtime.program.sizes import FreeSize, refused

MANY = 16
"""So many samples are tried before giving up."""
NAMES = ("batch", "length")
"""What the first dims of an input are called."""


Make = Callable[[Graph], Plan]
Lower = Callable[[Plan], Program]


@dataclass(frozen=True)
class Sized:
    """A program for all sizes.

    Args:
        program, report: at the sizes of the example.
    """

    program: Program
    report: Report
    files: Files


def generate_for_sizes(
    graph: Graph, plan: Plan, make: Make, lowered: Lower = lower, *, about: Mapping[str, Any] | None = None
) -> Sized:
    """One program for all sizes.

    Args:
        graph: with symbols; plan: of the same Graph at the sizes of the example; make: plans it at other sizes.
        lowered: makes a Program of a Plan.
        about: more to write about it.
    """
    program = lowered(plan)
    report = check(program, plan.rules)
    sizes = _free_sizes(graph, _words(generate(program)))
    names = _names(sizes)
    moduli = {one.size.name: _modulus(graph, program, one.symbols) for one in sizes}
    taken = _Search(graph, make, lowered, sizes, moduli).run(program)
    homes = [
        Home(argument, tuple(names.get(dim.expr, "") if isinstance(dim, Size) else "" for dim in shape))
        for argument, shape in (
            (input_names(program)[one.tensor], graph.tensors[one.tensor].shape) for one in graph.inputs
        )
    ]
    general = generalise(
        [one.files for one in taken],
        [one.sizes for one in taken],
        _first_homes(homes),
        moduli,
        [one.cuts for one in taken],
    )
    steps = general.steps
    free = tuple(
        replace(one.size, step=steps[one.size.name], rest=one.size.example % steps[one.size.name]) for one in sizes
    )
    batch = form_of(graph, free, names).to_json()
    contents = {name: content for name, content in general.files.items() if name != PROGRAM}
    told = {**json.loads(general.files[PROGRAM]), **(about or {}), "batch": batch}
    return Sized(program, report, with_description(contents, told))


@dataclass(frozen=True)
class _Free:
    """One size, of any value, and the symbols that stand for it."""

    size: FreeSize
    symbols: tuple[str, ...]


def _names(sizes: Sequence[_Free]) -> dict[str, str]:
    """The name of the size that each symbol stands for."""
    return {symbol: one.size.name for one in sizes for symbol in one.symbols}


def _free_sizes(graph: Graph, words: set[str]) -> tuple[_Free, ...]:
    """Symbols of the same dim and size in the example are one size. `words`: no names for them."""
    groups: dict[tuple[int, int], list[str]] = {}
    known = hints(graph)
    for symbol, (_, dim) in graph.symbols.items():
        groups.setdefault((dim, known[symbol]), []).append(symbol)
    inputs = {one.tensor: one for one in graph.inputs}
    found: list[_Free] = []
    for (dim, hint), symbols in groups.items():
        one = inputs[graph.symbols[symbols[0]][0]]
        base = NAMES[dim] if dim < len(NAMES) else f"size_{dim}"
        taken = {each.size.name for each in found} | words
        own = f"{re.sub(r'[^A-Za-z0-9_]+', '_', one.where).strip('_')}_{base}"
        name = base if base not in taken else free_name(own, lambda name, taken=taken: name not in taken)  # type: ignore[misc]
        found.append(_Free(FreeSize(name, one.index, one.where, dim, 1, 0, hint), tuple(symbols)))
    return tuple(found)


def _words(files: Files) -> set[str]:
    """All words of a program's statements."""
    texts = (content.decode() for name, content in files.items() if name.endswith(".py"))
    return {word for text in texts for line in logical_lines(text) for word in tokens(line.code)}


def _first_homes(homes: Sequence[Home]) -> list[Home]:
    """Each size is read where it is first seen."""
    seen: set[str] = set()
    out = []
    for home in homes:
        out.append(replace(home, names=tuple("" if name in seen else name for name in home.names)))
        seen |= set(home.names)
    return out


def _modulus(graph: Graph, program: Program, symbols: Sequence[str]) -> int:
    """Sizes that agree modulo this are cut alike: the parts of every dim that depends on the symbols."""
    found = 1
    for value in program.values.values():
        for dim, size in enumerate(graph.tensors[value.tensor].shape):
            table = value.layout.ranges[dim]
            if table is not None and isinstance(size, Size) and _mentions(size, symbols):
                found = math.lcm(found, len(table), *_proportions([count(ranges) for ranges in table]))
    for size in _all_sizes(graph):
        if _mentions(size, symbols):
            found = math.lcm(found, *map(int, re.findall(r"(?://|%) (\d+)", size.expr)))
    return found


def _proportions(parts: Sequence[int]) -> list[int]:
    """Denominators of shares that are not as even as can be: 6 and 2 of 8 are three quarters and one."""
    unit = math.gcd(*parts)
    if not unit or max(parts) // unit - min(parts) // unit <= 1:
        return []
    return [sum(parts) // math.gcd(sum(parts), part) for part in parts if part]


def _all_sizes(graph: Graph) -> Iterator[Size]:
    for tensor in graph.tensors.values():
        yield from (dim for dim in tensor.shape if isinstance(dim, Size))


def _mentions(size: Size, symbols: Sequence[str]) -> bool:
    return any(re.search(rf"\b{symbol}\b", size.expr) for symbol in symbols)


@dataclass(frozen=True)
class _Taken:
    """One sample: its program, and how long the parts of all cut dims are."""

    sizes: dict[str, int]
    files: Files
    cuts: tuple[int, ...]


def _cuts(program: Program) -> tuple[int, ...]:
    tables = (table for value in program.values.values() for table in value.layout.ranges if table is not None)
    return tuple(count(ranges) for table in tables for ranges in table)


class _Search:
    """Takes samples until enough give programs of one form."""

    def __init__(
        self, graph: Graph, make: Make, lowered: Lower, sizes: Sequence[_Free], moduli: Mapping[str, int]
    ) -> None:
        self._graph, self._make, self._lowered, self._sizes, self._moduli = graph, make, lowered, sizes, moduli
        self._guards = guards_of(graph, _names(sizes))
        self.wanted = len(sizes) + 2

    def run(self, example: Program) -> list[_Taken]:
        """Enough samples whose programs have one form."""
        at = {one.size.name: one.size.example for one in self._sizes}
        groups: dict[Any, list[_Taken]] = {}
        first_error: CaptureError | PlanError | None = None
        for sample in (at, *itertools.islice(self._samples(at), MANY)):
            try:
                program = example if sample is at else self._program(sample)
            except (CaptureError, PlanError) as error:
                first_error = first_error or error
                continue
            taken = _Taken(sample, generate(program), _cuts(program))
            group = groups.setdefault((form(taken.files), len(taken.cuts)), [])
            group.append(taken)
            if len(group) == self.wanted:
                return group
        raise self._refusal([key for key, _ in groups], first_error)

    def _program(self, sample: Mapping[str, int]) -> Program:
        sizes = {symbol: sample[name] for symbol, name in _names(self._sizes).items()}
        plan = self._make(specialise(self._graph, sizes))
        program = self._lowered(plan)
        check(program, plan.rules)
        return program

    def _samples(self, at: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Sizes around the example's, no two of which go along with each other."""
        free = [one.size for one in self._sizes]
        windows = {one.name: self._window(one) for one in free}
        seen = {tuple(at.values())}
        for number in range(MANY * 4):
            sample = {
                name: window[(number * (2 * place + 1) + 2 * place) % len(window)]
                for place, (name, window) in enumerate(windows.items())
            }
            if tuple(sample.values()) not in seen and refused(free, self._guards, sample) is None:
                seen.add(tuple(sample.values()))
                yield sample

    def _window(self, one: FreeSize) -> list[int]:
        step = self._moduli[one.name]
        around = (one.example + step * k for k in sorted(range(-16, 17), key=lambda k: (abs(k), -k)) if k)
        return [size for size in around if size >= 2]

    def _refusal(self, forms: Sequence[Any], error: CaptureError | PlanError | None) -> PlanError:
        told = ", ".join(f"dim {one.size.dim} of {one.size.where}" for one in self._sizes)
        if len(forms) <= 1 and error is not None:
            return PlanError(
                f"the sizes of {told} cannot vary together: {error.message}",
                place=error.place,
                remedy="leave a dim unmarked, or give dims that must be equal the same size in the example",
            )
        apart = _first_difference(forms)
        return PlanError(
            f"the program looks different at other sizes of {told}{': ' + apart if apart else ''}",
            remedy="leave that dim unmarked in the example, or choose another plan",
        )


def _first_difference(forms: Sequence[Any]) -> str:
    if len(forms) < 2:
        return "too few other sizes are allowed"
    texts = [dict(form[0]) for form in forms[:2]]
    for name in texts[0]:
        for a, b in zip(texts[0][name], texts[1].get(name, ()), strict=False):
            if a != b:
                return f"{a.strip()} or {b.strip()}"
    return "tables"
