"""Backward of ops, followed without running it: which contributions make up each gradient, and what each cell adds.

The gradient of a tensor is the sum over all of its uses; the contribution of one use is a sum over the names that the
operand lacks. A Universe lists them all; the gradient that arrives at an op, or at a stored parameter, must hold
each exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.oracle.held import Tracked, Where
from tests.oracle.terms import Content, Term, Universe, incomplete
from weft.ir.graph import Graph, Op
from weft.ir.program import Compute, Program, walk
from weft.ir.ranges import Ranges, ascending, volume, whole
from weft.lower.proof.moves import FaultError
from weft.ops.book import RuleBook
from weft.ops.rule import CellView, Rule

Space = tuple[tuple[str, Ranges], ...]
"""Names that were summed away, with all of their indices."""

Wanted = dict[str, dict[object, Space]]
"""For each tensor the bases of its gradient."""


def flows(graph: Graph, op: Op, name: str) -> bool:
    """True if a gradient flows from the op to this operand."""
    tensors = graph.tensors
    return tensors[name].needs_grad and op.grad and any(tensors[out].needs_grad for out in op.outputs)


def missing_names(rule: Rule, position: int) -> tuple[str, ...]:
    """The names over which an operand's gradient is a sum: those it lacks, unless the value is added or an
    algorithm completes it."""
    own = {name for one in rule.inputs[position] for name in one.names}
    found = []
    for name in rule.names:
        if name in own or (name in rule.summed and position in rule.added):
            continue
        exchange = rule.algorithms.get(name)
        if exchange is not None and exchange.gradient == "copy":
            continue
        found.append(name)
    return tuple(found)


def gradient_universes(program: Program, book: RuleBook, roots: Iterable[str] | None = None) -> Wanted:
    """For every tensor that the roots depend on: the uses whose contributions make up its gradient.

    `roots`: the outputs that backward starts from; the loss if not given."""
    graph = program.graph
    starts = [graph.loss] if roots is None else list(roots)
    chosen = {step.op: step.layout.algorithm for step in walk(program.steps) if isinstance(step, Compute)}
    wanted: Wanted = {name: {"root": ()} for name in starts if name is not None and graph.tensors[name].needs_grad}
    for op in reversed(graph.ops):
        if not any(name in wanted for name in op.outputs):
            continue
        rule = book.rule(op, chosen.get(op.name, ""))
        for position, name in enumerate(op.inputs):
            if flows(graph, op, name):
                space = tuple((missing, whole(rule.sizes[missing])) for missing in missing_names(rule, position))
                wanted.setdefault(name, {})["use", op.name, position, ""] = space
    return wanted


def refuse_unplanned(program: Program, step: Compute, wanted: Wanted) -> None:
    """Generated code keeps an output out of autograd if no gradient is planned for it."""
    for name in step.outputs:
        value = program.values.get(name)
        if value is not None and value.tensor in wanted and value.grad is None:
            raise FaultError(f"a gradient of {value.tensor} is needed, but none is planned where {step.op} makes it")


def want_addends(
    wanted: Wanted, universes: Mapping[str, Universe], op: Op, rule: Rule, carried: frozenset[int]
) -> None:
    """What is multiplied with an addend gets its gradient in addends: one for each that there is."""
    factors = sorted(carried - rule.added)
    for position, name in enumerate(op.inputs):
        uses = wanted.get(name, {})
        space = uses.get(("use", op.name, position, ""))
        if not factors or position in carried or space is None:
            continue
        del uses["use", op.name, position, ""]
        for j in factors:
            for base, inner in universes[op.inputs[j]].bases.items():
                uses["use", op.name, position, ("in", j, base)] = (*space, *prefixed(j, inner))


def summed_space(rule: Rule, step: Compute) -> Space:
    """The names whose cut leaves addends in the output, with all of their indices."""
    names = [
        name
        for name in step.layout.cut_names
        if name in rule.summed or (name in rule.algorithms and rule.algorithms[name].output == "partial")
    ]
    return tuple((name, whole(rule.sizes[name])) for name in sorted(names))


def prefixed(position: int, summed: Space) -> Space:
    return tuple((f"{position}.{name}", ranges) for name, ranges in summed)


def whole_terms(content: Content, op: Op, position: int) -> list[Term]:
    """The terms of a local tensor, each on all of its indices; pieces of one addend are joined first."""
    target = ascending(content.dims)
    groups: dict[tuple[object, Space], list[Term]] = {}
    for term in content.terms:
        groups.setdefault((term.base, term.summed), []).append(term)
    out = []
    for terms in groups.values():
        covered = sum(volume(term.box) for term in terms)
        copies, rest = divmod(covered, volume(target)) if volume(target) else (1, 0)
        if rest:
            raise FaultError(f"operand {position} of {op.name} holds an addend on some of its indices only")
        out.extend([Term(terms[0].base, terms[0].summed, target)] * copies)
    return out


@dataclass
class OpBackward:
    """Backward of one op on all of its cells."""

    graph: Graph
    wanted: Wanted
    op: Op
    rule: Rule
    cells: dict[Where, CellView]
    found: dict[Where, list[Content]]
    carried: frozenset[int]
    sources: list[Tracked]
    outputs: list[Tracked]
    proven: int = 0

    def run(self) -> None:
        for where, cell in self.cells.items():
            if self._arrives(where):
                for i, name in enumerate(self.op.inputs):
                    if flows(self.graph, self.op, name):
                        self._contribute(i, where, cell)

    def _arrives(self, where: Where) -> bool:
        """True if a gradient arrives in the cell; it must be complete then. None at all is told by what lacks later; an
        empty one is always there."""
        grads = {
            name: output.gradient(where)
            for name, output in zip(self.op.outputs, self.outputs, strict=True)
            if name in self.wanted
        }
        if not any(isinstance(grad, str) or grad.terms or not volume(grad.dims) for grad in grads.values()):
            return False
        for name, grad in grads.items():
            reason = grad if isinstance(grad, str) else incomplete(grad, Universe(self.wanted[name]))
            if reason:
                raise FaultError(f"the gradient of {name} on device {where[0]}, where {self.op.name} runs: {reason}")
            self.proven += 1
        return True

    def _contribute(self, position: int, where: Where, cell: CellView) -> None:
        content = self.found[where][position]
        summed = tuple((name, ascending([cell.names[name]])[0]) for name in missing_names(self.rule, position))
        box = ascending(content.dims)
        base = ("use", self.op.name, position)
        terms = [Term((*base, ""), summed, box)]
        factors = self.carried - self.rule.added
        if factors and position not in self.carried:
            # what the op multiplies it with arrives in addends, and so does its gradient
            terms = [
                Term((*base, ("in", j, term.base)), (*summed, *prefixed(j, term.summed)), box)
                for j in sorted(factors)
                for term in whole_terms(self.found[where][j], self.op, j)
            ]
        source = self.sources[position]
        source.receive(source.where(*where), Content(content.tensor, content.dims, tuple(terms)))
