"""Proves rules by running them: an op cut by its rule, cell by cell, against the op run whole.

`prove("aten.mm.default", (x, w))` builds a graph of that one op, asks for its rule, and for every name that may be cut
(in two and three parts, even, uneven, in groups, empty, nested, and in pairs) gives every cell its parts of the
operands by the layout algebra, runs the local call, puts the outputs together and compares; so for gradients.
Operands that should arrive as addends arrive as random ones. Every linear set is carried likewise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.ops.cuts import cuts
from weft.ir.graph import Graph, Op, Ref, Tensor, map_refs
from weft.ir.layout import COPY, PARTIAL, Axis, Cell, Grid, Layout, verify_layout
from weft.ir.oplayout import Carried, Cut, OpLayout, Use
from weft.ops.derive import cell_view, operands, require
from weft.ops.rule import Call, Rule
from weft.ops.table import rule_for
from weft.runtime.operators.calls import resolve

TOLERANCE = 1e-11


@dataclass(frozen=True)
class Case:
    """One op, its operands' values and what it makes of them."""

    op: Op
    graph: Graph
    rule: Rule
    values: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    cotangents: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]

    @property
    def fixed(self) -> tuple[int, ...]:
        """Operands without a gradient."""
        return tuple(i for i, gradient in enumerate(self.gradients) if gradient is None)


