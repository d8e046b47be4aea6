"""Loops over chunks, recomputed regions and stacks of layers as statements.

In: Takes, Chunks, Recomputes, Stacks. Out: calls of methods that hold the bodies: `self.chunks(...)`,
`self.recompute(...)`, and a plain loop over the layers' containers.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.codegen.sheet import Layer, attribute
from weft.codegen.statements.frame import Frame
from weft.codegen.statements.reads import Stack, from_outside
from weft.codegen.text import literal
from weft.ir.program import Chunks, Compute, Give, Recompute, Step, Take
from weft.lower.chunks import given, taken
from weft.runtime.layout.execute import covers


def say_take(frame: Frame, step: Take) -> None:
    """Cut the chunk's part out of a value that the rank holds whole."""
    sheet, count = frame.sheet, frame.slots(step.target)
    found = {
        (rank, chunk): taken(frame.program, step, rank, chunk) for rank in sheet.team.ranks for chunk in range(count)
    }
    held = frame.program.values[step.source].layout
    frame.inside.add(step.target)
    if all(one.index is not None and covers(one.index, held.parts_on(r)[0].shape) for (r, _), one in found.items()):
        frame.same(step.target, frame.read(step.source))
        return
    index = {where: one.index for where, one in found.items()}
    words = [frame.env[step.source], frame.look_up(f"{sheet.base(step.target)}_at", index, None)]
    if any(at is None for at in index.values()):
        shapes = {where: one.shape for where, one in found.items()}
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
    words.append(f"gives=[{', '.join(_given(frame, give, count) for give in gives)}]")
    words += ["recompute=True"] if step.recompute else []
    words += ["returned=True"] if step.ends else []
    frame.sheet.need("weft.runtime.program.module", {"Given"})
    names = ", ".join(frame.name(give.target) for give in gives)
    shape = frame.sheet.shape(gives[0].target) if len(gives) == 1 else ""
    frame.say(names, f"self.chunks({', '.join(words)})", shape)


def _given(frame: Frame, give: Give, count: int) -> str:
    """What becomes of one result of a chunk: added up, or placed."""
    sheet, ranks = frame.sheet, frame.sheet.team.ranks
    found = {(rank, chunk): given(frame.program, give, rank, chunk) for rank in ranks for chunk in range(count)}
    if all(one.index is None for one in found.values()):
        return "Given()"
    index = {rank: tuple(found[rank, chunk].index for chunk in range(count)) for rank in ranks}
    shapes = {rank: found[rank, 0].shape for rank in ranks}
    key = sheet.tables.key("here", f"{sheet.base(give.target)}_at", index)
    same = len(set(shapes.values())) == 1
    shape = literal(shapes[ranks[0]]) if same else f"self.here.{sheet.tables.key('here', 'shape', shapes)}"
    return f"Given(self.here.{key}, {shape})"


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
