"""Loops over chunks, recomputed regions and stacks of layers as statements.

In: Takes, Chunks, Recomputes, Stacks. Out: calls of methods that hold the bodies: `self.chunks(...)`,
`self.recompute(...)`, and a plain loop over the layers' containers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.codegen.cells import Where
from weft.codegen.sheet import Layer, attribute
from weft.codegen.statements.frame import Frame
from weft.codegen.statements.reads import Stack, from_outside
from weft.codegen.text import literal
from weft.ir.layout import Part, positions
from weft.ir.merge import merge
from weft.ir.program import Chunks, Compute, Give, Recompute, Step, Take
from weft.runtime.layout.execute import covers
from weft.runtime.layout.transfer import Index


def say_take(frame: Frame, step: Take) -> None:
    """Cut the chunk's part out of a value that the rank holds whole."""
    sheet, layout = frame.sheet, frame.program.values[step.target].layout
    found, merged = list(_chunks(frame, step.target, step.source)), merge(layout.grid)
    assert merged is not None
    # of several addends that one device holds, the first gets all, others zeros
    index = {
        where: positions(held, part) if merged.first(part.cell, layout.partial_axes) else None
        for where, held, part in found
    }
    frame.inside.add(step.target)
    if all((at := index[where]) is not None and covers(at, held.shape) for where, held, _ in found):
        frame.same(step.target, frame.read(step.source))
        return
    words = [frame.env[step.source], frame.look_up(f"{sheet.base(step.target)}_at", index, None)]
    if None in index.values():
        shapes = {where: part.shape for where, _, part in found}
        same = len(set(shapes.values())) == 1
        words.append(literal(next(iter(shapes.values()))) if same else frame.look_up("shape", shapes, None))
    frame.say(frame.name(step.target), f"self.take({', '.join(words)})", sheet.shape(step.target))


def say_chunks(frame: Frame, step: Chunks) -> None:
    """Run the body chunk by chunk."""
    first = next(inner for inner in step.body if isinstance(inner, Compute))
    count = len(first.layout.grid.cells_on.get(frame.rank, ()))
    if not count:
        return
    gives = [inner for inner in step.body if isinstance(inner, Give)]
    words = [str(count), *_method(frame, "chunk", step.body, [give.source for give in gives], chunked=True)]
    words.append(f"gives=[{', '.join(_given(frame, give) for give in gives)}]")
    words += ["recompute=True"] if step.recompute else []
    words += ["returned=True"] if step.ends else []
    frame.sheet.need("weft.runtime.program.module", {"Given"})
    names = ", ".join(frame.name(give.target) for give in gives)
    shape = frame.sheet.shape(gives[0].target) if len(gives) == 1 else ""
    frame.say(names, f"self.chunks({', '.join(words)})", shape)


