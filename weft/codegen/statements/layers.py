"""Repeated layers: which runs of steps are one and the same, but for the layer's number.

In: the steps of a Program. Out: the steps with every stack of like layers as one `Stack`. Layers are alike if their
ops, layouts, moves and source lines are the same, parameters differ in one number of their dotted name, random draws
are numbered evenly, and every value that a layer reads is its own, the same outside value for all, or what the layer
before left in the same place. Nothing but the order of steps that carry no gradient is changed: those that belong to
no layer but stand between layers come before them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.codegen.sheet import Sheet
from weft.codegen.statements.reads import Stack, makes_of, reads_of
from weft.ir.program import Chunks, Compute, Give, Recompute, Reshard, Step, Take, Use, walk

_NUMBERED = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.|/|$)")

Spot = tuple[int, int]
"""Position of a step in its layer, loops and regions laid open, and of a value among those it makes."""


@dataclass(frozen=True)
class Numbered:
    """A dotted name cut at its first number: `transformer.h`, 3, `attn`."""

    stack: str
    number: int
    rest: str


def numbered(name: str) -> Numbered | None:
    """The first number in a dotted name.

    >>> numbered("h.3.attn.weight")
    Numbered(stack='h', number=3, rest='attn.weight')
    """
    match = _NUMBERED.search(name)
    if match is None or match.start() == 0:
        return None
    return Numbered(name[: match.start() - 1], int(match[1]), name[match.end() + 1 :])


class Folder:
    """Finds stacks of like layers in one Program."""

    def __init__(self, sheet: Sheet) -> None:
        self._sheet, self._program = sheet, sheet.program
        self._readers: dict[str, Step] = {}
        for step in walk(self._program.steps):
            if isinstance(step, Compute):
                for name in step.inputs:
                    self._readers.setdefault(name, step)
        self._keys: dict[Hashable, int] = {}

    def fold(self, steps: Sequence[Step]) -> list[Step | Stack]:
        """The steps with stacks folded."""
        ordered = self._gathered(steps)
        found = [self._layer(step) for step in ordered]
        out: list[Step | Stack] = []
        at = 0
        while at < len(ordered):
            layer = found[at]
            stack = self._stack_at(ordered, found, at) if layer is not None else None
            if stack is None:
                out.append(ordered[at])
                at += 1
            else:
                out.append(stack)
                at += sum(map(len, stack.iterations))
        return out

    # Which layer a step belongs to.

    def _layer(self, step: Step) -> Numbered | None:
        match step:
            case Compute():
                return numbered(self._program.graph.by_name[step.op].path + "/")
            case Use(value):
                return self._layer_of_reader(value)
            case Reshard(_, target):
                return self._layer_of_reader(target)
            case Chunks() | Recompute():
                inner = next(one for one in walk(step.body) if isinstance(one, Compute))
                return self._layer(inner)
            case _:
                return None

    def _layer_of_reader(self, value: str) -> Numbered | None:
        tensor = self._program.values[value].tensor
        own = numbered(self._name(tensor))
        if tensor in self._program.stored and own is None and self._is_named(tensor):
            return None
        reader = self._readers.get(value)
        return None if reader is None else self._layer(reader)

    def _is_named(self, tensor: str) -> bool:
        return tensor not in self._program.graph.constants

    def _name(self, tensor: str) -> str:
        return self._sheet.stored_name(tensor)

    def _gathered(self, steps: Sequence[Step]) -> list[Step]:
        """Steps without gradient that belong to no layer, moved before the first layer."""
        layered = [i for i, step in enumerate(steps) if self._layer(step) is not None]
        if not layered:
            return list(steps)
        start, end = layered[0], layered[-1]
        made = {name for step in steps[:start] for name in makes_of(step)}
        early: list[Step] = []
        late: list[Step] = []
        for step in steps[start:end]:
            known = all(name in made or name.startswith("input:") for name in reads_of(step, self._program))
            if known and self._layer(step) is None and self._is_free(step):
                early.append(step)
                made.update(makes_of(step))
            else:
                late.append(step)
        return [*steps[:start], *early, *late, *steps[end:]]

    def _is_free(self, step: Step) -> bool:
        """True if a step may run earlier: no gradient flows through it, and no rank waits in it."""
        match step:
            case Use():
                return True
            case Reshard():
                return step.backward is None
            case Compute():
                op = self._program.graph.by_name[step.op]
                talks = set(self._sheet.rule(op, step.layout.algorithm).algorithms) & set(step.layout.cut_names)
                return not talks and all(self._program.values[name].grad is None for name in step.outputs)
            case _:
                return False

    # Which layers are alike.

    def _stack_at(self, steps: Sequence[Step], found: Sequence[Numbered | None], at: int) -> Stack | None:
        """The longest stack of like layers that starts here, where a layer begins."""
        first = found[at]
        assert first is not None
        before = found[at - 1] if at else None
        if before is not None and (before.stack, before.number) == (first.stack, first.number):
            return None
        starts = [at]
        for i in range(at + 1, len(steps)):
            here, wanted = found[i], first.number + len(starts)
            if here is not None and here.stack == first.stack and here.number == wanted:
                starts.append(i)
            elif here is not None and here.stack == first.stack and here.number > wanted:
                break
        if len(starts) < 2:
            return None
        length = starts[1] - at
        layers = [tuple(steps[begin : begin + length]) for begin in starts]
        keys = [tuple(self._key(step) for step in walk(layer)) for layer in layers]
        alike = 1
        while alike < len(layers) and keys[alike] == keys[0] and starts[alike] == at + alike * length:
            alike += 1
        for count in range(alike, 1, -1):
            stack = self._flow(layers[:count], first)
            if stack is not None:
                return stack
        return None

    def _key(self, step: Step) -> int:
        """A number that steps share if they are alike, values aside."""
        return self._keys.setdefault(self._form(step), len(self._keys))

    def _form(self, step: Step) -> Hashable:
        values = self._program.values
        match step:
            case Use(value, moves):
                held = values[value]
                return "use", self._pattern(held.tensor), held.layout, held.grad, moves, self._sheet.syncs.get(value)
            case Compute():
                op = self._program.graph.by_name[step.op]
                form = self._sheet.form(op)
                outputs = tuple((values[name].layout, values[name].grad) for name in step.outputs)
                names = tuple(self._sheet.base(name) for name in step.outputs)
                where = numbered(op.path + "/")
                path = op.path if where is None else f"{where.stack}.*.{where.rest}"
                layout = step.layout.grid, step.layout.uses, step.layout.algorithm
                return form, layout, outputs, names, path, op.source, op.grad, op.autocast
            case Reshard(_, target, forward, backward):
                return "reshard", values[target].layout, values[target].grad, forward, backward
            case Take(source, target) | Give(source, target):
                ends = (values[name] for name in (source, target))
                return type(step).__name__, *((one.layout, one.grad) for one in ends)
            case Chunks(axis, body, recompute):
                return "chunks", axis, len(body), recompute
            case Recompute(body):
                return "recompute", len(body)
            case _:
                return id(step)

    def _pattern(self, tensor: str) -> Hashable:
        name = self._name(tensor)
        found = numbered(name)
        return name if found is None else (found.stack, found.rest)

    # How values pass from layer to layer.

    def _flow(self, layers: Sequence[tuple[Step, ...]], first: Numbered) -> Stack | None:
        makers = [_spots(layer) for layer in layers]
        places = [[self._places(step, makers, k) for step in walk(layer)] for k, layer in enumerate(layers)]
        if any(one != places[1] for one in places[2:]):
            return None
        carried = _carried(places[0], places[1])
        if carried is None or not self._names_fit(layers, first):
            return None
        if any(self._program.values[name].tensor in self._program.stored for name in carried.values()):
            # a weight that is brought in one layer and read in the next has a name of its own each time
            return None
        stride = self._stride(layers)
        left = self._left(layers, makers)
        if stride is None or left is None:
            return None
        spots = [*carried, *(spot for spot in left if spot not in carried)]
        values = [{spot: value for value, spot in one.items()} for one in makers]
        return Stack(
            iterations=tuple(layers),
            stack=first.stack,
            start=first.number,
            initial=tuple(carried.values()),
            given=tuple(values[0][spot] for spot in spots),
            made=tuple(values[-1][spot] for spot in spots),
            draw=self._first_draw(layers[0]),
            stride=stride,
            outside=self._outside(layers[0], set(carried.values())),
        )

    def _places(self, step: Step, makers: Sequence[dict[str, Spot]], k: int) -> tuple[Any, ...]:
        """Where each value that a step reads comes from, seen from its layer."""
        if isinstance(step, Chunks | Recompute):
            return ()
        out: list[Any] = []
        for name in reads_of(step, self._program):
            if name in makers[k]:
                out.append(("own", makers[k][name]))
            elif k and name in makers[k - 1]:
                out.append(("before", makers[k - 1][name]))
            else:
                out.append(("outside", name))
        return tuple(out)

    def _names_fit(self, layers: Sequence[tuple[Step, ...]], first: Numbered) -> bool:
        """True if stored tensors of layer k bear its number, and ops too."""
        for k, layer in enumerate(layers):
            for step in walk(layer):
                if isinstance(step, Use):
                    tensor = self._program.values[step.value].tensor
                    found = numbered(self._name(tensor))
                    if found is not None and (found.stack, found.number) != (first.stack, first.number + k):
                        return False
                    if step.value in self._sheet.syncs and not self._sheet.stores(tensor):
                        return False  # it would have to be told by its name
        return True

    def _first_draw(self, layer: Sequence[Step]) -> int:
        return min(self._draws(layer), default=0)

    def _draws(self, layer: Sequence[Step]) -> list[int]:
        ops = (self._program.graph.by_name[step.op] for step in walk(layer) if isinstance(step, Compute))
        return [op.draw for op in ops if op.draw is not None]

    def _stride(self, layers: Sequence[tuple[Step, ...]]) -> int | None:
        """By how much draw numbers grow from layer to layer; None if not evenly."""
        draws = [self._draws(layer) for layer in layers]
        if not draws[0]:
            return 0
        stride = draws[1][0] - draws[0][0]
        even = all(b == a + stride * k for k, one in enumerate(draws) for a, b in zip(draws[0], one, strict=True))
        return stride if even else None

    def _left(self, layers: Sequence[tuple[Step, ...]], makers: Sequence[dict[str, Spot]]) -> list[Spot] | None:
        """What the last layer leaves for others; None if an earlier one does."""
        inside = {id(step) for layer in layers for step in walk(layer)}
        program = self._program
        readers: set[str] = set(program.ends)
        for step in walk(program.steps):
            if id(step) not in inside and not isinstance(step, Chunks | Recompute):
                readers.update(reads_of(step, program))
        if any(name in readers for one in makers[:-1] for name in one):
            return None
        return [spot for name, spot in makers[-1].items() if name in readers]

    def _outside(self, layer: Sequence[Step], initial: set[str]) -> tuple[str, ...]:
        """Values from before the stack that every layer reads."""
        own = set(_spots(layer))
        found: dict[str, None] = {}
        for step in walk(layer):
            if not isinstance(step, Chunks | Recompute):
                found.update((name, None) for name in reads_of(step, self._program) if name not in own | initial)
        return tuple(found)


def _spots(layer: Sequence[Step]) -> dict[str, Spot]:
    """Where in a layer each value is made."""
    found: dict[str, Spot] = {}
    for position, step in enumerate(walk(layer)):
        if not isinstance(step, Chunks | Recompute):
            found.update((name, (position, i)) for i, name in enumerate(makes_of(step)))
    return found


def _carried(first: Sequence[Any], later: Sequence[Any]) -> dict[Spot, str] | None:
    """What the layer before left where later ones read it, and the value that the first one reads instead."""
    found: dict[Spot, str] = {}
    for ours, theirs in zip(first, later, strict=True):
        for (kind, mine), (other, spot) in zip(ours, theirs, strict=True):
            if other == "before":
                if kind != "outside" or found.setdefault(spot, mine) != mine:
                    return None
            elif (kind, mine) != (other, spot):
                return None
    return found
