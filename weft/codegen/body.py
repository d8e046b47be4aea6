"""Bodies: the steps of one function as statements.

In: steps, the values that come in as arguments, those that are returned. Out: lines of a function body, one op per line,
with the user's source line above and the local shape beside. Loops and regions become methods of their own and are
called. Nothing is decided here: the text says what the Program says.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.codegen.cells import DrawPattern, Pattern, Varying
from weft.codegen.moves import axes_text, cut_text, functions_of, moves_text
from weft.codegen.names import Names
from weft.codegen.operators import Written, expression
from weft.codegen.reads import INPUT, Stack, from_outside, last_reads, makes_of, reads_of
from weft.codegen.sheet import Layer, Sheet
from weft.codegen.spread import describe
from weft.codegen.text import TAB, WIDTH, assign, literal, tuple_of
from weft.ir.graph import Op, Ref, Size
from weft.ir.program import Chunks, Compute, Give, Recompute, Reshard, Step, Sync, Take, Use
from weft.ir.ranges import whole
from weft.lower.script import peers
from weft.ops.arguments import overload
from weft.ops.rule import Group
from weft.runtime.calls import FUNCTIONS

Context = tuple[bool, Any]
PLAIN: Context = (True, None)


@dataclass(frozen=True)
class Statement:
    """One statement: an assignment, or a comment if there is no expression."""

    targets: str
    expression: str
    comment: str = ""
    context: Context = PLAIN
    depth: int = 0


class Body:
    """Writes the statements of one function."""

    def __init__(
        self,
        sheet: Sheet,
        steps: Sequence[Step | Stack],
        arguments: Sequence[str],
        returned: Sequence[str],
        *,
        layer: Layer | None = None,
        chunked: bool = False,
    ) -> None:
        self.sheet, self.steps, self.layer, self.chunked = sheet, steps, layer, chunked
        self.program, self.rank = sheet.program, sheet.team.ranks[0]
        self.returned = list(returned)
        reserved = set(sheet.reserved) | ({layer.variable} if layer else set())
        self.names = Names(last_reads(steps, self.program, returned), reserved)
        self.env: dict[str, str] = {}
        self.inside: set[str] = set()
        self.statements: list[Statement] = []
        self.sources: set[tuple[str, int]] = set()
        self.needs_layer = self.needs_draw = self.talks = False
        self.now = -1
        for name in arguments:
            self.env[name] = self.names.give(name, sheet.base(name), -1)

    def write(self) -> list[str]:
        """The statements of all steps, as lines at the depth of a method's body."""
        for self.now, step in enumerate(self.steps):
            self.step(step)
        return self.lines()

    def step(self, step: Step | Stack) -> None:
        match step:
            case Use():
                self.use(step)
            case Compute():
                self.compute(step)
            case Reshard():
                self.reshard(step)
            case Take():
                self.take(step)
            case Chunks():
                self.chunks(step)
            case Recompute():
                self.recompute(step)
            case Stack():
                self.stack(step)
            case Give() | Sync():
                pass

    def say(self, targets: str, text: str, comment: str = "", context: Context = PLAIN, depth: int = 0) -> None:
        self.statements.append(Statement(targets, text, comment, context, depth))

    def name(self, value: str, *, parts: bool = False) -> str:
        """A new name for a value made now."""
        base = self.sheet.base(value) + ("_parts" if parts else "")
        self.env[value] = self.names.give(value, base, self.now)
        return self.env[value]

    def slots(self, value: str) -> int:
        return len(self.program.values[value].layout.parts_on(self.rank))

    def read(self, value: str, slot: int | None = None) -> str:
        """A value as an expression. Inside a loop the part of the current chunk; else that of a slot if told."""
        text = self.env.get(value)
        if text is None:
            text, layered = self.sheet.stored(value, self.layer)
            self.needs_layer = self.needs_layer or layered
            return text
        if self.slots(value) > 1 and value not in self.inside:
            if self.chunked:
                return f"{text}[chunk]"
            if slot is not None:
                return f"{text}[{slot}]"
        return text

    # Stored tensors and changes of layout.

    def use(self, step: Use) -> None:
        """A stored tensor where it is used; nothing to say where it is used as stored."""
        value = self.program.values[step.value]
        graph = self.program.graph
        if not self.sheet.takes_part(step.moves, value.layout):
            return
        tensor = INPUT + value.tensor
        source = self.env.get(tensor)
        if not step.moves:
            if source is not None:
                self.env[step.value] = source
                self.names.alias(source, step.value)
            return
        sync = self.sheet.syncs.get(step.value)
        words = self.sheet.words.all(step.moves)
        back = None if sync is None else self.sheet.words.all(sync)
        one = self.slots(step.value) == 1
        if sync is None:
            text = source if source is not None else self._home(value.tensor)
            shown = self._plain_move(text, words) if words is not None and one else ""
            shown = shown or f"self.comm.move({text}, {self._key(step.value, step.moves, None, value.tensor)})"
        elif words is not None and back is not None and one:
            self.sheet.need("weft.runtime.moves", functions_of((*words, *back)))
            self._needs_cut((*words, *back))
            home = self._home(value.tensor)
            shown = f"self.comm.use({home}, {moves_text(words)}, sync={moves_text(back)})"
        else:
            home = self._home(value.tensor)
            home = literal(graph.parameter_tensors[value.tensor].names[0]) if home == "None" else home
            shown = f"self.comm.use_parts({home}, {self._key(step.value, step.moves, sync, value.tensor)})"
        parts = self.slots(step.value) > 1
        target = self.name(step.value, parts=parts) if self.slots(step.value) else ""
        self.say(target, shown, self.sheet.shape(step.value))

    def _home(self, tensor: str) -> str:
        """Where a stored tensor stands; None if the rank stores nothing of it."""
        if not self.program.stored[tensor].parts_on(self.rank):
            return "None"
        text, layered = self.sheet.home(tensor, self.layer)
        self.needs_layer = self.needs_layer or layered
        return text

    def _plain_move(self, text: str, words: Sequence[Any]) -> str:
        self._needs_cut(words)
        if len(words) == 1 and words[0].kind == "slice":
            return f"self.comm.slice({text}, {words[0].cut_dim}, over={cut_text(words[0].cut)})"
        if len(words) == 1 and words[0].kind == "all_reduce":
            return f"self.comm.all_reduce({text}, over={axes_text(words[0].axes)}, grad=False)"
        self.sheet.need("weft.runtime.moves", functions_of(words))
        return f"self.comm.reshard({text}, {moves_text(words)}, None)"

    def _needs_cut(self, words: Sequence[Any]) -> None:
        if "Cut(" in moves_text(words):
            self.sheet.need("weft.runtime.cuts", {"Cut"})

    def _key(self, value: str, forward: Any, backward: Any, tensor: str, source: str | None = None) -> str:
        return literal(self.sheet.move_key(value, forward, backward, tensor, source))

    def reshard(self, step: Reshard) -> None:
        source, target = self.program.values[step.source], self.program.values[step.target]
        if not self.sheet.takes_part((*step.forward, *(step.backward or ())), source.layout, target.layout):
            return
        words = self.sheet.words.all(step.forward)
        back = None if step.backward is None else self.sheet.words.all(step.backward)
        plain = self.slots(step.source) == 1 and self.slots(step.target) == 1
        text = self.read(step.source) if step.source in self.env else "None"
        if plain and words is not None and (step.backward is None or back is not None):
            shown = self._reshard_text(text, words, back)
        else:
            key = self._key(step.target, step.forward, step.backward, target.tensor, step.source)
            shown = f"self.comm.move({text}, {key})"
        made = self.name(step.target, parts=self.slots(step.target) > 1) if self.slots(step.target) else ""
        self.say(made, shown, self.sheet.shape(step.target) if made else "")

    def _reshard_text(self, text: str, words: Sequence[Any], back: Sequence[Any] | None) -> str:
        if back is None:
            return self._plain_move(text, words)
        if len(words) == 1 and words[0].kind == "all_reduce" and not back:
            return f"self.comm.all_reduce({text}, over={axes_text(words[0].axes)})"
        if not words and len(back) == 1 and back[0].kind == "all_reduce":
            return f"self.comm.sum_grad({text}, over={axes_text(back[0].axes)})"
        self.sheet.need("weft.runtime.moves", functions_of((*words, *back)))
        self._needs_cut((*words, *back))
        return f"self.comm.reshard({text}, {moves_text(words)}, {moves_text(back)})"

    # Ops.

    def compute(self, step: Compute) -> None:
        op = self.program.graph.by_name[step.op]
        cells = step.layout.grid.cells_on.get(self.rank, ())
        if not cells:
            return
        self._source(op)
        if self.chunked:
            self._call(op, step, None, range(len(cells)))
        elif len(cells) == 1:
            self._call(op, step, 0, (0,))
        else:
            self._slot_by_slot(op, step, len(cells))

    def _slot_by_slot(self, op: Op, step: Compute, count: int) -> None:
        """Cells of one device that no loop can run: one line each, the results gathered in tuples."""
        found: list[list[str]] = [[] for _ in step.outputs]
        for slot in range(count):
            names = self._call(op, step, slot, (slot,), suffix=f"_slot{slot}")
            for made, name in zip(found, names, strict=True):
                made.append(name)
        for value, made in zip(step.outputs, found, strict=True):
            self.say(self.name(value, parts=True), tuple_of(made))

    def _call(self, op: Op, step: Compute, slot: int | None, slots: Any, suffix: str = "") -> list[str]:
        """The statement for one cell of every rank of the team; the names of its results."""
        where = [(rank, one) for rank in self.sheet.team.ranks for one in slots]
        patterns = self.sheet.cells.patterns(op, step, where)
        if op.target == "aten.alias.default" and self.sheet.read_once(step.inputs[0]) and slot == 0 and not suffix:
            self.env[step.outputs[0]] = self.read(step.inputs[0])
            self.names.alias(self.env[step.outputs[0]], step.outputs[0])
            return [self.env[step.outputs[0]]]
        self.talks = False
        texts = [self._text(op, step, pattern, slot) for pattern in patterns]
        names = []
        for value in step.outputs:
            if suffix:
                names.append(self.names.give(value + suffix, self.sheet.base(value) + suffix, self.now))
            elif self.sheet.is_read(value):
                names.append(self.name(value))
                self.inside.add(value)
            else:
                names.append("_")
        targets = ", ".join(names) if len(names) > 1 or not _returns_list(texts[0][1]) else f"({names[0]},)"
        context = self._context(op)
        shape = self.sheet.shape(step.outputs[0]) if len(step.outputs) == 1 else ""
        if len(texts) == 1:
            self.say(targets, texts[0][0], shape, context)
            self._reach(names, context)
            return names
        for number, (text, _) in enumerate(texts):
            case = {key: i for i, pattern in enumerate(patterns) for key in pattern.which}
            here = self._look_up("case", case, slot)
            word = "if" if number == 0 else "elif" if number < len(texts) - 1 else "else"
            self.say("", f"{word} {here} == {number}:" if word != "else" else "else:", context=context)
            self.say(targets, text, shape, context, depth=1)
        self._reach(names, context)
        return names

    def _reach(self, names: list[str], context: Context) -> None:
        """Backward must reach an operator that talks on every rank."""
        if self.talks:
            self.say(", ".join(names), f"self.comm.reached({', '.join(names)})", context=context)

    def _text(self, op: Op, step: Compute, pattern: Pattern, slot: int | None) -> tuple[str, str]:
        """The call as an expression, and its target."""
        talks = False

        def bind(value: Any, hint: str = "size") -> Any:
            nonlocal talks
            match value:
                case Ref():
                    return Written(self.read(step.inputs[int(value.name)], slot))
                case Group():
                    talks = True
                    return Written(self._peers(step, value, pattern, slot))
                case Varying():
                    by_place = {place: value.values[i] for place, i in pattern.which.items()}
                    return Written(self._look_up(hint, by_place, slot))
                case Size():
                    return value.hint
                case tuple() | list():
                    return tuple(bind(one, hint) for one in value)
                case _:
                    return value

        args = [bind(value) for value in pattern.args]
        kwargs = {name: bind(value, name) for name, value in pattern.kwargs if not isinstance(value, DrawPattern)}
        draws = [self._draw(value, pattern, slot) for _, value in pattern.kwargs if isinstance(value, DrawPattern)]
        if pattern.target == op.target and op.function is not None:
            text = self.sheet.opaque(op, args, kwargs, show)
        elif pattern.target.startswith("weft."):
            function = FUNCTIONS[pattern.target.removeprefix("weft.")]
            self.sheet.need(function.__module__, {function.__name__})
            words = [*map(show, args), *_spoken(function, kwargs), *draws]
            text = f"{function.__name__}({', '.join(words)})"
        else:
            text = expression(pattern.target, args, kwargs, show)
        self.talks = self.talks or talks
        return text, pattern.target

    def _peers(self, step: Compute, group: Group, pattern: Pattern, slot: int | None) -> str:
        """The communicator along the axes that cut a name."""
        grid = step.layout.grid
        ranks = {
            (rank, one): peers(step.layout, group.name, grid.cells_on[rank][one]) for rank, one in pattern.which
        }
        axes = self.sheet.spreads.axes(grid)
        cutting = step.layout.axes_cutting(group.name)
        if axes is not None and all(axes[i] is not None for i in cutting):
            names = tuple(name for i in cutting for name in axes[i] or ())
            places = self.sheet.spreads.places
            if all(places[rank].group(names) == found for (rank, _), found in ranks.items()):
                return f"self.comm.along({axes_text(names)})"
        return f"self.comm.among({self._look_up('peers', ranks, slot)})"

    def _look_up(self, hint: str, values: dict[tuple[int, int], Any], slot: int | None) -> str:
        """A lookup of what differs; `slot` None: inside a loop, where it may differ by chunk too."""
        by_rank: dict[int, list[Any]] = {}
        for (rank, _), value in sorted(values.items()):
            by_rank.setdefault(rank, []).append(value)
        if slot is None and any(one != found[0] for found in by_rank.values() for one in found):
            key = self.sheet.tables.key("here", hint, {rank: tuple(found) for rank, found in by_rank.items()})
            return f"self.here.{key}[chunk]"
        return f"self.here.{self.sheet.tables.key('here', hint, {rank: f[0] for rank, f in by_rank.items()})}"

    def _draw(self, draw: DrawPattern, pattern: Pattern, slot: int | None) -> str:
        number = literal(draw.number)
        if self.layer is not None:
            offset = draw.number - self.layer.draw
            number = f"draw + {offset}" if offset else "draw"
            self.needs_draw = True
        cuts: dict[int, str] = {}
        for dim, at in enumerate(draw.at):
            if at == whole(draw.shape[dim]):
                continue
            cut = self._cut_of(at, draw.shape[dim], pattern) if slot is not None else None
            if cut is None:
                at_all = draw.whole if isinstance(draw.whole, Varying) else Varying((draw.whole,) * 1)
                by_place = {
                    place: at_all.values[i if len(at_all.values) > 1 else 0] for place, i in pattern.which.items()
                }
                return f"**self.draw({number}, {literal(draw.shape)}, {self._look_up('at', by_place, slot)})"
            cuts[dim] = cut
        words = ", ".join(f"{dim}: {cut}" for dim, cut in cuts.items())
        return f"**self.draw({number}, {literal(draw.shape)}{', {' + words + '}' if words else ''})"

    def _cut_of(self, at: Any, size: int, pattern: Pattern) -> str | None:
        """How a dim is cut along the axes, in words."""
        tables, spreads = self.sheet.tables, self.sheet.spreads
        if not isinstance(at, Varying):
            return None
        by_rank = {rank: at.values[i] for (rank, _), i in pattern.which.items()}
        axes = tables.axes_of(by_rank)
        if not axes:
            return None
        counts = tuple(spreads.places[0].sizes[axis] for axis in axes)
        cut = describe(tables.by_axes(by_rank, axes), size, axes, counts)
        if cut is None:
            return None
        text = cut_text(cut)
        if text.startswith("Cut("):
            self.sheet.need("weft.runtime.cuts", {"Cut"})
        return text

    def _context(self, op: Op) -> Context:
        """The grad mode and autocast that an op needs around it."""
        tensors = self.program.graph.tensors
        grad = op.grad or not any(tensors[name].needs_grad for name in op.inputs)
        return grad, op.autocast

    def _source(self, op: Op) -> None:
        """The user's line, once in a function."""
        place = op.source.file, op.source.line
        if op.source.line and place not in self.sources:
            self.sources.add(place)
            text = " ".join(op.source.text.split())
            self.say("", "", f"{Path(op.source.file).name}:{op.source.line}  {text}".rstrip())

    # Loops and regions.

    def take(self, step: Take) -> None:
        """Cut the chunk's part out of a value that the rank holds whole."""
        takes = self.sheet.takes(step)
        count = self.slots(step.target)
        index = {(rank, c): takes(rank, c).index for rank in self.sheet.team.ranks for c in range(count)}
        text = f"self.take({self.env[step.source]}, {self._look_up(f'{self.sheet.base(step.target)}_at', index, None)}"
        if any(at is None for at in index.values()):
            shapes = {(rank, c): takes(rank, c).shape for rank in self.sheet.team.ranks for c in range(count)}
            same = len(set(shapes.values())) == 1
            text += f", {literal(next(iter(shapes.values()))) if same else self._look_up('shape', shapes, None)}"
        made = self.name(step.target)
        self.inside.add(step.target)
        self.say(made, f"{text})", self.sheet.shape(step.target))

    def chunks(self, step: Chunks) -> None:
        first = next(inner for inner in step.body if isinstance(inner, Compute))
        count = len(first.layout.grid.cells_on.get(self.rank, ()))
        if not count:
            return
        gives = [inner for inner in step.body if isinstance(inner, Give)]
        outside = [name for name in from_outside(step.body, self.program) if name in self.env]
        method, extra = self.sheet.method(
            "chunk", step.body, outside, [give.source for give in gives], layer=self.layer, chunked=True
        )
        given = ", ".join(self._given(give, count) for give in gives)
        words = [str(count), f"self.{method}", *self._extra(extra), *(self.env[name] for name in outside)]
        words += [f"gives=[{given}]", *(["recompute=True"] if step.recompute else [])]
        self.sheet.need("weft.runtime.module", {"Given"})
        names = ", ".join(self.name(give.target) for give in gives)
        self.say(names, f"self.chunks({', '.join(words)})", self.sheet.shape(gives[0].target) if len(gives) == 1 else "")

    def _given(self, give: Give, count: int) -> str:
        gives = self.sheet.gives(give)
        ranks = self.sheet.team.ranks
        found = {(rank, c): gives(rank, c) for rank in ranks for c in range(count)}
        if all(one.index is None for one in found.values()):
            return "Given()"
        index = {rank: tuple(found[rank, c].index for c in range(count)) for rank in ranks}
        shapes = {rank: found[rank, 0].shape for rank in ranks}
        key = self.sheet.tables.key("here", f"{self.sheet.base(give.target)}_at", index)
        same = len(set(shapes.values())) == 1
        shape = literal(shapes[ranks[0]]) if same else f"self.here.{self.sheet.tables.key('here', 'shape', shapes)}"
        return f"Given(self.here.{key}, {shape})"

    def recompute(self, step: Recompute) -> None:
        outside = [name for name in from_outside(step.body, self.program) if name in self.env]
        leaving = [name for name in self.sheet.leaving(step) if self.slots(name)]
        if not leaving:
            for inner in step.body:
                self.step(inner)
            return
        method, extra = self.sheet.method("again", step.body, outside, leaving, layer=self.layer, chunked=self.chunked)
        words = [f"self.{method}", *self._extra(extra), *(self.env[name] for name in outside)]
        plain = tuple(i for i, name in enumerate(leaving) if self.program.values[name].grad is None)
        words += [f"plain={literal(plain)}"] if plain else []
        names = ", ".join(self.name(name) for name in leaving)
        self.say(names, f"self.recompute({', '.join(words)})", self.sheet.shape(leaving[0]) if len(leaving) == 1 else "")

    def stack(self, step: Stack) -> None:
        """Like layers: the first one's steps as a method, called in a loop."""
        *way, last = step.stack.split(".")
        single = last[:-1] if last.endswith("s") and len(last) > 2 else last
        layer = Layer(f"{step.stack}.{step.start}.", "layer" if single == last and len(last) < 2 else single, step.draw)
        outside = [name for name in step.outside if name in self.env]
        method, extra = self.sheet.method(
            "layer", step.iterations[0], [*step.initial, *outside], step.given, layer=layer, chunked=False, name="block"
        )
        results = []
        for i, value in enumerate(step.made):
            start = step.initial[i] if i < len(step.initial) else ""
            dead = start and self.names.is_dead(start, self.now)
            base = self.env[start] if dead else self.sheet.base(value)
            self.env[value] = self.names.give(value, base, self.now)
            results.append(self.env[value])
            if start and self.env[value] != self.env[start]:
                self.say(self.env[value], self.env[start])
        draw = _draw_text(step)
        words = [layer.variable if word == layer.variable else draw for word in extra]
        words += [*results[: len(step.initial)], *(self.env[name] for name in outside)]
        home = "self" + "".join(f"[{word}]" if word.isdigit() else f".{word}" for word in (*way, last))
        counted = "draw" in extra
        count = len(step.iterations)
        if step.start == 0 and self.sheet.num_layers(step.stack) == count:
            head = f"for i, {layer.variable} in enumerate({home}):" if counted else f"for {layer.variable} in {home}:"
        else:
            head = f"for i in range({step.start}, {step.start + count}):"
            words = [f"{home}[i]" if word == layer.variable else word for word in words]
        self.say("", head)
        self.say(", ".join(results), f"self.{method}({', '.join(words)})", depth=1)

    def _extra(self, extra: Sequence[str]) -> list[str]:
        self.needs_layer = self.needs_layer or (self.layer is not None and self.layer.variable in extra)
        self.needs_draw = self.needs_draw or "draw" in extra
        return list(extra)

    # Lines.

    def lines(self, depth: int = 2) -> list[str]:
        """The statements as text, gathered under the contexts that they need."""
        out: list[str] = []
        current: Context = PLAIN
        pending: list[Statement] = []
        for statement in self.statements:
            if not statement.targets and not statement.expression:
                pending.append(statement)
                continue
            if statement.context != current:
                out += _opening(statement.context, depth)
                current = statement.context
            inner = depth + _levels(current)
            out += [_comment(one.comment, inner) for one in pending]
            pending.clear()
            if statement.expression.endswith(":") and not statement.targets:
                out.append(TAB * inner + statement.expression)
            else:
                out += assign(statement.targets, statement.expression, inner + statement.depth, statement.comment)
        return out


