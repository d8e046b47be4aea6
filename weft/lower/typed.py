"""The fast proof of a Program: layouts are its types.

In: a Program. Out: the counts of what was proven, or None where types alone do not decide; the full prover does then.
Promised: only what the full prover would accept is accepted, with its counts. The work depends on the steps and on the
distinct ops, layouts and moves, hardly on the number of devices.

Every value is shown to *lie as* its declared layout (`typed_moves`): a Use starts from a stored tensor, moves carry
layout to layout, an op asks for the layouts that its rule derives and gives such (`typed_ops`). Backward alike: what a
use contributes to a gradient lies as the declared gradient layout of the value it reads; uses are told apart by op
and operand, each is read once, so contributions to one value add up without counting twice; reshards carry them up
to the value that an op made, or that a parameter's Use brought in. There the gradient layout has no addends left,
so the gradient is complete if no use is missing: every use that the loss depends on must have such a way up.
Values are made once, ops run once.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.cost.reshard import same_parts
from weft.ir.graph import Op
from weft.ir.layout import Layout
from weft.ir.program import Chunks, Compute, Give, Move, Program, Recompute, Reshard, Step, Sync, Take, Use, Value
from weft.lower.contributions import gradient_universes
from weft.lower.script import outputs_of
from weft.lower.typed_chunks import ChunkTypes
from weft.lower.typed_moves import MoveProofs, UndecidedError, num_shares, require
from weft.lower.typed_ops import OpType, OpTypes
from weft.ops.book import RuleBook

ONE, ALL, SOME = "one", "all", "some"
"""Which shares of a value in addends are not zero; "" for a value that has no addends."""


def prove_by_types(program: Program, book: RuleBook) -> dict[str, int] | None:
    """The counts of what was proven, or None if types do not decide."""
    try:
        return TypedProof(program, book).run()
    except UndecidedError:
        return None


class TypedProof:
    """One walk over the steps."""

    def __init__(self, program: Program, book: RuleBook) -> None:
        self.program, self.graph, self.book = program, program.graph, book
        self.moves = MoveProofs(program.devices)
        self.ops = OpTypes(book, self.moves)
        self.chunks = ChunkTypes(self.same)
        self.wanted = gradient_universes(program, book)
        self.counts = dict.fromkeys(("operands", "sums", "collectives", "gradients", "parameters"), 0)
        self.readable: set[str] = set()
        self.spread: dict[str, str] = {}
        self.top: dict[str, str | None] = {}
        """The value at which gradients of this one end up; None if they do not leave it."""
        self.whole: dict[str, bool] = {}
        """For each tensor whether it is no sum."""
        self.run_ops: set[str] = set()
        self.leaves: set[str] = set()
        self.fed: set[str] = set()
        """Leaves into which a gradient flows."""
        self._same: dict[tuple[Layout, Layout], bool] = {}
        self._paths: dict[tuple[Layout, tuple[Move, ...], Layout], int] = {}

    def run(self) -> dict[str, int]:
        require(not self.program.roots and not self.program.entries, "gradients come from the caller or go there")
        for layout in self.program.stored.values():
            self.moves.sound(layout)
        for value in self.program.values.values():
            self._well_formed(value)
        self._forward(self.program.steps)
        self._root()
        self._all_used()
        self._syncs()
        self._ends()
        return self.counts

    # layouts

    def same(self, a: Layout, b: Layout) -> bool:
        """True if both layouts are surely the same parts in the same places."""
        if a is b:
            return True
        known = self._same.get((a, b))
        if known is None:
            known = self._same[a, b] = same_parts(a, b)
        return known

    def _well_formed(self, value: Value) -> None:
        require(value.tensor in self.graph.tensors, "no such tensor")
        sizes = self.graph.tensors[value.tensor].sizes
        require(value.layout.shape == sizes, "a layout of another shape")
        self.moves.sound(value.layout)
        if value.grad is not None:
            self.moves.sound(value.grad)
            places = (value.layout.grid, value.layout.ranges, value.layout.axes_of)
            require(places == (value.grad.grid, value.grad.ranges, value.grad.axes_of), "a gradient in other places")

    def _value(self, name: str) -> Value:
        require(name in self.program.values, "no such value")
        return self.program.values[name]

    def _read(self, name: str) -> Value:
        require(name in self.readable, "read before it is made")
        return self._value(name)

    def _made(self, name: str, spread: str, top: str | None) -> None:
        require(name not in self.spread, "made twice")
        self.readable.add(name)
        self.spread[name], self.top[name] = spread, top

    def _path(self, source: Layout, moves: tuple[Move, ...], target: Layout) -> None:
        """Moves lead from layout to layout; each is proven, and their collectives are counted."""
        key = (source, moves, target)
        known = self._paths.get(key)
        if known is None:
            now, known = source, 0
            for move in moves:
                known += self.moves.of(move).collectives
                require(self.same(now, move.source), "a move from another layout")
                now = move.target
            require(self.same(now, target), "moves to another layout")
            self._paths[key] = known
        self.counts["collectives"] += known

    def _spread_after(self, spread: str, moves: tuple[Move, ...]) -> str:
        for move in moves:
            proven = self.moves.of(move)
            if proven.target_shares == 1:
                spread = ""
            elif spread in ("", ONE) or (spread == ALL and proven.takers == 1):
                spread = ONE
            elif spread == SOME or proven.takers < proven.target_shares:
                spread = SOME
        return spread

    # forward

    def _forward(self, steps: Sequence[Step], inside: str = "") -> None:
        for step in steps:
            match step:
                case Use():
                    require(not inside, "a use inside of a region")
                    self._use(step)
                case Compute():
                    self._compute(step)
                case Reshard():
                    self._reshard(step)
                case Take() | Give():
                    require(inside == "chunks", "a chunk's part outside of a loop")
                    self._pass(step)
                case Chunks():
                    self._loop(step)
                case Recompute():
                    self._forward(step.body, "recompute")
                case Sync():
                    require(not inside, "a sync inside of a region")

    def _stored(self, tensor: str) -> Layout:
        layout = self.program.stored.get(tensor)
        require(layout is not None and not layout.grid.repeats and num_shares(layout) == 1, "not stored plainly")
        assert layout is not None
        return layout

    def _use(self, step: Use) -> None:
        value = self._value(step.value)
        require(value.tensor not in self.graph.producers, "an op makes it")
        self._path(self._stored(value.tensor), step.moves, value.layout)
        self._made(step.value, self._spread_after("", step.moves), step.value)
        self.whole[value.tensor] = True
        parameter = self.graph.parameter_tensors.get(value.tensor)
        if parameter is not None and parameter.trainable and value.grad is not None:
            self.leaves.add(step.value)

    def _reshard(self, step: Reshard) -> None:
        source, target = self._read(step.source), self._value(step.target)
        require(source.tensor == target.tensor, "another tensor")
        self._path(source.layout, step.forward, target.layout)
        top = None
        if step.backward is not None:
            require(source.grad is not None and target.grad is not None, "no gradient is declared")
            assert source.grad is not None
            assert target.grad is not None
            self._path(target.grad, step.backward, source.grad)
            top = self.top[step.source]
        self._made(step.target, self._spread_after(self.spread[step.source], step.forward), top)

    def _loop(self, step: Chunks) -> None:
        require(all(isinstance(inner, Compute | Take | Give) for inner in step.body), "a step that no loop may hold")
        given = {inner.target for inner in step.body if isinstance(inner, Give)}
        cells = {
            tuple((device, len(cells)) for device, cells in inner.layout.grid.cells_on.items())
            for inner in step.body
            if isinstance(inner, Compute)
        }
        require(len(cells) == 1, "ops of one loop have different numbers of chunks")
        self._forward(step.body, "chunks")
        # what a chunk makes dies with it
        self.readable -= {name for inner in step.body for name in outputs_of(inner)} - given

    def _pass(self, step: Take | Give) -> None:
        source, target = self._read(step.source), self._value(step.target)
        require(source.tensor == target.tensor, "another tensor")
        back = source.grad is not None and target.grad is not None
        spread = self.spread[step.source]
        if isinstance(step, Take):
            shares_out = self.chunks.take(source, target, back)
            spread = (SOME if spread in (ALL, SOME) else ONE) if shares_out else spread
        else:
            self.chunks.give(source, target, back)
            spread = "" if num_shares(target.layout) == 1 else spread
        self._made(step.target, spread, self.top[step.source] if back else None)

    def _compute(self, step: Compute) -> None:
        op = self.graph.by_name.get(step.op)
        require(op is not None and step.op not in self.run_ops, "no such op, or it runs twice")
        assert op is not None
        require(len(step.inputs) == len(op.inputs) and len(step.outputs) == len(op.outputs), "other operands")
        self.run_ops.add(step.op)
        typed = self.ops.of(op, step)
        for position, name in enumerate(step.inputs):
            self._operand(op, typed, position, name)
        self.counts["operands"] += typed.cells * len(op.inputs)
        self.counts["collectives"] += typed.talk
        spread = self._spread_out(step, typed)
        for position, name in enumerate(step.outputs):
            self._output(op, typed, position, name, spread)

    def _operand(self, op: Op, typed: OpType, position: int, name: str) -> None:
        """An operand lies as the op asks; if a gradient flows, it does so as declared, and has a way up."""
        value, asked, tensor = self._read(name), typed.operands.inputs[position], op.inputs[position]
        require(value.tensor == tensor and self.same(value.layout, asked.layout), "an operand lies otherwise")
        if not self.whole[tensor]:
            shares, spread = num_shares(value.layout), self.spread[name]
            require(shares == 1 or spread != SOME, "which shares are complete is not known")
            if shares == 1 or spread == ONE:
                self.counts["sums"] += typed.cells // shares
        if ("use", op.name, position, "") in self.wanted.get(tensor, {}):
            require(value.grad is not None and self.same(value.grad, asked.grad), "a gradient lies otherwise")
            self._flows_up(name)

    def _flows_up(self, name: str) -> None:
        top = self.top[name]
        require(top is not None, "a gradient is lost")
        assert top is not None
        self.fed.add(top)

    def _spread_out(self, step: Compute, typed: OpType) -> str:
        """Which shares of the outputs are not zero, where they have several."""
        if not typed.carried:
            return ALL
        states = {self.spread[step.inputs[i]] for i in typed.carried}
        if ALL in states:
            return ALL
        return ONE if len(typed.carried) == 1 and states == {ONE} else SOME

    def _output(self, op: Op, typed: OpType, position: int, name: str, spread: str) -> None:
        value, made, tensor = self._value(name), typed.operands.outputs[position], op.outputs[position]
        require(value.tensor == tensor and self.same(value.layout, made.layout), "an output lies otherwise")
        self.whole[tensor] = typed.whole
        self._made(name, spread if num_shares(value.layout) > 1 else "", name)
        if tensor in self.wanted:
            require(value.grad is not None and self.same(value.grad, made.grad), "a gradient arrives otherwise")
            self.counts["gradients"] += typed.cells

    # backward and the ends

    def _root(self) -> None:
        if not self.wanted:
            require(self.program.loss is None, "backward starts, but no gradient is needed")
            return
        require(self.program.loss is not None, "backward starts nowhere")
        assert self.program.loss is not None
        root = self._read(self.program.loss)
        require(root.tensor == self.graph.loss and self.top[root.name] is not None, "backward starts elsewhere")
        require(root.grad is not None and num_shares(root.grad) == 1, "the gradient of the loss is in addends")

    def _all_used(self) -> None:
        """Every op from which a gradient flows runs; each of its operands was shown to have a way up."""
        for bases in self.wanted.values():
            for base in bases:
                require(not isinstance(base, tuple) or base[1] in self.run_ops, "a use is missing")

    def _syncs(self) -> None:
        parameters: set[str] = set()
        collected: set[str] = set()
        for step in self.program.syncs:
            require(step.parameter not in parameters, "synced twice")
            parameters.add(step.parameter)
            stored = self._stored(step.parameter)
            require(len(step.sources) == len(step.moves), "other numbers of moves")
            for name, moves in zip(step.sources, step.moves, strict=True):
                value = self._read(name)
                require(name in self.leaves and name not in collected, "not a use, or collected twice")
                require(value.tensor == step.parameter and value.grad is not None, "of another parameter")
                assert value.grad is not None
                collected.add(name)
                self._path(value.grad, moves, stored)
            self.counts["parameters"] += len(stored.grid.devices)
        for name in self.fed:
            if self._value(name).tensor in self.graph.parameter_tensors:
                require(name in collected, "a gradient is never brought to its parameter")

    def _ends(self) -> None:
        devices = set(range(self.program.devices))
        for tensor, name in self.program.outputs.items():
            value = self._end(tensor, name)
            require(set(value.layout.grid.devices) == devices, "an output is not on every device")
            require(not any(table and len(table) > 1 for table in value.layout.ranges), "an output is not whole")
            self.counts["sums"] += len(devices)
        for buffer in self.graph.buffers:
            if buffer.update is not None:
                stored = self._stored(buffer.tensor)
                value = self._end(buffer.update, self.program.updates.get(buffer.tensor, ""))
                require(self.same(value.layout, stored), "an update lies otherwise")
                self.counts["sums"] += len(stored.grid.devices)

    def _end(self, tensor: str, name: str) -> Value:
        value = self._read(name)
        require(value.tensor == tensor and num_shares(value.layout) == 1, "another tensor, or a sum")
        require(not value.layout.grid.repeats, "several parts on a device")
        return value
