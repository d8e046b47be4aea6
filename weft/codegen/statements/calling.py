"""Ops as statements: one call a line, with the user's source line above.

In: a Compute. Out: the call that the cells of the team make, written as plain Python; what differs by rank or chunk is
looked up, random draws and communicators are said in terms of the axes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from weft.codegen.cells import MANY, DrawPattern, Pattern, Varying
from weft.codegen.statements.frame import Context, Frame
from weft.codegen.statements.opaque import called, need_operator, opaque
from weft.codegen.statements.operators import PRODUCTS, WEIGHTS, Written, expression
from weft.codegen.text import literal, tuple_of
from weft.ir.graph import Op, Ref, Size
from weft.ir.program import Compute
from weft.ir.ranges import whole
from weft.lower.shared_heads import GROUPED, shares_heads
from weft.ops.arguments import overload
from weft.ops.rule import Group
from weft.runtime.layout.cuts import axes_text
from weft.runtime.operators.calls import FUNCTIONS

LOSSES = ("weft.entropy", "weft.cross_entropy")
"""Losses that may write over their scores."""


def say_compute(frame: Frame, step: Compute) -> None:
    """The op on all cells of the team's ranks."""
    op = frame.program.graph.by_name[step.op]
    num_cells = len(step.layout.grid.cells_on.get(frame.rank, ()))
    if not num_cells:
        return
    traced = frame.sheet.traced
    if op.target == "aten.alias.default" and num_cells == 1 and frame.sheet.read_once(step.inputs[0]) and not traced:
        # the only reader of a tensor may as well read it under its old name
        frame.same(step.outputs[0], frame.read(step.inputs[0]))
        return
    if op.source.line:
        frame.say_source(op.source, op.target)
    if frame.chunked:
        _Call(frame, op, step, None).say(range(num_cells))
    elif num_cells == 1:
        _Call(frame, op, step, 0).say((0,))
    else:
        _slot_by_slot(frame, op, step, num_cells)


def _slot_by_slot(frame: Frame, op: Op, step: Compute, count: int) -> None:
    """Cells of one device that no loop can run: one line each, the results gathered in tuples."""
    found: list[list[str]] = [[] for _ in step.outputs]
    for slot in range(count):
        names = _Call(frame, op, step, slot).say((slot,), suffix=f"_slot{slot}")
        for made, name in zip(found, names, strict=True):
            made.append(name)
    for value, made in zip(step.outputs, found, strict=True):
        frame.say(frame.name(value, parts=True), tuple_of(made))


