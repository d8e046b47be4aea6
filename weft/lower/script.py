"""Program -> Script: one rank's share of a Program, spelled out.

In: a Program and a rank. Out: the rank's Script. Every layout has become positions in local tensors, every rule the
call that this rank's cell makes, and every value is freed after its last use. Nothing is decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from weft.ir.graph import Op, Ref
from weft.ir.layout import Layout, positions
from weft.ir.merge import merge
from weft.ir.oplayout import OpLayout
from weft.ir.program import (
    Chunks,
    Compute,
    Give,
    Move,
    Program,
    Recompute,
    Reshard,
    Step,
    Sync,
    Take,
    Use,
    Value,
    outputs_of,
    values_read,
)
from weft.lower.shared_heads import GROUPED, shares_heads, with_shared_heads
from weft.lower.transfer import Transfers
from weft.ops.arguments import numbered
from weft.ops.book import RuleBook
from weft.ops.derive import cell_view
from weft.ops.rule import Call, Group
from weft.runtime import script as rt
from weft.runtime.random import Draw


class Writer:
    """Spells out steps for one rank."""

    def __init__(self, program: Program, rank: int, book: RuleBook, shared: Transfers) -> None:
        self.program, self.rank, self.book = program, rank, book
        self.graph = program.graph
        self.shared = shared

    def steps(self, steps: Sequence[Step], chunk: int | None = None) -> list[rt.Instruction]:
        """The rank's instructions for a list of steps; `chunk` inside a loop."""
        return [made for step in steps for made in self.step(step, chunk)]

    def step(self, step: Step, chunk: int | None) -> Iterable[rt.Instruction]:
        match step:
            case Use():
                return self.use(step)
            case Compute():
                return self.compute(step, chunk)
            case Take():
                assert chunk is not None
                return [self.take(step, chunk)]
            case Give():
                assert chunk is not None
                return [self.give(step, chunk)]
            case Reshard():
                return self.reshard(step)
            case Chunks():
                return self.loop(step)
            case Recompute():
                body, leaving = self.steps(step.body, chunk), self._leaving(step)
                return [rt.Region(with_inner_frees(body, leaving), leaving)] if body else []
            case Sync():
                return []

    def use(self, step: Use) -> Iterable[rt.Instruction]:
        value = self.program.values[step.value]
        transfers = self.transfers(step.moves)
        parameter = self.graph.parameter_tensors.get(value.tensor)
        holds = bool(value.layout.parts_on(self.rank))
        if not holds and not transfers:
            return []
        leaf = parameter is not None and parameter.trainable and value.grad is not None
        return [rt.Load(step.value, value.tensor, transfers, leaf and holds, value.tensor)]

    def compute(self, step: Compute, chunk: int | None) -> Iterable[rt.Instruction]:
        op = self.graph.by_name[step.op]
        cells = step.layout.grid.cells_on.get(self.rank, ())
        slots = range(len(cells)) if chunk is None else [chunk]
        return [self._run(op, step, slot) for slot in slots]

    def _run(self, op: Op, step: Compute, slot: int) -> rt.Run:
        cell = step.layout.grid.cells_on[self.rank][slot]
        rule = self.book.rule(op, step.layout.algorithm)
        if rule.local is None:
            call = Call(op.target, *numbered(op))
        else:
            view = cell_view(rule, step.layout, cell, self.book.inputs(op), self.book.outputs(op))
            call = rule.local(op, view)
        if shares_heads(self.program, op, step):
            call = replace(call, kwargs=(*(one for one in call.kwargs if one[0] != GROUPED), (GROUPED, True)))
        keys = [rt.Local(name, self._slot(name, slot)) for name in step.inputs]

        def bind(arg: Any) -> Any:
            if isinstance(arg, Group):
                return rt.Peers(peers(step.layout, arg.name, cell))
            if isinstance(arg, Draw):
                return arg
            if isinstance(arg, tuple | list):
                return tuple(bind(item) for item in arg)
            return keys[int(arg.name)] if isinstance(arg, Ref) else arg

        autocast = op.autocast
        return rt.Run(
            target=call.target,
            args=tuple(map(bind, call.args)),
            kwargs=tuple((name, bind(value)) for name, value in call.kwargs),
            outputs=tuple(rt.Local(name, slot) for name in step.outputs),
            op=op.name,
            place=str(op.source) if op.source.line else op.name,
            grad=op.grad,
            autocast=None if autocast is None else (autocast.device, autocast.dtype, autocast.enabled),
            function=op.function if call.target == op.target else call.function,
        )

    def _slot(self, name: str, slot: int) -> int:
        """A value that a device holds once serves all of its slots."""
        return slot if len(self.program.values[name].layout.parts_on(self.rank)) > 1 else 0

    def take(self, step: Take, chunk: int) -> rt.Take:
        source, target = self.program.values[step.source], self.program.values[step.target]
        (held,) = source.layout.parts_on(self.rank)
        part = target.layout.parts_on(self.rank)[chunk]
        merged = merge(target.layout.grid)
        assert merged is not None
        empty = not merged.first(part.cell, target.layout.partial_axes)
        index = None if empty else positions(held, part)
        return rt.Take(step.source, rt.Local(step.target, chunk), index, part.shape)

    def give(self, step: Give, chunk: int) -> rt.Give:
        source, target = self.program.values[step.source], self.program.values[step.target]
        (held,) = target.layout.parts_on(self.rank)
        part = source.layout.parts_on(self.rank)[chunk]
        merged = merge(source.layout.grid)
        assert merged is not None
        index = None if merged.shrunk & set(source.layout.partial_axes) else positions(held, part)
        return rt.Give(rt.Local(step.source, chunk), step.target, index, held.shape)

    def reshard(self, step: Reshard) -> Iterable[rt.Instruction]:
        source, target = self.program.values[step.source], self.program.values[step.target]
        forward = self.transfers(step.forward)
        backward = None if step.backward is None else self.transfers(step.backward)
        mine = source.layout.parts_on(self.rank), target.layout.parts_on(self.rank)
        if not forward and not backward and not any(mine):
            return []
        tensor = self.graph.tensors[source.tensor]
        producer = self.graph.producers.get(source.tensor)
        return [
            rt.Reshard(
                step.source,
                step.target,
                forward,
                backward,
                shapes(source.layout, self.rank),
                shapes(target.layout, self.rank),
                tensor.dtype,
                "" if producer is None else producer.place,
            )
        ]

    def loop(self, step: Chunks) -> Iterable[rt.Instruction]:
        layouts = [inner.layout for inner in step.body if isinstance(inner, Compute)]
        count = len(layouts[0].grid.cells_on.get(self.rank, ()))
        if not count:
            return []
        bodies = tuple(with_inner_frees(self.steps(step.body, chunk), ()) for chunk in range(count))
        gives = tuple(inner.target for inner in step.body if isinstance(inner, Give))
        return [rt.Loop(bodies, step.recompute, gives)]

    def sync(self, step: Sync) -> rt.Sync | None:
        transfers = tuple(self.transfers(moves) for moves in step.moves)
        sources = tuple(self.program.values[name] for name in step.sources)
        held = tuple(shapes(_gradient(value), self.rank) for value in sources)
        stored = self.program.stored[step.parameter].parts_on(self.rank)
        if not stored and not any(transfers) and not any(held):
            return None
        return rt.Sync(
            step.parameter,
            step.sources,
            held,
            transfers,
            stored[0].shape if stored else None,
            self.graph.tensors[step.parameter].dtype,
        )

    def transfers(self, moves: Iterable[Move]) -> tuple[rt.Transfer, ...]:
        """The moves that this rank takes part in."""
        return tuple(made for move in moves if (made := self.shared.of(move, self.rank)) is not None)

    def _leaving(self, region: Recompute) -> tuple[str, ...]:
        """Values made inside a region that are read outside of it."""
        made = {name for step in region.body for name in outputs_of(step)}
        inside = Counter(name for step in region.body for name in values_read(step))
        return tuple(sorted(name for name in made if self._all_reads[name] > inside[name] or name in self._returned))

    @cached_property
    def _returned(self) -> set[str]:
        return set(self.program.ends)

    @cached_property
    def _all_reads(self) -> Counter[str]:
        return Counter(name for step in self.program.steps for name in values_read(step))


