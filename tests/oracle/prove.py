"""The oracle of the static check: a Program is followed on all devices at once, with Contents in place of tensors.

In: a Program. Out: a Report of what was proven; a FaultError at the first thing that is wrong. It proves what
`weft/lower/check.py` does, by other means: layouts written into values are not believed, only what the moves really
carry. See `held` for moves, `contributions` for the backward of ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.oracle.contributions import (
    OpBackward,
    Space,
    gradient_universes,
    prefixed,
    refuse_unplanned,
    summed_space,
    want_addends,
    whole_terms,
)
from tests.oracle.held import (
    Held,
    Mover,
    Tracked,
    Where,
    cut_out,
    put_together,
    refuse_malformed,
    refuse_other_shapes,
    restricted,
    shapes_of,
    show_box,
)
from tests.oracle.terms import WHOLE, Content, Term, Universe, added, full, incomplete, zeros
from weft.errors import LayoutError, PlanError
from weft.ir.graph import Op
from weft.ir.layout import Layout, positions, verify_layout
from weft.ir.merge import merge
from weft.ir.program import Chunks, Compute, Give, Program, Recompute, Reshard, Step, Sync, Take, Use, Value, outputs_of
from weft.ir.ranges import Ranges, ascending, count, tidy, whole
from weft.lower.check import Report
from weft.lower.proof.moves import FaultError, num_shares
from weft.lower.proof.ops import refuse_cuts, refuse_hanging_talk
from weft.ops.book import RuleBook
from weft.ops.derive import cell_view
from weft.ops.rule import CellView, Rule


def follow(program: Program, book: RuleBook | None = None) -> Report:
    """Prove a Program by following it on every device; FaultError if it is wrong."""
    try:
        return Report(**Prover(program, book or RuleBook(program.graph)).run())
    except (LayoutError, PlanError) as error:
        raise FaultError(error.message) from None


class Prover:
    def __init__(self, program: Program, book: RuleBook) -> None:
        self.program, self.graph, self.book = program, program.graph, book
        self.mover = Mover(program.devices)
        self.values: dict[str, Tracked] = {}
        self.universes: dict[str, Universe] = {}
        self.backward: list[tuple[Step, Callable[[], None]]] = []
        # a program without a loss starts backward from every output that it returns
        self.wanted = gradient_universes(program, book, program.outputs if program.loss is None else None)
        self.counts = dict.fromkeys(("operands", "sums", "collectives", "gradients", "parameters"), 0)
        self.synced: dict[str, dict[Where, Held]] = {}
        self.undone: list[OpBackward] = []
        self.step: Step | None = None
        self.leaves: set[str] = set()
        """Uses whose gradients wait for a Sync."""

    def run(self) -> dict[str, int]:
        for name, layout in self.program.stored.items():
            verify_layout(layout, f"the stored layout of {name}")
        for value in self.program.values.values():
            refuse_malformed(value, self.graph)
        self._forward(self.program.steps)
        self._root()
        for step, undo in reversed(self.backward):
            self.step = step
            undo()
        for step in self.program.steps:
            if isinstance(step, Sync):
                self.step = step
                self._sync(step)
        self.step = None
        self._ends()
        self.counts["gradients"] = sum(undo.proven for undo in self.undone)
        self.counts["collectives"] += self.mover.collectives
        return self.counts

    # forward

    def _forward(self, steps: Sequence[Step], inside: str = "") -> None:
        for step in steps:
            self.step = step
            match step:
                case Use():
                    if inside:
                        raise FaultError("a stored tensor is brought in where it would be brought in more than once")
                    self._use(step)
                case Compute():
                    self._compute(step)
                case Take() | Give():
                    if inside != "chunks":
                        raise FaultError("a part of a chunk is taken or given outside of a loop")
                    self._take(step) if isinstance(step, Take) else self._give(step)
                case Reshard():
                    self._reshard(step)
                case Chunks():
                    self._chunks(step)
                case Recompute():
                    self._forward(step.body, "recompute")
                case Sync():
                    pass

    def _use(self, step: Use) -> None:
        value = self._value(step.value)
        stored = self._stored(value.tensor)
        contents: dict[Where, Held] = {
            (part.device, part.slot): full(value.tensor, part.ranges) for part in stored.parts()
        }
        self.universes[value.tensor] = WHOLE
        moved = self.mover.moved(contents, step.moves)
        # a device that stores the tensor but is not to hold the value does not bring it in
        self._hold(Tracked(step.value, {w: held for w, held in moved.items() if value.layout.parts_on(w[0])}))
        parameter = self.graph.parameter_tensors.get(value.tensor)
        if parameter is not None and parameter.trainable and value.grad is not None:
            self.leaves.add(step.value)
        else:
            self.leaves.discard(step.value)

    def _compute(self, step: Compute) -> None:
        if step.op not in self.graph.by_name:
            raise FaultError(f"there is no op {step.op}")
        op = self.graph.by_name[step.op]
        rule = self.book.rule(op, step.layout.algorithm)
        refuse_cuts(op, rule, step, self.program.devices)
        if len(step.inputs) != len(op.inputs) or len(step.outputs) != len(op.outputs):
            raise FaultError(f"{op.name} has {len(op.inputs)} operands and {len(op.outputs)} outputs")
        sources = [self._find(name) for name in step.inputs]
        cells: dict[Where, CellView] = {}
        found: dict[Where, list[Content]] = {}
        for device, mine in step.layout.grid.cells_on.items():
            for slot, cell in enumerate(mine):
                where = (device, slot)
                cells[where] = cell_view(rule, step.layout, cell)
                found[where] = [
                    self._operand(op, i, source, where, cells[where].inputs[i]) for i, source in enumerate(sources)
                ]
        carried = self._carried(op, rule, step, found)
        outputs = self._outputs(op, rule, step, cells, found, carried)
        for output in outputs:
            self._hold(output)
        self.counts["collectives"] += refuse_hanging_talk(op, rule, step)
        want_addends(self.wanted, self.universes, op, rule, carried)
        if op.grad and any(self.graph.tensors[name].needs_grad for name in op.outputs):
            refuse_unplanned(self.program, step, self.wanted)
            undo = OpBackward(self.graph, self.wanted, op, rule, cells, found, carried, sources, outputs)
            self.backward.append((step, undo.run))
            self.undone.append(undo)

    def _operand(self, op: Op, position: int, source: Tracked, where: Where, ranges: tuple[Ranges, ...]) -> Content:
        """What an op finds as its operand: it must be the tensor, on the indices that the rule asks for."""
        content = source.at(*where)
        if content is None:
            raise FaultError(f"operand {position} of {op.name} ({op.inputs[position]}) is not on device {where[0]}")
        if isinstance(content, str):
            raise FaultError(f"operand {position} of {op.name} on device {where[0]}: {content}")
        if content.tensor != op.inputs[position]:
            raise FaultError(f"operand {position} of {op.name} is {content.tensor}, not {op.inputs[position]}")
        if content.dims != tuple(map(tidy, ranges)):
            raise FaultError(
                f"operand {position} of {op.name} ({content.tensor}) on device {where[0]} holds "
                f"{show_box(content.dims)}, but the op needs {show_box(ranges)} there"
            )
        self.counts["operands"] += 1
        return content

    def _carried(self, op: Op, rule: Rule, step: Compute, found: dict[Where, list[Content]]) -> frozenset[int]:
        """The operands that reach the op as addends; the op must pass them on as such. What is added to a sum is one
        of its addends, whole or not: it must not be there in every cell."""
        partial: dict[int, str] = {}
        for contents in found.values():
            for i, content in enumerate(contents):
                reason = incomplete(content, self.universes[content.tensor])
                if reason:
                    partial.setdefault(i, reason)
                elif self.universes[content.tensor] is not WHOLE and not self._in_addends(step, i):
                    self.counts["sums"] += 1
        if not partial:
            return rule.added if summed_space(rule, step) else frozenset()
        for operands in (rule.added, *rule.linear):
            if set(partial) <= operands:
                return operands
        position, reason = next(iter(partial.items()))
        raise FaultError(f"operand {position} of {op.name} ({op.inputs[position]}) is not complete: {reason}")

    def _in_addends(self, step: Compute, position: int) -> bool:
        """True if an operand may be in addends: one that holds all is then not counted as a sum."""
        return num_shares(self.program.values[step.inputs[position]].layout) > 1

    def _outputs(
        self,
        op: Op,
        rule: Rule,
        step: Compute,
        cells: dict[Where, CellView],
        found: dict[Where, list[Content]],
        carried: frozenset[int],
    ) -> list[Tracked]:
        """What the op makes on every cell."""
        space = summed_space(rule, step)
        only_added = carried <= rule.added
        universe: dict[object, Space] = {}
        if only_added:
            universe[""] = space
        for i in carried:
            for base, inner in self.universes[op.inputs[i]].bases.items():
                own = () if i in rule.added else space
                universe["in", i, base] = (*prefixed(i, inner), *own)
        outputs = [Tracked(name, {}) for name in step.outputs]
        made = WHOLE if universe == {"": ()} else Universe(universe)
        for name in op.outputs:
            if self.universes.setdefault(name, made).bases != made.bases:
                raise FaultError(f"{name} is made a second time, as another sum")
        for where, cell in cells.items():
            here = tuple((name, ascending([cell.names[name]])[0]) for name, _ in space)
            for i, output in enumerate(outputs):
                dims = cell.outputs[i]
                terms = [Term("", here, ascending(dims))] if only_added else []
                for j in carried:
                    own = () if j in rule.added else here
                    for term in whole_terms(found[where][j], op, j):
                        terms.append(Term(("in", j, term.base), (*prefixed(j, term.summed), *own), ascending(dims)))
                output.contents[where] = Content(op.outputs[i], tuple(map(tidy, dims)), tuple(terms))
        return outputs

    def _take(self, step: Take) -> None:
        source, target = self._inside(step)
        merged = merge(target.layout.grid)
        if merged is None:
            raise FaultError(f"{step.target} does not fall into chunks")
        result = Tracked(step.target, {})
        used: list[tuple[Where, Where]] = []
        for part in target.layout.parts():
            where = (part.device, part.slot)
            held = self.program.values[step.source].layout.parts_on(part.device)
            if len(held) != 1 or source.at(part.device, 0) is None:
                raise FaultError(f"device {part.device} does not hold {step.source} once")
            content = source.contents[part.device, 0]
            if isinstance(content, str):
                result.contents[where] = content
            elif merged.first(part.cell, target.layout.partial_axes):
                index = positions(held[0], part)
                result.contents[where] = cut_out(content, index)
                used.append((where, (part.device, 0)))
            else:
                result.contents[where] = zeros(content.tensor, part.ranges)
        self._hold(result)

        def undo() -> None:
            for where, origin in used:
                self._pass_back(result, where, source, origin)

        self.backward.append((step, undo))

    def _inside(self, step: Take | Give) -> tuple[Tracked, Value]:
        """Source and target of a step that passes a tensor into or out of a loop."""
        if self._value(step.source).tensor != self._value(step.target).tensor:
            raise FaultError(f"{step.source} and {step.target} are not the same tensor")
        return self._find(step.source), self._value(step.target)

    def _give(self, step: Give) -> None:
        source, target = self._inside(step)
        parts = self.program.values[step.source].layout
        merged = merge(parts.grid)
        if merged is None:
            raise FaultError(f"{step.source} does not fall into chunks")
        adds = bool(merged.shrunk & set(parts.partial_axes))
        result = Tracked(step.target, {})
        used: list[tuple[Where, Where]] = []
        for device in parts.grid.cells_on:
            held = target.layout.parts_on(device)
            if len(held) != 1:
                raise FaultError(f"device {device} does not hold {step.target} once")
            pieces: list[tuple[tuple[Ranges, ...], Content] | str] = []
            for part in parts.parts_on(device):
                where = (device, part.slot)
                content = source.at(*where)
                if content is None or isinstance(content, str):
                    pieces = [content or f"{step.source} is not on device {device}"]
                    break
                index = tuple(whole(size) for size in held[0].shape) if adds else positions(held[0], part)
                if tuple(map(count, index)) != content.shape:
                    raise FaultError(f"{step.source} on device {device} does not fit into {step.target}")
                pieces.append((index, content))
                used.append((where, (device, 0)))
            result.contents[device, 0] = put_together(
                pieces, self.program.values[step.target].tensor, held[0].ranges, adds
            )
        self._hold(result)

        def undo() -> None:
            for where, origin in used:
                grad = result.gradient(origin)
                content = source.contents[source.where(*where)]
                if isinstance(grad, str) or isinstance(content, str):
                    source.receive(where, grad)
                else:
                    source.receive(where, restricted(grad, content))

        self.backward.append((step, undo))

    def _reshard(self, step: Reshard) -> None:
        source = self._find(step.source)
        result = Tracked(step.target, self.mover.moved(dict(source.contents), step.forward))
        self._hold(result)

        def undo() -> None:
            if step.backward is None:
                return
            grads = {where: result.gradient(where) for where in result.contents}
            moved = self.mover.moved(grads, step.backward)
            refuse_other_shapes(moved, shapes_of(source.contents), f"the gradient of {step.source}")
            for where, grad in moved.items():
                source.receive(where, grad)

        self.backward.append((step, undo))

    def _chunks(self, step: Chunks) -> None:
        if not all(isinstance(inner, Compute | Take | Give) for inner in step.body):
            raise FaultError("a loop over chunks may only compute, take and give")
        given = [inner.target for inner in step.body if isinstance(inner, Give)]
        if len(set(given)) < len(given):
            raise FaultError("two parts of one chunk are given to one value")
        counts = {
            tuple(sorted((device, len(cells)) for device, cells in inner.layout.grid.cells_on.items()))
            for inner in step.body
            if isinstance(inner, Compute)
        }
        if len(counts) != 1:
            raise FaultError("the ops of one loop have different numbers of chunks")
        self._forward(step.body, "chunks")
        for name in {name for inner in step.body for name in outputs_of(inner)} - set(given):
            # what a chunk makes dies with it
            self.values.pop(name, None)

    def _pass_back(self, result: Tracked, where: Where, source: Tracked, origin: Where) -> None:
        grad, content = result.gradient(where), source.contents[origin]
        if isinstance(grad, Content) and isinstance(content, Content):
            grad = Content(grad.tensor, content.dims, grad.terms)
        source.receive(origin, grad)

    def _stored(self, tensor: str) -> Layout:
        """Where a tensor lies before the step: one part on each of its devices."""
        layout = self.program.stored.get(tensor)
        if layout is None:
            raise FaultError(f"{tensor} is not stored anywhere")
        is_parted = layout.grid.repeats or num_shares(layout) > 1
        if is_parted or not set(layout.grid.devices) <= set(range(self.program.devices)):
            raise FaultError(f"{tensor} cannot be stored as {layout}")
        return layout

    def _value(self, name: str) -> Value:
        if name not in self.program.values:
            raise FaultError(f"there is no value {name}")
        return self.program.values[name]

    def _hold(self, made: Tracked) -> None:
        """A value as a step leaves it. Where it lies is declared too, and its shapes there are relied on."""
        declared = {(part.device, part.slot): part.shape for part in self._value(made.name).layout.parts()}
        refuse_other_shapes(made.contents, declared, made.name)
        self.values[made.name] = made

    def _find(self, name: str) -> Tracked:
        if name not in self.values:
            raise FaultError(f"{name} is read before it is made")
        return self.values[name]

    # backward and the ends

    def _root(self) -> None:
        if self.program.loss is None and not self.program.roots:
            if self.wanted:
                raise FaultError("gradients are needed, but backward starts nowhere")
            return
        if self.program.loss is not None:
            self._start(self.program.loss, self.graph.loss)
        for name in self.program.roots:
            tensor = self._value(name).tensor
            if self.program.outputs.get(tensor) != name or self.program.loss is not None:
                raise FaultError(f"backward starts from {name}, which the caller does not get")
            self._start(name, tensor)

    def _start(self, name: str, tensor: str | None) -> None:
        """A gradient enters, once and whole, on every device that holds what it is of."""
        root = self._find(name)
        if self.program.values[name].grad is None:
            raise FaultError(f"backward starts from %{name}, for which no gradient is planned")
        for where, content in root.contents.items():
            if isinstance(content, str) or content.tensor != tensor:
                raise FaultError(f"backward starts from {name}, which does not hold {tensor}")
            root.receive(where, full(content.tensor, content.dims, "root"))

    def _sync(self, step: Sync) -> None:
        stored = self._stored(step.parameter)
        if len(step.sources) != len(step.moves):
            raise FaultError(f"{len(step.sources)} uses of {step.parameter} have {len(step.moves)} lists of moves")
        places = {(part.device, part.slot): part.shape for part in stored.parts()}
        total: dict[Where, list[Held]] = {}
        for name, moves in zip(step.sources, step.moves, strict=True):
            moved = self.mover.moved(self._collected(name), moves)
            refuse_other_shapes(moved, places, f"the gradient of {step.parameter}")
            for where, grad in moved.items():
                total.setdefault(where, []).append(grad)
        universe = Universe(self.wanted.get(step.parameter, {}))
        for part in stored.parts():
            grads_here = total.get((part.device, 0), [])
            broken = [grad for grad in grads_here if isinstance(grad, str)]
            good = [grad for grad in grads_here if isinstance(grad, Content)]
            if broken or any(grad.dims != tuple(map(tidy, part.ranges)) for grad in good):
                reason = broken[0] if broken else "it does not arrive where the parameter is stored"
                raise FaultError(f"the gradient of {step.parameter} on device {part.device}: {reason}")
            reason = incomplete(added([zeros(step.parameter, part.ranges), *good]), universe)
            if reason:
                raise FaultError(f"the gradient of {step.parameter} on device {part.device} is not complete: {reason}")
            self.counts["parameters"] += 1
        self.synced[step.parameter] = {}

    def _collected(self, name: str) -> dict[Where, Held]:
        """The gradients of a use, which a Sync takes away: a second one finds zeros."""
        value, grad = self._find(name), self._value(name).grad
        if grad is None:
            raise FaultError(f"{name} collects no gradient")
        declared = {(part.device, part.slot): part.shape for part in grad.parts()}
        refuse_other_shapes(value.contents, declared, f"the gradient of {name}")
        if name in self.leaves:
            self.leaves.remove(name)
            return {where: value.gradient(where) for where in value.contents}
        return {
            where: content if isinstance(content, str) else zeros(content.tensor, content.dims)
            for where, content in value.contents.items()
        }

    def _ends(self) -> None:
        """Outputs and updates are complete where they belong, and no parameter was forgotten."""
        every = range(self.program.devices)
        for tensor, name in self.program.outputs.items():
            shape, given = self.graph.tensors[tensor].sizes, self.program.given.get(tensor)
            everywhere = {device: tuple(map(whole, shape)) for device in every}
            places = everywhere if given is None else {part.device: part.ranges for part in given.parts()}
            self._end(tensor, name, places)
        for buffer in self.graph.buffers:
            if buffer.update is not None:
                parts = self.program.stored[buffer.tensor].parts()
                name = self.program.updates.get(buffer.tensor, "the update")
                self._end(buffer.update, name, {part.device: part.ranges for part in parts})
        for one in self.graph.inputs:
            if self.wanted.get(one.tensor):
                self._handed_back(one.tensor)
        for parameter in self.graph.parameters:
            if self.wanted.get(parameter.tensor) and parameter.tensor not in self.synced:
                raise FaultError(f"the gradient of {parameter.tensor} is never brought to where it is stored")

    def _handed_back(self, tensor: str) -> None:
        """The gradient of an input is complete on every device that has it: the caller goes on with it on each."""
        if tensor not in self.program.entries:
            raise FaultError(f"the gradient of the input {tensor} never goes back to the caller")
        entry = self._find(self.program.entries[tensor])
        for device in sorted(set(self._stored(tensor).grid.devices)):
            if (device, 0) not in entry.contents:
                raise FaultError(f"the input {tensor} does not enter on device {device}")
            grad = entry.gradient((device, 0))
            reason = grad if isinstance(grad, str) else incomplete(grad, Universe(self.wanted[tensor]))
            if reason:
                raise FaultError(f"the gradient of the input {tensor} on device {device} is not complete: {reason}")
            self.counts["parameters"] += 1

    def _end(self, tensor: str, name: str, places: dict[int, tuple[Ranges, ...]]) -> None:
        value = self._find(name)
        for device, ranges in places.items():
            content = value.at(device, 0)
            if not isinstance(content, Content):
                raise FaultError(f"{tensor} is not on device {device} at the end: {content or 'nothing is'}")
            if content.tensor != tensor or content.dims != tuple(map(tidy, ranges)):
                raise FaultError(
                    f"{tensor} on device {device} holds {show_box(content.dims)} of {content.tensor} at the end"
                )
            reason = incomplete(content, self.universes.get(tensor, WHOLE))
            if reason:
                raise FaultError(f"{tensor} on device {device} is not complete at the end: {reason}")
            self.counts["sums"] += 1