class _Call:
    """One statement for one cell of every rank. `slot` None: inside a loop, for the current chunk."""

    def __init__(self, frame: Frame, op: Op, step: Compute, slot: int | None) -> None:
        self.frame, self.op, self.step, self.slot = frame, op, step, slot
        self.talks = False

    def say(self, slots: Sequence[int], suffix: str = "") -> list[str]:
        """Say the statement; the names of its results."""
        frame, step = self.frame, self.step
        where = [(rank, one) for rank in frame.sheet.ranks for one in slots]
        patterns = frame.sheet.cells.patterns(self.op, step, where)
        texts = [self._text(pattern) for pattern in patterns]
        names = [self._name(value, suffix) for value in step.outputs]
        listed = len(names) > 1 or not _returns_list(patterns[0].target)
        targets = ", ".join(names) if listed else f"({names[0]},)"
        shape = frame.sheet.shape(step.outputs[0]) if len(step.outputs) == 1 else ""
        context = self._context()
        if len(texts) == 1:
            frame.say(targets, texts[0], shape, context)
        else:
            case = {place: i for i, pattern in enumerate(patterns) for place in pattern.which}
            here = frame.look_up("case", case, self.slot)
            for number, text in enumerate(texts):
                last = number == len(texts) - 1
                head = "else:" if last else f"{'elif' if number else 'if'} {here} == {number}:"
                frame.say("", head, context=context)
                frame.say(targets, text, shape, context, depth=1)
        if self.talks:
            # backward must reach an operator that talks on every rank
            frame.say(", ".join(names), f"self.comm.reached({', '.join(names)})", context=context)
        if frame.sheet.traced:
            slot = "chunk" if self.slot is None else self.slot
            for output, name in enumerate(names):
                frame.say("", f"self.trace({literal(self.op.name)}, {output}, {slot}, {name})", context=context)
        return names

    def _name(self, value: str, suffix: str) -> str:
        frame = self.frame
        if suffix:
            return frame.names.give(value + suffix, frame.sheet.base(value) + suffix, frame.now)
        if not frame.sheet.is_read(value) and not self.talks and not frame.sheet.traced:
            return "_"
        frame.inside.add(value)
        return frame.name(value)

    def _context(self) -> Context:
        """The grad mode and autocast that the op needs around it."""
        grad = self.op.grad or self.frame.sheet.requiring.isdisjoint(self.op.inputs)
        return grad, self.op.autocast

    def _text(self, pattern: Pattern) -> str:
        """The call as an expression."""
        sheet = self.frame.sheet
        args = [self._bind(value, pattern, "size") for value in pattern.args]
        plain = [(name, value) for name, value in pattern.kwargs if not isinstance(value, DrawPattern)]
        kwargs = {name: self._bind(value, pattern, name) for name, value in plain}
        if shares_heads(self.frame.program, self.op, self.step):
            kwargs[GROUPED] = True
        if pattern.target in LOSSES and not kwargs.get("classes") and self.step.inputs[0] in sheet.spent:
            kwargs["reuse"] = True
        draws = [self._draw(value, pattern) for _, value in pattern.kwargs if isinstance(value, DrawPattern)]
        if pattern.target == self.op.target and self.op.function is not None:
            return opaque(sheet, self.op, args, kwargs, show)
        if pattern.function is not None:
            return called(sheet, self.op, pattern.function, [*map(show, args), *_spoken(pattern.function, kwargs)])
        if not pattern.target.startswith("weft."):
            need_operator(sheet, self.op, pattern.target)
            if self._has_weight(pattern):
                found = expression(pattern.target, args, kwargs, show, PRODUCTS)
                product = found.partition("(")[0]
                if "." not in product:
                    sheet.need("weft.runtime.weights.products", {product})
                    return found
            return expression(pattern.target, args, kwargs, show)
        function = FUNCTIONS[pattern.target.removeprefix("weft.")]
        sheet.need(function.__module__, {function.__name__})
        return f"{function.__name__}({', '.join([*map(show, args), *_spoken(function, kwargs), *draws])})"

    def _has_weight(self, pattern: Pattern) -> bool:
        """True for a product that a trained parameter is the weight of."""
        place = WEIGHTS.get(pattern.target)
        weight = None if place is None else pattern.args[place]
        if not isinstance(weight, Ref):
            return False
        program, value = self.frame.program, self.frame.program.values[self.step.inputs[int(weight.name)]]
        parameter = program.graph.parameter_tensors.get(value.tensor)
        return parameter is not None and parameter.trainable and value.grad is not None

    def _bind(self, value: Any, pattern: Pattern, hint: str) -> Any:
        """An argument with variables, communicators and lookups put in."""
        match value:
            case Ref():
                return Written(self.frame.read(self.step.inputs[int(value.name)], self.slot))
            case Group():
                self.talks = True
                return Written(self._peers(value, pattern))
            case Varying():
                by_place = {place: value.at(key) for place, key in pattern.which.items()}
                return Written(self.frame.look_up(hint, by_place, self.slot))
            case Size():
                return value.hint
            case tuple() | list():
                return tuple(self._bind(one, pattern, hint) for one in value)
            case _:
                return value

    def _peers(self, group: Group, pattern: Pattern) -> str:
        """The communicator along the axes that cut a name."""
        layout, spreads = self.step.layout, self.frame.sheet.spreads
        axes, cutting = spreads.axes(layout.grid), layout.axes_cutting(group.name)

        def found(where: tuple[int, int]) -> tuple[int, ...]:
            return layout.peers(group.name, layout.grid.cells_on[where[0]][where[1]])

        if axes is not None and all(axes[i] is not None for i in cutting):
            names = tuple(name for i in cutting for name in axes[i] or ())
            places = list(pattern.which)
            sample = places if len(places) <= MANY else places[:: len(places) // 7]
            if all(spreads.places[where[0]].group(names) == found(where) for where in sample):
                return f"self.comm.along({axes_text(names)})"
        ranks = {where: found(where) for where in pattern.which}
        return f"self.comm.among({self.frame.look_up('peers', ranks, self.slot)})"

    def _draw(self, draw: DrawPattern, pattern: Pattern) -> str:
        """A random draw: its number, its whole shape, and how it is cut."""
        number = literal(draw.number)
        if self.frame.layer is not None:
            offset = draw.number - self.frame.layer.draw
            number = f"draw + {offset}" if offset else "draw"
            self.frame.needs_draw = True
        cuts: dict[int, str] = {}
        for dim, at in enumerate(draw.at):
            if at == whole(draw.shape[dim]):
                continue
            cut = self._cut(at, draw.shape[dim], pattern)
            if cut is None:
                by_place = {place: draw.intervals(key) for place, key in pattern.which.items()}
                here = self.frame.look_up("at", by_place, self.slot)
                return f"**self.draw({number}, {literal(draw.shape)}, {here})"
            cuts[dim] = cut
        words = ", ".join(f"{dim}: {cut}" for dim, cut in cuts.items())
        return f"**self.draw({number}, {literal(draw.shape)}{', {' + words + '}' if words else ''})"

    def _cut(self, at: Any, size: int, pattern: Pattern) -> str | None:
        """How a dim is cut along the axes, in words; None if there are none, or inside a loop."""
        tables, spreads = self.frame.sheet.tables, self.frame.sheet.spreads
        if not isinstance(at, Varying) or self.slot is None:
            return None
        by_rank = {rank: at.at(key) for (rank, _), key in pattern.which.items()}
        axes = tables.axes_of(by_rank)
        if not axes:
            return None
        cut = spreads.describe(tables.by_axes(by_rank, axes), size, axes)
        return None if cut is None else self.frame.sheet.need_cut(cut)


def _returns_list(target: str) -> bool:
    """True if an operator returns a list or tuple, even of one tensor."""
    operator = overload(target)
    if operator is None:
        return False
    returns = operator._schema.returns
    return len(returns) != 1 or str(returns[0].type) != "Tensor"


def _spoken(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Keyword arguments as text, those left out that have their defaults."""
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    for name, value in kwargs.items():
        default = defaults.get(name, inspect.Parameter.empty)
        if type(value) is not type(default) or value != default:
            yield f"{name}={show(value)}"


def show(value: Any) -> str:
    """An argument as text."""
    if isinstance(value, Written):
        return value.text
    if isinstance(value, tuple | list):
        return tuple_of(map(show, value))
    return literal(value)