def case(
    target: str,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    fixed: Sequence[int] = (),
    unused: Sequence[int] = (),
) -> Case:
    """The op run whole, with its gradients. `fixed`: operands without one. `unused`: outputs that reach no loss."""
    values: list[torch.Tensor] = []

    def named(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            values.append(arg.detach())
            return Ref(f"x{len(values) - 1}")
        return tuple(map(named, arg)) if isinstance(arg, tuple | list) else arg

    op_args, op_kwargs = named(tuple(args)), tuple((k, named(v)) for k, v in (kwargs or {}).items())
    leaves = _leaves(values, fixed)
    numbered = map_refs((op_args, tuple(v for _, v in op_kwargs)), lambda ref: leaves[int(ref.name[1:])])
    results = _run(target, numbered[0], dict(zip([k for k, _ in op_kwargs], numbered[1], strict=True)))
    tensors = {f"x{i}": _tensor(f"x{i}", value, i not in fixed) for i, value in enumerate(values)}
    tensors |= {f"y{i}": _tensor(f"y{i}", value, True) for i, value in enumerate(results)}
    op = Op("it", target, op_args, op_kwargs, tuple(f"y{i}" for i in range(len(results))))
    graph = Graph("one", tensors, (), (), (), {}, (op,), op.outputs, None)
    cotangents = tuple(_cotangent(value, i in unused) for i, value in enumerate(results))
    gradients = _gradients(results, cotangents, leaves)
    return Case(
        op, graph, rule_for(op, graph), tuple(values), tuple(r.detach() for r in results), cotangents, gradients
    )


def _cotangent(value: torch.Tensor, unused: bool) -> torch.Tensor:
    if unused:
        return torch.zeros_like(value)
    return torch.randn_like(value) if value.is_floating_point() or value.is_complex() else value


def prove(
    target: str,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    empty: bool = True,
    limit: int | None = None,
    fixed: Sequence[int] = (),
    unused: Sequence[int] = (),
) -> Rule:
    """Check the rule of one op in every way it may be used.

    `empty`: also with parts that hold nothing. `limit`: the first so many cuts only.
    """
    torch.manual_seed(0)
    it = case(target, args, kwargs, fixed=fixed, unused=unused)
    check_form(it.rule)
    free = [name for name in it.rule.cuttable if name not in it.rule.algorithms and it.rule.sizes[name] > 1]
    for uses in itertools.islice(cuts(it.rule, empty=empty, names=free), limit):
        for use in uses:
            require(it.op, it.rule, use)
        prove_layout(it, uses)
    for linear in it.rule.linear:
        prove_layout(it, (Carried(linear),))
        for uses in itertools.islice(cuts(it.rule, empty=False, names=free), 0, 16, 8):
            prove_layout(it, (Carried(linear), *uses))
    return it.rule


def check_form(rule: Rule) -> None:
    """What every Rule promises."""
    for dims in (*rule.inputs, *rule.outputs):
        names = [name for one in dims for name in one.names]
        assert len(names) == len(set(names)), f"a name stands twice in one operand: {rule}"
    for name in rule.cuttable:
        if name not in rule.summed and name not in rule.algorithms:
            assert all(any(name in one.names for one in dims) for dims in rule.outputs), f"{name} is lost: {rule}"
    for name in rule.summed:
        for dims in rule.outputs:
            assert not any(name in one.names for one in dims), f"{name} is summed and yet in an output: {rule}"
    assert set(rule.names) <= set(rule.sizes), rule
    assert all(rule.added <= linear for linear in rule.linear), f"{rule} {rule.linear} {rule.added}"


def prove_layout(it: Case, uses: Sequence[Use]) -> None:
    """The op cut in one way: every output and every gradient come out as if it had run whole."""
    axes = tuple(Axis(f"a{i}", len(use.shares) if isinstance(use, Cut) else 2) for i, use in enumerate(uses))
    grid = Grid(axes, tuple(range(_product(axis.size for axis in axes))))
    layout = OpLayout(grid, tuple(uses))
    lying = operands(it.rule, layout)
    for operand in (*lying.inputs, *lying.outputs):
        verify_layout(operand.layout)
    addends = [_addends(value, operand.layout) for value, operand in zip(it.values, lying.inputs, strict=True)]
    out_addends = [_addends(value, operand.grad) for value, operand in zip(it.cotangents, lying.outputs, strict=True)]
    outputs = [_Whole(value, operand.layout) for value, operand in zip(it.results, lying.outputs, strict=True)]
    grads = [_Whole(value, operand.grad) for value, operand in zip(it.gradients, lying.inputs, strict=True)]
    for cell in grid.cells:
        parts = [_part(addends[i], operand.layout, cell) for i, operand in enumerate(lying.inputs)]
        locals_ = _leaves(parts, it.fixed)
        view = cell_view(it.rule, layout, cell)
        results = run_call(local_call(it, view), locals_)
        told = partial(_tell, it, layout, cell)
        for i, (result, whole) in enumerate(zip(results, outputs, strict=True)):
            assert tuple(result.shape) == view.output_shape(i), f"{result.shape} {view.output_shape(i)}: {told()}"
            whole.put(cell, result.detach(), told)
        cotangents = [_part(out_addends[i], operand.grad, cell) for i, operand in enumerate(lying.outputs)]
        for gradient, whole in zip(_gradients(results, cotangents, locals_), grads, strict=True):
            if gradient is not None:
                whole.put(cell, gradient, told)
    for what, wholes in (("output", outputs), ("gradient", grads)):
        for i, whole in enumerate(wholes):
            whole.check(partial(_tell, it, layout, f"{what} {i}"))


def _tell(it: Case, layout: OpLayout, where: object) -> str:
    return f"{where} of {it.op.target} `{it.rule}` cut {layout}"


def local_call(it: Case, view: Any) -> Call:
    """The rule's local call, or the op's own."""
    if it.rule.local is not None:
        return it.rule.local(it.op, view)
    args = map_refs(it.op.args, lambda ref: Ref(ref.name[1:]))
    return Call(it.op.target, args, tuple((k, map_refs(v, lambda ref: Ref(ref.name[1:]))) for k, v in it.op.kwargs))


def run_call(call: Call, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """One cell's call on its local tensors."""
    args = map_refs(call.args, lambda ref: values[int(ref.name)])
    kwargs = {name: map_refs(value, lambda ref: values[int(ref.name)]) for name, value in call.kwargs}
    return _run(call.target, args, kwargs)


class _Whole:
    """A tensor put together from parts: addends added, copies compared."""

    def __init__(self, expected: torch.Tensor | None, layout: Layout) -> None:
        self.expected, self.layout = expected, layout
        self.copies = [i for i, role in enumerate(layout.roles) if role == COPY]
        self.found = None if expected is None else torch.zeros_like(expected)
        self.firsts: dict[Cell, torch.Tensor] = {}

    def put(self, cell: Cell, piece: torch.Tensor, told: Callable[[], str] = str) -> None:
        if self.found is None:
            return
        origin = tuple(0 if i in self.copies else at for i, at in enumerate(cell))
        if origin != cell:
            _compare(piece, self.firsts[origin], lambda: f"a copy differs: {told()}")
            return
        self.firsts[cell] = piece
        index = _index(self.layout.part(cell).ranges)
        if self.found.dtype == torch.bool:
            self.found[index] |= piece
        else:
            self.found[index] += piece

    def check(self, told: Callable[[], str]) -> None:
        if self.found is not None and self.expected is not None:
            _compare(self.found, self.expected, told)


def _compare(found: torch.Tensor, expected: torch.Tensor, told: Callable[[], str]) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, told()
    if not found.numel():
        return
    if not found.is_floating_point() and not found.is_complex():
        assert torch.equal(found, expected), told()
        return
    if torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        return
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, torch.zeros_like(found), found - expected).abs().max().item()
    finite = expected[expected.isfinite()]
    scale = max(1.0, finite.abs().max().item() if finite.numel() else 1.0)
    assert difference <= TOLERANCE * scale, f"differs by {difference}: {told()}"


def _addends(value: torch.Tensor, layout: Layout) -> dict[Cell, torch.Tensor]:
    """For each combination of coordinates on the partial axes an addend; they sum to the value."""
    axes = [i for i, role in enumerate(layout.roles) if role == PARTIAL]
    shares = list(itertools.product(*(range(layout.grid.axes[i].size) for i in axes)))
    floating = value.is_floating_point() or value.is_complex()
    found = {share: torch.randn_like(value) if floating else torch.zeros_like(value) for share in shares[1:]}
    return {shares[0]: value - sum(found.values(), torch.zeros_like(value)) if found else value, **found}


def _part(addends: dict[Cell, torch.Tensor], layout: Layout, cell: Cell) -> torch.Tensor:
    part = layout.part(cell)
    return addends[part.share][_index(part.ranges)].clone()


def _index(ranges: Sequence[Any]) -> Any:
    if not ranges:
        return ...
    if all(len(one) == 1 for one in ranges):
        return tuple(slice(*one[0]) for one in ranges)
    lists = [[i for start, stop in one for i in range(start, stop)] for one in ranges]
    shaped = []
    for position, found in enumerate(lists):
        shape = [1] * len(lists)
        shape[position] = len(found)
        shaped.append(torch.tensor(found, dtype=torch.long).reshape(shape))
    return tuple(shaped)


def _leaves(values: Sequence[torch.Tensor], fixed: Collection[int]) -> list[torch.Tensor]:
    return [
        v.detach().clone().requires_grad_((v.is_floating_point() or v.is_complex()) and i not in fixed)
        for i, v in enumerate(values)
    ]


def _gradients(
    results: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    found: list[torch.Tensor | None] = [None] * len(leaves)
    if pairs and wanted:
        chosen = [leaves[i] for i in wanted]
        outs, cots = [r for r, _ in pairs], [c for _, c in pairs]
        for i, gradient in zip(wanted, torch.autograd.grad(outs, chosen, cots, allow_unused=True), strict=True):
            found[i] = torch.zeros_like(leaves[i]) if gradient is None else gradient
    return tuple(found)


def _run(target: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    result = resolve(target)(*args, **kwargs)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _tensor(name: str, value: torch.Tensor, trained: bool) -> Tensor:
    floating = value.is_floating_point() or value.is_complex()
    return Tensor(name, tuple(value.shape), value.dtype, needs_grad=floating and trained)


def _product(sizes: Iterator[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