def scripts(program: Program) -> tuple[rt.Script, ...]:
    """The scripts of all ranks."""
    book, shared = RuleBook(program.graph), Transfers()
    return tuple(script(program, rank, book, shared) for rank in range(program.devices))


def script(program: Program, rank: int, book: RuleBook | None = None, shared: Transfers | None = None) -> rt.Script:
    """Everything one rank needs to run its share of the program; `scripts` makes all at once."""
    program = with_shared_heads(program)
    writer = Writer(program, rank, book or RuleBook(program.graph), shared or Transfers())
    instructions = writer.steps(program.steps)
    syncs = tuple(made for step in program.syncs if (made := writer.sync(step)) is not None)
    kept = {*program.ends, *(name for sync in syncs for name in sync.sources)}
    stored = {name: layout.parts_on(rank)[0].ranges for name, layout in program.stored.items() if layout.parts_on(rank)}
    holds_loss = program.loss is not None and bool(program.values[program.loss].layout.parts_on(rank))
    return rt.Script(
        rank=rank,
        num_ranks=program.devices,
        instructions=with_frees(instructions, kept),
        syncs=syncs,
        stored=stored,
        loss=program.loss if holds_loss else None,
        outputs=program.outputs,
        updates=program.updates,
    )


def with_frees(instructions: Sequence[rt.Instruction], kept: set[str]) -> tuple[rt.Instruction, ...]:
    """Forget every value after the instruction that reads it last."""
    last: dict[str, int] = {}
    for at, instruction in enumerate(instructions):
        for key in keys_of(instruction):
            last[key] = at
    out: list[rt.Instruction] = []
    for at, instruction in enumerate(instructions):
        out.append(instruction)
        done = tuple(sorted(key for key in keys_of(instruction) if last[key] == at and key not in kept))
        if done:
            out.append(rt.Free(done))
    return tuple(out)