def _draw_text(step: Stack) -> str:
    """The number of a layer's first draw."""
    base = step.draw - step.start * step.stride
    times = f"{step.stride} * i" if step.stride != 1 else "i"
    return f"{base} + {times}" if base else times


def _levels(context: Context) -> int:
    return 0 if context == PLAIN else 1


def _opening(context: Context, depth: int) -> list[str]:
    grad, autocast = context
    words = [] if grad else ["torch.no_grad()"]
    if autocast is not None:
        words.append(f"torch.autocast(self.device.type, dtype={autocast.dtype}, enabled={autocast.enabled})")
    return [f"{TAB * depth}with {', '.join(words)}:"] if words else []


def _comment(text: str, depth: int) -> str:
    line = f"{TAB * depth}# {text}"
    return line if len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "..."


def _returns_list(target: str) -> bool:
    """True if an operator returns a list or tuple, even of one tensor."""
    operator = overload(target)
    if operator is None:
        return False
    returns = operator._schema.returns
    return len(returns) != 1 or str(returns[0].type) != "Tensor"


def show(value: Any) -> str:
    """An argument as text."""
    if isinstance(value, Written):
        return value.text
    if isinstance(value, tuple | list):
        return tuple_of(map(show, value))
    return literal(value)


def _spoken(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Keyword arguments as text, those left out that have their defaults."""
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    for name, value in kwargs.items():
        default = defaults.get(name, inspect.Parameter.empty)
        if type(value) is not type(default) or value != default:
            yield f"{name}={show(value)}"


def free_of(text: str, name: str) -> bool:
    """True if a text does not mention a name."""
    return re.search(rf"\b{re.escape(name)}\b", text) is None


__all__ = ["Body", "Statement", "makes_of", "reads_of", "show"]
