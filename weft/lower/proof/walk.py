"""The proof of a Program: layouts are its types.

In: a Program, whole or a piece of a pipeline. Out: the counts of what was proven, or a FaultError at the step that is
wrong. The work depends on the steps and on the distinct ops, layouts and moves, hardly on the number of devices.

Every value is shown to *lie as* its declared layout (`moves.py`): a Use starts from a stored tensor, moves carry
layout to layout, an op asks for the layouts that its rule derives and gives such (`ops.py`). Backward alike: what a
use contributes to a gradient lies as the declared gradient layout of the value it reads; uses are told apart by op
and operand, each is read once, so contributions to one value add up without counting twice; reshards carry them up
to the value that an op made, or that a Use brought in: its *top*. There the gradient layout has no addends left,
so the gradient is complete if no use is missing: every use that backward reaches must have such a way up.
Values are made once, ops run once.

Where backward starts, a gradient enters as one more contribution, that of a use outside of the Program: 1 at the loss,
or at a root what the caller gives, the same on every device that holds an index. So it lies as the value does with no
addends, which must be the declared gradient layout, and it has a way up like that of any use. Every output that
a gradient flows from is a root, once; with a loss there are no roots.

Where the gradient of an input goes back to the caller, it is read at one value, the entry: brought in by a Use, with a
gradient that lies as the input is stored, without addends, so complete on every device if no use is missing. It must be
the top of every use of that input, else a contribution would never reach the caller. What backward does not reach
is idle: nothing flows into it, so nothing is asked of it but that moves declared for its gradient can be carried out.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.cost.reshard import same_parts
from weft.ir.graph import Op
from weft.ir.layout import Layout, copied_on
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
)
from weft.lower.proof.chunks import ChunkTypes
from weft.lower.proof.moves import FaultError, MoveProofs, difference, num_shares
from weft.lower.proof.ops import OpType, OpTypes
from weft.ops.book import RuleBook


class TypedProof:
    """One walk over the steps; `step` is where it stands."""

    def __init__(self, program: Program, book: RuleBook) -> None:
        self.program, self.graph = program, program.graph
        self.step: Step | None = None
        self.moves = MoveProofs(program.devices)
        self.ops = OpTypes(book, self.moves)
        self.chunks = ChunkTypes(self.same)
        # a program without a loss starts backward from every output that it returns
        self.starts = frozenset(
            name
            for name in (program.outputs if program.loss is None else [self.graph.loss])
            if name is not None and self.graph.tensors[name].needs_grad
        )
        self.wanted = _uses_reached(program, self.starts)
        self.counts = dict.fromkeys(("operands", "sums", "collectives", "gradients", "parameters"), 0)
        self.readable: set[str] = set()
        self.top: dict[str, str | None] = {}
        """For each value that is made the one at which its gradients end up; None if they do not leave it."""
        self.whole: dict[str, bool] = {}
        """For each tensor whether it is no sum."""
        self.run_ops: set[str] = set()
        self.leaves: set[str] = set()
        """Uses of trained parameters, whose gradients wait for a Sync."""
        self.fed: set[str] = set()
        """Tops into which a gradient flows."""
        self._same: dict[tuple[Layout, Layout], bool] = {}
        self._paths: dict[tuple[Layout, tuple[Move, ...], Layout], int] = {}

    def run(self) -> dict[str, int]:
        """The counts of what was proven."""
        for tensor, layout in self.program.stored.items():
            self.moves.sound(layout, f"the stored layout of {tensor}")
        for value in self.program.values.values():
            self._refuse_malformed(value)
        self._forward(self.program.steps)
        self.step = None
        self._starts()
        self._refuse_missing_uses()
        self._syncs()
        self._outputs()
        self._updates()
        self._entries()
        return self.counts

    # layouts and values

    def same(self, a: Layout, b: Layout) -> bool:
        """True if both layouts are surely the same parts in the same places."""
        if a is b:
            return True
        known = self._same.get((a, b))
        if known is None:
            known = self._same[a, b] = same_parts(a, b)
        return known

    def _refuse_malformed(self, value: Value) -> None:
        if value.tensor not in self.graph.tensors:
            raise FaultError(f"%{value.name} is of {value.tensor}, which is no tensor of the graph")
        sizes, layout, grad = self.graph.tensors[value.tensor].sizes, value.layout, value.grad
        if layout.shape != sizes:
            raise FaultError(f"%{value.name} has a layout of another shape than {list(sizes)}: {layout}")
        self.moves.sound(layout, f"%{value.name}")
        if grad is not None:
            self.moves.sound(grad, f"the gradient of %{value.name}")
            if (layout.grid, layout.ranges, layout.axes_of) != (grad.grid, grad.ranges, grad.axes_of):
                raise FaultError(f"%{value.name} lies as {layout}, but its gradient in other places: {grad}")

    def _value(self, name: str) -> Value:
        value = self.program.values.get(name)
        if value is None:
            raise FaultError(f"there is no value %{name}")
        return value

    def _read(self, name: str) -> Value:
        value = self._value(name)
        if name not in self.readable:
            raise FaultError(f"%{name} is read before it is made, or outside of the loop that makes it")
        return value

    def _made(self, name: str, top: str | None) -> None:
        if name in self.top:
            raise FaultError(f"%{name} is made twice")
        self.readable.add(name)
        self.top[name] = top

    def _stored(self, tensor: str) -> Layout:
        """Where a tensor lies before the step: one part on each of its devices."""
        layout = self.program.stored.get(tensor)
        if layout is None:
            raise FaultError(f"{tensor} is not stored anywhere")
        if layout.grid.repeats or num_shares(layout) > 1:
            raise FaultError(f"{tensor} cannot be stored in addends, or in several parts on one device: {layout}")
        return layout

    def _path(self, source: Layout, moves: tuple[Move, ...], target: Layout, what: str, name: str) -> None:
        """Moves lead from layout to layout; each is proven, and their collectives are counted."""
        key = (source, moves, target)
        known = self._paths.get(key)
        if known is None:
            now, known = source, 0
            for move in moves:
                known += self.moves.of(move)
                if not self.same(now, move.source):
                    raise FaultError(f"{what}%{name} before its {move.kind} {difference(now, move.source)}")
                now = move.target
            if not self.same(now, target):
                raise FaultError(f"{what}%{name} {difference(now, target)}")
            self._paths[key] = known
        self.counts["collectives"] += known

    # forward

    def _forward(self, steps: Sequence[Step], inside: str = "") -> None:
        for step in steps:
            self.step = step
            match step:
                case Use():
                    if inside:
                        raise FaultError(f"%{step.value} is brought in where it would be brought in more than once")
                    self._use(step)
                case Compute():
                    self._compute(step)
                case Reshard():
                    self._reshard(step)
                case Take() | Give():
                    if inside != "chunks":
                        raise FaultError(f"a chunk of %{step.source} is taken or given outside of a loop")
                    self._pass(step)
                case Chunks():
                    self._loop(step)
                case Recompute():
                    self._forward(step.body, "recompute")
                case Sync():
                    if inside:
                        raise FaultError(f"{step.parameter} is synced where it would be synced more than once")

    def _use(self, step: Use) -> None:
        value = self._value(step.value)
        if value.tensor in self.graph.producers:
            raise FaultError(f"%{step.value} is brought in as if it were stored, but an op makes {value.tensor}")
        stored = self._stored(value.tensor)
        self._path(stored, step.moves, value.layout, "", step.value)
        self._made(step.value, step.value)
        self.whole[value.tensor] = True
        parameter = self.graph.parameter_tensors.get(value.tensor)
        if parameter is not None and parameter.trainable and value.grad is not None:
            self.leaves.add(step.value)

    def _reshard(self, step: Reshard) -> None:
        source, target = self._passed(step)
        self._path(source.layout, step.forward, target.layout, "", step.target)
        top = None
        if step.backward is not None:
            if source.grad is None or target.grad is None:
                lacking = step.source if source.grad is None else step.target
                raise FaultError(f"a gradient is brought back, but none is planned for %{lacking}")
            self._path(target.grad, step.backward, source.grad, "the gradient of ", step.source)
            top = self.top[step.source]
        self._made(step.target, top)

    def _passed(self, step: Reshard | Take | Give) -> tuple[Value, Value]:
        """Source and target, which must be of one tensor."""
        source, target = self._read(step.source), self._value(step.target)
        if source.tensor != target.tensor:
            raise FaultError(f"%{step.source} is of {source.tensor}, but %{step.target} of {target.tensor}")
        return source, target

    def _loop(self, step: Chunks) -> None:
        if not all(isinstance(inner, Compute | Take | Give) for inner in step.body):
            raise FaultError("a loop over chunks may only compute, take and give")
        given = [inner.target for inner in step.body if isinstance(inner, Give)]
        if len(set(given)) < len(given):
            raise FaultError("two parts of one chunk are given to one value")
        cells = {
            tuple((device, len(cells)) for device, cells in inner.layout.grid.cells_on.items())
            for inner in step.body
            if isinstance(inner, Compute)
        }
        if len(cells) != 1:
            raise FaultError("the ops of one loop have different numbers of chunks")
        self._forward(step.body, "chunks")
        # what a chunk makes dies with it
        self.readable -= {name for inner in step.body for name in outputs_of(inner)} - set(given)

    def _pass(self, step: Take | Give) -> None:
        source, target = self._passed(step)
        back = source.grad is not None and target.grad is not None
        (self.chunks.take if isinstance(step, Take) else self.chunks.give)(source, target, back)
        self._made(step.target, self.top[step.source] if back else None)

    def _compute(self, step: Compute) -> None:
        op = self.graph.by_name.get(step.op)
        if op is None:
            raise FaultError(f"there is no op {step.op}")
        if step.op in self.run_ops:
            raise FaultError(f"{step.op} runs twice")
        if len(step.inputs) != len(op.inputs) or len(step.outputs) != len(op.outputs):
            raise FaultError(f"{op.name} has {len(op.inputs)} operands and {len(op.outputs)} outputs")
        self.run_ops.add(step.op)
        typed = self.ops.of(op, step)
        for position, name in enumerate(step.inputs):
            self._operand(op, typed, position, name)
        self.counts["operands"] += typed.cells * len(op.inputs)
        self.counts["collectives"] += typed.talk
        for position, name in enumerate(step.outputs):
            self._output(op, typed, position, name)

    def _operand(self, op: Op, typed: OpType, position: int, name: str) -> None:
        """An operand lies as the op asks; if a gradient flows, it does so as declared, and has a way up."""
        value, asked, tensor = self._read(name), typed.operands.inputs[position], op.inputs[position]
        if value.tensor != tensor:
            raise FaultError(f"operand {position} of {op.name} is {value.tensor} (%{name}), not {tensor}")
        if not self.same(value.layout, asked.layout):
            told = difference(value.layout, asked.layout)
            raise FaultError(f"operand {position} of {op.name} ({tensor}, read as %{name}) {told}")
        if not self.whole[tensor] and num_shares(value.layout) == 1:
            self.counts["sums"] += len(value.layout.grid.devices)
        if (op.name, position) in self.wanted.get(tensor, ()):
            if value.grad is None:
                raise FaultError(
                    f"the gradient from {op.name}, operand {position}, is lost: none is planned for %{name}"
                )
            if not self.same(value.grad, asked.grad):
                told = difference(asked.grad, value.grad)
                raise FaultError(f"the gradient of %{name} from {op.name}, operand {position}, {told}")
            self._flows_up(name)

    def _flows_up(self, name: str) -> None:
        top = self.top[name]
        if top is None:
            raise FaultError(f"the gradient of %{name} is lost: nothing brings it back to where it is made")
        self.fed.add(top)

    def _output(self, op: Op, typed: OpType, position: int, name: str) -> None:
        value, made, tensor = self._value(name), typed.operands.outputs[position], op.outputs[position]
        if value.tensor != tensor:
            raise FaultError(f"output {position} of {op.name} is {tensor}, but %{name} is of {value.tensor}")
        if not self.same(value.layout, made.layout):
            raise FaultError(f"output {position} of {op.name} (%{name}) {difference(made.layout, value.layout)}")
        self.whole[tensor] = typed.whole
        self._made(name, name)
        if tensor in self.wanted:
            if value.grad is None:
                raise FaultError(f"the gradient of {tensor} is lost: none is planned for %{name}, where {op.name} runs")
            if not self.same(value.grad, made.grad):
                told = difference(value.grad, made.grad)
                raise FaultError(f"the gradient of %{name}, where {op.name} runs, {told}")
            self.counts["gradients"] += typed.cells

    # where backward starts

    def _starts(self) -> None:
        roots = self.program.roots
        if self.program.loss is not None:
            if roots:
                raise FaultError(f"backward starts from the loss, and from %{roots[0]}")
            if not self.wanted:
                raise FaultError(f"backward starts from %{self.program.loss}, but no gradient is needed")
            self._start(self.program.loss, self.graph.loss)
            return
        for name in roots:
            tensor = self._value(name).tensor
            if self.program.outputs.get(tensor) != name:
                raise FaultError(f"backward starts from %{name}, which the caller does not get")
            self._start(name, tensor)
        tensors = [self._value(name).tensor for name in roots]
        if sorted(tensors) != sorted(self.starts):
            odd = sorted(self.starts.symmetric_difference(tensors)) or tensors
            raise FaultError(f"backward must start once from each output with a gradient; it does not for {odd[0]}")

    def _start(self, name: str, tensor: str | None) -> None:
        """A gradient enters, once and without addends, on every device that holds what it is of."""
        root = self._read(name)
        if root.tensor != tensor:
            raise FaultError(f"backward starts from %{name}, which holds {root.tensor}, not {tensor}")
        if root.grad is None or num_shares(root.grad) > 1:
            raise FaultError(f"backward starts from %{name}, whose gradient lies as {root.grad}, not without addends")
        self._flows_up(name)

    def _refuse_missing_uses(self) -> None:
        """Every op from which a gradient flows runs; each of its operands was shown to have a way up."""
        for tensor, uses in self.wanted.items():
            for op, position in uses:
                if op not in self.run_ops:
                    raise FaultError(f"the gradient of {tensor} lacks {op}, operand {position}, which never runs")

    # the ends

    def _syncs(self) -> None:
        parameters: set[str] = set()
        collected: set[str] = set()
        for step in self.program.syncs:
            self.step = step
            if step.parameter in parameters:
                raise FaultError(
                    f"{step.parameter} is synced twice: the second finds no gradients, so its gradient is not complete"
                )
            parameters.add(step.parameter)
            stored = self._stored(step.parameter)
            if len(step.sources) != len(step.moves):
                raise FaultError(f"{len(step.sources)} uses of {step.parameter} have {len(step.moves)} lists of moves")
            for name, moves in zip(step.sources, step.moves, strict=True):
                value = self._read(name)
                if name not in self.leaves or value.tensor != step.parameter or value.grad is None:
                    raise FaultError(f"%{name} is no use of {step.parameter} that collects a gradient")
                # the first takes the gradient away: a source that is listed again adds zeros
                collected.add(name)
                self._path(value.grad, moves, stored, f"the gradient of {step.parameter} from ", name)
            self.counts["parameters"] += len(stored.grid.devices)
        self.step = None
        for name in sorted(self.fed - collected):
            tensor = self._value(name).tensor
            if tensor in self.graph.parameter_tensors:
                raise FaultError(
                    f"the gradient of {tensor} is never brought to where it is stored: no sync collects that of %{name}"
                )

    def _outputs(self) -> None:
        every = tuple(range(self.program.devices))
        for tensor, name in self.program.outputs.items():
            needed = self.program.given.get(tensor) or copied_on(self.graph.tensors[tensor].sizes, every)
            self._end(tensor, name, needed)

    def _updates(self) -> None:
        for buffer in self.graph.buffers:
            if buffer.update is not None:
                if buffer.tensor not in self.program.updates:
                    raise FaultError(f"{buffer.tensor} never gets its new content {buffer.update}")
                self._end(buffer.update, self.program.updates[buffer.tensor], self._stored(buffer.tensor))

    def _end(self, tensor: str, name: str, needed: Layout) -> None:
        """What is read after the last step is complete where it belongs."""
        value = self._read(name)
        if value.tensor != tensor:
            raise FaultError(f"%{name} holds {value.tensor} at the end, not {tensor}")
        if needed.grid.repeats or num_shares(needed) > 1:
            raise FaultError(f"{tensor} is to be given on in addends, or in several parts on one device: {needed}")
        if not self.same(value.layout, needed):
            raise FaultError(f"{tensor} at the end (%{name}) {difference(value.layout, needed)}")
        self.counts["sums"] += len(needed.grid.devices)

    def _entries(self) -> None:
        """The gradient of an input is complete on every device that has it: the caller goes on with it on each."""
        entries = self.program.entries
        for one in self.graph.inputs:
            if one.tensor not in self.wanted:
                continue
            if one.tensor not in entries:
                raise FaultError(f"the gradient of the input {one.tensor} never goes back to the caller")
            entry, stored = self._read(entries[one.tensor]), self._stored(one.tensor)
            if entry.tensor != one.tensor or entry.grad is None or self.top[entry.name] != entry.name:
                raise FaultError(f"the gradient of the input {one.tensor} is read at %{entry.name}, where it is not")
            if not self.same(entry.grad, stored):
                raise FaultError(f"the gradient of the input {one.tensor} {difference(entry.grad, stored)}")
            self.counts["parameters"] += len(stored.grid.devices)
        for name in sorted(self.fed):
            tensor = self._value(name).tensor
            stays = tensor in self.graph.producers or tensor in self.graph.parameter_tensors
            if not stays and entries.get(tensor) != name:
                raise FaultError(f"the gradient of the input {tensor} that reaches %{name} never goes to the caller")


def _uses_reached(program: Program, starts: frozenset[str]) -> dict[str, set[tuple[str, int]]]:
    """For every tensor that backward reaches the uses (op, operand) that contribute to its gradient."""
    graph = program.graph
    wanted: dict[str, set[tuple[str, int]]] = {name: set() for name in starts}
    for op in reversed(graph.ops):
        if op.grad and any(name in wanted for name in op.outputs):
            for position, name in enumerate(op.inputs):
                if graph.tensors[name].needs_grad:
                    wanted.setdefault(name, set()).add((op.name, position))
    return wanted