def with_inner_frees(body: Sequence[rt.Instruction], leaving: Sequence[str]) -> tuple[rt.Instruction, ...]:
    """The same inside a loop or region: only what is made there may be forgotten there."""
    made: set[str] = set()
    for instruction in body:
        match instruction:
            case rt.Run(outputs=outputs):
                made.update(local.key for local in outputs)
            case rt.Take(target=local):
                made.add(local.key)
            case rt.Reshard(target=key):
                made.add(key)
    outside = {key for instruction in body for key in keys_of(instruction)} - made
    return with_frees(body, outside | set(leaving))


def keys_of(instruction: rt.Instruction) -> set[str]:
    """All values that an instruction reads or makes."""
    match instruction:
        case rt.Load(key):
            return {key}
        case rt.Run():
            return {local.key for local in instruction.outputs} | _locals((instruction.args, instruction.kwargs))
        case rt.Take(source, target):
            return {source, target.key}
        case rt.Give(source, target):
            return {source.key, target}
        case rt.Reshard(source, target):
            return {source, target}
        case rt.Loop(bodies):
            return {key for body in bodies for inner in body for key in keys_of(inner)} | set(instruction.gives)
        case rt.Region(body):
            return {key for inner in body for key in keys_of(inner)}
        case rt.Sync() | rt.Free():
            return set()


def _locals(arg: Any) -> set[str]:
    if isinstance(arg, rt.Local):
        return {arg.key}
    if isinstance(arg, tuple | list):
        return {key for item in arg for key in _locals(item)}
    return set()


def peers(layout: OpLayout, name: str, cell: tuple[int, ...]) -> tuple[int, ...]:
    """The devices along the axes that cut a name, from this cell's place."""
    axes = set(layout.axes_cutting(name))
    return tuple(
        device
        for other, device in zip(layout.grid.cells, layout.grid.devices, strict=True)
        if all(other[i] == cell[i] for i in range(len(cell)) if i not in axes)
    )


def shapes(layout: Layout, rank: int) -> tuple[tuple[int, ...], ...]:
    """Local shapes of a rank's slots."""
    return tuple(part.shape for part in layout.parts_on(rank))


def _gradient(value: Value) -> Layout:
    assert value.grad is not None
    return value.grad
