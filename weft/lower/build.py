"""Builder: writes the steps of a Program, op by op.

It keeps for every tensor the values that hold it so far. An operand that lies as its op needs it, with a gradient that
arrives as its producer needs it, is used as it is; otherwise a Reshard makes it so, once for all ops that need the
same layout and gradient layout. Parameters, buffers, inputs and constants come through Use from where they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.cost.reshard import Resharder, same_parts
from weft.ir.graph import Graph, Op
from weft.ir.layout import Layout
from weft.ir.merge import Merge
from weft.ir.oplayout import OpLayout
from weft.ir.program import Chunks, Compute, Give, Move, Reshard, Step, Sync, Take, Use, Value
from weft.lower.chains import Chain
from weft.ops.book import RuleBook
from weft.ops.derive import Operand


@dataclass(frozen=True)
class Need:
    """A layout that an op needs an operand in, and the layout its gradient comes in (None: none flows)."""

    layout: Layout
    grad: Layout | None


class Builder:
    """Collects steps and values. One use: `compute` and `chain` in execution order, then `sync`."""

    def __init__(
        self,
        graph: Graph,
        layouts: Mapping[str, OpLayout],
        book: RuleBook,
        resharder: Resharder,
        stored: Mapping[str, Layout],
    ) -> None:
        self.graph, self.layouts, self.book = graph, layouts, book
        self.resharder, self.stored = resharder, stored
        self.steps: list[Step] = []
        self.values: dict[str, Value] = {}
        self._made: dict[str, str] = {}
        self._holding: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def compute(self, op: Op) -> None:
        """Run an op on all of its cells."""
        step = self._step(op, self.fetch)
        for name, value in zip(op.outputs, step.outputs, strict=True):
            self._hold(name, value)
        self.steps.append(step)

    def _step(self, op: Op, bring: Callable[[str, Need], str]) -> Compute:
        """An op with fresh values for what it makes; `bring` gives those that it reads."""
        layout = self.layouts[op.name]
        operands = self.book.operands(op, layout)
        reads = zip(op.inputs, operands.inputs, strict=True)
        inputs = tuple(bring(name, self.need(op, name, operand)) for name, operand in reads)
        makes = zip(op.outputs, operands.outputs, strict=True)
        return Compute(op.name, layout, inputs, tuple(self._make(name, operand) for name, operand in makes))

    def _hold(self, name: str, value: str) -> None:
        """From here on a tensor is found in this value, as its producer left it."""
        self._made[name] = value
        self._holding.setdefault(name, []).append(value)

    def chain(self, chain: Chain) -> None:
        """Run ops chunk by chunk."""
        body: list[Step] = []
        inside: dict[str, str] = {}
        taken: dict[tuple[str, Need], str] = {}

        def bring(name: str, need: Need) -> str:
            return inside[name] if name in inside else self._enter(name, need, chain.merge, body, taken)

        for op in chain.ops:
            step = self._step(op, bring)
            inside.update(zip(op.outputs, step.outputs, strict=True))
            body.append(step)
            body.extend(
                self._leave(name, inside[name], chain) for name in op.outputs if self._seen_outside(name, chain)
            )
        first = self.layouts[chain.ops[0].name]
        axis = next(
            layout_axis.name
            for layout_axis, groups in zip(first.grid.axes, chain.merge.groups, strict=True)
            if len(groups) < layout_axis.size
        )
        self.steps.append(Chunks(axis, tuple(body), first.recompute is not None))

    def need(self, op: Op, name: str, operand: Operand) -> Need:
        """What the op needs of an operand. A gradient flows if the tensor wants one and the op passes one on."""
        tensors = self.graph.tensors
        flows = tensors[name].needs_grad and op.grad and any(tensors[out].needs_grad for out in op.outputs)
        return Need(operand.layout, operand.grad if flows else None)

    def fetch(self, name: str, need: Need) -> str:
        """A value that holds the tensor as needed, made if there is none yet."""
        for held in self._holding.get(name, ()):
            if self._serves(self.values[held], need):
                return held
        if self._is_stored(name):
            value = self._new(name, need.layout, need.grad)
            self.steps.append(Use(value, self._path(self.stored[name], need.layout, name)))
        else:
            source = self.values[self._made[name]]
            value = self._new(name, need.layout, need.grad)
            backward = None
            if need.grad is not None:
                assert source.grad is not None, f"{name} needs a gradient but its producer takes none"
                backward = self._path(need.grad, source.grad, name)
            forward = self._path(source.layout, need.layout, name)
            self.steps.append(Reshard(source.name, value, forward, backward))
        self._holding.setdefault(name, []).append(value)
        return value

    def enter(self, name: str) -> str:
        """An input whose gradient goes back to the caller: from here on it is like what an op has made."""
        value = self._new(name, self.stored[name], self.stored[name])
        self.steps.append(Use(value, ()))
        self._hold(name, value)
        return value

    def _is_stored(self, name: str) -> bool:
        """True for what comes through Use wherever it is needed."""
        return name in self.stored and name not in self._made

    def sync(self, parameter: str) -> None:
        """Bring the gradients of all uses of a parameter to where it is stored."""
        sources = tuple(held for held in self._holding.get(parameter, ()) if self.values[held].grad is not None)
        if not sources:
            return
        moves = []
        for source in sources:
            grad = self.values[source].grad
            assert grad is not None
            moves.append(self._path(grad, self.stored[parameter], parameter))
        self.steps.append(Sync(parameter, sources, tuple(moves)))

    def made(self, name: str) -> str:
        """The value in which a tensor's producer left it."""
        return self._made[name]

    def _serves(self, value: Value, need: Need) -> bool:
        """True if a value can be used where `need` is asked for."""
        if not same_parts(value.layout, need.layout):
            return False
        if need.grad is None:
            return True
        return value.grad is not None and same_parts(need.grad, value.grad)

    def _make(self, name: str, operand: Operand) -> str:
        grad = operand.grad if self.graph.tensors[name].needs_grad else None
        return self._new(name, operand.layout, grad)

    def _enter(self, name: str, need: Need, merge: Merge, body: list[Step], taken: dict[tuple[str, Need], str]) -> str:
        """A value for use inside a loop: stored tensors slot by slot, others cut out of what the device holds."""
        if self._is_stored(name):
            return self.fetch(name, need)
        if (name, need) not in taken:
            grad = None if need.grad is None else merge.layout(need.grad)
            source = self.fetch(name, Need(merge.layout(need.layout), grad))
            taken[name, need] = self._new(name, need.layout, need.grad)
            body.append(Take(source, taken[name, need]))
        return taken[name, need]

    def _leave(self, name: str, value: str, chain: Chain) -> Give:
        """Put together outside the loop what its chunks made."""
        held = self.values[value]
        grad = None if held.grad is None else chain.merge.layout(held.grad)
        target = self._new(name, chain.merge.layout(held.layout), grad)
        self._hold(name, target)
        return Give(value, target)

    def _seen_outside(self, name: str, chain: Chain) -> bool:
        members = {op.name for op in chain.ops}
        readers = {op.name for op in self.graph.consumers[name]}
        updates = {buffer.update for buffer in self.graph.buffers}
        return bool(readers - members) or name in self.graph.outputs or name in updates

    def _new(self, name: str, layout: Layout, grad: Layout | None) -> str:
        """A fresh value: named as the tensor, with a number after the first."""
        taken = self._counts.get(name, 0)
        self._counts[name] = taken + 1
        value = f"{name}~{taken}" if taken else name
        self.values[value] = Value(value, name, layout, grad)
        return value

    def _path(self, source: Layout, target: Layout, name: str) -> tuple[Move, ...]:
        return self.resharder.path(source, target, self.graph.tensors[name].dtype.itemsize)