def _given(frame: Frame, give: Give) -> str:
    """What becomes of one result of a chunk: added up, or placed."""
    tables, layout = frame.sheet.tables, frame.program.values[give.source].layout
    merged = merge(layout.grid)
    assert merged is not None
    if merged.shrunk & set(layout.partial_axes):
        return "Given()"
    index: dict[int, tuple[Index, ...]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for (rank, _), held, part in _chunks(frame, give.source, give.target):
        index[rank] = (*index.get(rank, ()), positions(held, part))
        shapes[rank] = held.shape
    key = tables.key("here", f"{frame.sheet.base(give.target)}_at", index)
    same = len(set(shapes.values())) == 1
    shape = literal(shapes[frame.rank]) if same else f"self.here.{tables.key('here', 'shape', shapes)}"
    return f"Given(self.here.{key}, {shape})"


def _chunks(frame: Frame, inside: str, outside: str) -> Iterator[tuple[Where, Part, Part]]:
    """For every rank and chunk what the rank holds outside of the loop, and the chunk's part of it."""
    values = frame.program.values
    for rank in frame.sheet.ranks:
        (held,) = values[outside].layout.parts_on(rank)
        for chunk, part in enumerate(values[inside].layout.parts_on(rank)):
            yield (rank, chunk), held, part


def say_recompute(frame: Frame, step: Recompute) -> None:
    """Run the body now and again in backward: also where it leaves nothing, for the ranks that wait in it."""
    if not any(frame.sheet.does_something(inner) for inner in step.body):
        return
    leaving = [name for name in frame.sheet.leaving(step) if frame.slots(name)]
    words = _method(frame, "again", step.body, leaving, chunked=frame.chunked)
    # the parts of an only result are results of their own
    results = leaving * frame.slots(leaving[0]) if len(leaving) == 1 else leaving
    plain = tuple(i for i, name in enumerate(results) if frame.program.values[name].grad is None)
    words += [f"plain={literal(plain)}"] if plain else []
    names = ", ".join(frame.name(name, parts=frame.slots(name) > 1) for name in leaving)
    shape = frame.sheet.shape(leaving[0]) if len(leaving) == 1 else ""
    frame.say(names, f"self.recompute({', '.join(words)})", shape)


def _method(frame: Frame, kind: str, body: Sequence[Step], returned: Sequence[str], *, chunked: bool) -> list[str]:
    """Steps as a method, and what it is called with: what else it takes, passed on, and the values it reads."""
    outside = [name for name in from_outside(body, frame.program) if name in frame.env]
    method, extra = frame.sheet.method(kind, body, outside, returned, layer=frame.layer, chunked=chunked)
    frame.needs_layer = frame.needs_layer or (frame.layer is not None and frame.layer.variable in extra)
    frame.needs_draw = frame.needs_draw or "draw" in extra
    return [f"self.{method}", *extra, *(frame.env[name] for name in outside)]


def say_stack(frame: Frame, step: Stack) -> None:
    """Like layers: the first one's steps as a method, called in a loop."""
    *_, last = step.stack.split(".")
    single = last[:-1] if last.endswith("s") and len(last) > 2 else last
    variable = frame.names.give(f"{step.stack}.{step.start}", single if len(single) > 1 else "layer", frame.now)
    layer = Layer(f"{step.stack}.{step.start}.", variable, step.draw)
    outside = [name for name in step.outside if name in frame.env]
    method, extra = frame.sheet.method(
        "layer", step.iterations[0], [*step.initial, *outside], step.given, layer=layer, chunked=False, name="block"
    )
    results = _results(frame, step)
    count = len(step.iterations)
    home = f"self.model{attribute(step.stack)}"
    whole = step.start == 0 and frame.sheet.num_layers(step.stack) == count
    own = layer.variable if whole else f"{home}[i]"
    words = [own if word == layer.variable else _draw_text(step) for word in extra]
    words += [*results[: len(step.initial)], *(frame.env[name] for name in outside)]
    if not whole:
        head = f"for i in range({step.start}, {step.start + count}):"
    elif "draw" in extra:
        head = f"for i, {layer.variable} in enumerate({home}):"
    else:
        head = f"for {layer.variable} in {home}:"
    frame.say("", head)
    frame.say(", ".join(results), f"self.{method}({', '.join(words)})", depth=1)


def _results(frame: Frame, step: Stack) -> list[str]:
    """Variables that layers hand on, holding what the first layer starts from."""
    results = []
    for i, value in enumerate(step.made):
        start = step.initial[i] if i < len(step.initial) else ""
        dead = bool(start) and frame.names.is_dead(start, frame.now)
        base = frame.env[start] if dead else frame.sheet.base(value)
        frame.env[value] = frame.names.give(value, base, frame.now)
        results.append(frame.env[value])
        if start and frame.env[value] != frame.env[start]:
            frame.say(frame.env[value], frame.env[start])
    return results


def _draw_text(step: Stack) -> str:
    """The number of a layer's first draw."""
    base = step.draw - step.start * step.stride
    times = f"{step.stride} * i" if step.stride != 1 else "i"
    return f"{base} + {times}" if base else times
