"""Runs an op cut by its rule with one thread per cell, so that cells can talk, and compares with the op run whole.

`cut(it, [("c", (1, 2))])` gives every cell its parts by the layout algebra, runs the local calls forward and backward
at the same time, puts outputs and gradients together by their declared roles, and compares; copies must agree. It
also counts the collectives of each cell against what the rule's Exchange declares.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.ops.cuts import cuts
from tests.ops.prover import check_form
from weft.ir.graph import Graph, Op, Ref, Tensor
from weft.ir.layout import COPY, Axis, Cell, Grid, Layout, verify_layout
from weft.ir.oplayout import Carried, Cut, OpLayout, plain_cut
from weft.ops.arguments import numbered
from weft.ops.derive import cell_view, operands, require
from weft.ops.rule import Call, CellView, Group, Rule
from weft.ops.table import rule_for
from weft.runtime.operators.calls import resolve
from weft.runtime.random import Draw, Stream

TOLERANCE = 1e-12
STREAM = Stream(seed=3, step=1, microbatch=0)


@dataclass(frozen=True)
class Case:
    """One op, its operands' values, what it makes of them, and gradients for given ones of its results."""

    op: Op
    graph: Graph
    rule: Rule
    values: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    cotangents: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]


class Meeting:
    """Where the members of one communicator meet: each brings a tensor, each takes all of them."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * size

    def swap(self, position: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.brought[position] = tensor.detach().clone()
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found


@dataclass
class ThreadComm:
    """A communicator between threads."""

    rank: int
    size: int
    meeting: Meeting
    num_calls: int = 0

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.num_calls += 1
        return self.meeting.swap(self.rank, tensor)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        found = torch.stack(self.all_gather(tensor))
        return {"sum": found.sum, "max": found.amax, "min": found.amin}[op](0)


def whole_case(
    target: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    fixed: Sequence[int] = (),
    unused: Sequence[int] = (),
    draw: int | None = None,
) -> Case:
    """The op run whole. `fixed`: operands without gradient. `unused`: outputs that reach no loss. With a draw, the
    whole is one cell of the local call."""
    values: list[torch.Tensor] = []

    def named(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            values.append(arg.detach())
            return Ref(f"x{len(values) - 1}")
        return tuple(map(named, arg)) if isinstance(arg, tuple | list) else arg

    op_args, op_kwargs = named(tuple(args)), tuple((k, named(v)) for k, v in (kwargs or {}).items())
    inputs = {f"x{i}": _tensor(f"x{i}", value, i not in fixed) for i, value in enumerate(values)}
    leaves = [_leaf(value, tensor) for value, tensor in zip(values, inputs.values(), strict=True)]
    op = Op("it", target, op_args, op_kwargs, (), draw=draw)
    results = _call(Call(target, *numbered(op)), leaves, {})
    outputs = {f"y{i}": _tensor(f"y{i}", value, True) for i, value in enumerate(results)}
    op = replace(op, outputs=tuple(outputs))
    graph = Graph("one", inputs | outputs, (), (), (), {}, (op,), op.outputs, None)
    rule = rule_for(op, graph)
    if draw is not None:
        view = cell_view(rule, OpLayout(Grid((), (0,)), ()), ())
        results = _call(local_call(op, rule, view), leaves, {})
    cotangents = tuple(_cotangent(value, i in unused) for i, value in enumerate(results))
    gradients = _gradients(results, cotangents, leaves)
    return Case(op, graph, rule, tuple(values), tuple(r.detach() for r in results), cotangents, gradients)


def _cotangent(value: torch.Tensor, unused: bool) -> torch.Tensor:
    if unused:
        return torch.zeros_like(value)
    return torch.randn_like(value) if value.is_floating_point() else value


def _tensor(name: str, value: torch.Tensor, trained: bool) -> Tensor:
    return Tensor(name, tuple(value.shape), value.dtype, trained and value.is_floating_point())


def _leaf(value: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(tensor.needs_grad)


def local_call(op: Op, rule: Rule, view: CellView) -> Call:
    """The rule's local call, or the op's own."""
    return Call(op.target, *numbered(op)) if rule.local is None else rule.local(op, view)


def _gradients(
    results: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Of every leaf that wants one; zeros where nothing reaches it."""
    pairs = [(result, told) for result, told in zip(results, cotangents, strict=True) if result.requires_grad]
    if pairs:
        torch.autograd.backward([result for result, _ in pairs], [told for _, told in pairs])
    return tuple(
        None if not leaf.requires_grad else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for leaf in leaves
    )


def prove_cells(it: Case, names: Sequence[str] | None = None, *, empty: bool = True) -> Case:
    """The op cut in every way, and every operand carried that it is linear in."""
    check_form(it.rule)
    for uses in cuts(it.rule, names=names, empty=empty):
        cut_by(it, uses)
    for linear in it.rule.linear:
        cut_by(it, (Carried(linear),))
        for name in it.rule.cuttable if names is None else names:
            cut_by(it, (plain_cut(name, it.rule.sizes[name], (1, 1)), Carried(linear)))
    return it


def cut(it: Case, cuts: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """The op cut along names, in proportion to shares."""
    cut_by(it, tuple(plain_cut(name, it.rule.sizes[name], shares) for name, shares in cuts))


def cut_by(it: Case, uses: tuple[Cut | Carried, ...]) -> None:
    """The op cut in one way."""
    for use in uses:
        if isinstance(use, Cut):
            require(it.op, it.rule, use)
    axes = tuple(Axis(f"a{i}", len(use.shares) if isinstance(use, Cut) else 2) for i, use in enumerate(uses))
    layout = OpLayout(Grid(axes, tuple(range(_num_cells(axes)))), uses)
    lying = operands(it.rule, layout)
    for operand in (*lying.inputs, *lying.outputs):
        verify_layout(operand.layout)
    told = f"{it.op.target}: {it.rule}\n{layout}"
    ran = run_cells(it, layout, lying)
    for i, (expected, operand) in enumerate(zip(it.results, lying.outputs, strict=True)):
        check({cell: ran[cell][0][i] for cell in ran}, operand.layout, expected, f"output {i} of {told}")
    for i, (gradient, operand) in enumerate(zip(it.gradients, lying.inputs, strict=True)):
        found = {cell: ran[cell][1][i] for cell in ran}
        assert all((part is None) == (gradient is None) for part in found.values()), told
        if gradient is not None:
            check(found, operand.grad, gradient, f"gradient {i} of {told}")


def check(parts: Mapping[Cell, torch.Tensor], layout: Layout, expected: torch.Tensor, told: str) -> None:
    """Parts make the whole: ranges put in place, addends added, copies equal."""
    whole = torch.zeros_like(expected)
    copies = [i for i, role in enumerate(layout.roles) if role == COPY]
    for cell, part in parts.items():
        assert part.dtype == expected.dtype and tuple(part.shape) == layout.part(cell).shape, told
        first = tuple(0 if i in copies else at for i, at in enumerate(cell))
        if first != cell:
            compare(part, parts[first], f"the copy at {cell} of {told}")
        else:
            whole[_index(layout, cell)] += part
    compare(whole, expected, told)


def compare(found: torch.Tensor, expected: torch.Tensor, told: str) -> None:
    """Equal to rounding."""
    finite = expected.double()[expected.isfinite()].abs()
    scale = max(1.0, finite.max().item() if finite.numel() else 0.0)
    torch.testing.assert_close(
        found, expected, rtol=0, atol=TOLERANCE * scale, equal_nan=True, msg=lambda text: f"{told}\n{text}"
    )


def _index(layout: Layout, cell: Cell) -> Any:
    """Advanced indices of a part."""
    lists = [[i for start, stop in ranges for i in range(start, stop)] for ranges in layout.part(cell).ranges]
    return torch.meshgrid(*map(_whole_numbers, lists), indexing="ij") if lists else ()


def _whole_numbers(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.long)


def _parts(value: torch.Tensor, layout: Layout) -> dict[Cell, torch.Tensor]:
    """What each cell holds; where addends are held, random ones that sum to the value."""
    shares = list(itertools.product(*(range(layout.grid.axes[i].size) for i in layout.partial_axes)))
    addends = {share: torch.randn_like(value) for share in shares[1:]}
    addends[shares[0]] = value - sum(addends.values()) if addends else value
    return {cell: addends[layout.part(cell).share][_index(layout, cell)] for cell in layout.grid.cells}


def _num_cells(axes: Sequence[Axis]) -> int:
    total = 1
    for axis in axes:
        total *= axis.size
    return total


def run_cells(it: Case, layout: OpLayout, lying: Any) -> dict[Cell, Any]:
    """Every cell's outputs and gradients, one thread per cell."""
    tensors = [it.graph.tensors[name] for name in it.op.inputs]
    parts = [_parts(value, operand.layout) for value, operand in zip(it.values, lying.inputs, strict=True)]
    told = [_parts(value, operand.grad) for value, operand in zip(it.cotangents, lying.outputs, strict=True)]
    comms = _comms(layout)
    done: dict[Cell, Any] = {}
    errors: list[BaseException] = []

    def work(cell: Cell) -> None:
        try:
            leaves = [_leaf(part[cell], tensor) for part, tensor in zip(parts, tensors, strict=True)]
            view = cell_view(it.rule, layout, cell)
            results = _call(local_call(it.op, it.rule, view), leaves, comms[cell])
            _count(it, comms[cell], "forward")
            gradients = _gradients(results, [part[cell] for part in told], leaves)
            if any(result.requires_grad for result in results):
                _count(it, comms[cell], "backward")
            done[cell] = [result.detach() for result in results], gradients
        except BaseException as error:  # noqa: BLE001  re-raised below, in the test's own thread
            errors.append(error)
            for comm in comms[cell].values():
                comm.meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(cell,)) for cell in layout.grid.cells]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return done


def _call(call: Any, leaves: Sequence[torch.Tensor], comms: Mapping[str, ThreadComm]) -> tuple[torch.Tensor, ...]:
    def bind(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return leaves[int(arg.name)]
        if isinstance(arg, Group):
            return comms[arg.name]
        return tuple(map(bind, arg)) if isinstance(arg, tuple | list) else arg

    kwargs = {name: bind(value) for name, value in call.kwargs}
    if any(isinstance(value, Draw) for value in kwargs.values()):
        kwargs["stream"] = STREAM
    result = resolve(call.target)(*map(bind, call.args), **kwargs)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _comms(layout: OpLayout) -> dict[Cell, dict[str, ThreadComm]]:
    """For each cell its communicators by name; cells that differ only on the axes cutting a name share a meeting."""
    meetings: dict[Any, Meeting] = {}
    found: dict[Cell, dict[str, ThreadComm]] = {cell: {} for cell in layout.grid.cells}
    for cell in layout.grid.cells:
        for name in layout.cut_names:
            axes = layout.axes_cutting(name)
            sizes = [layout.grid.axes[i].size for i in axes]
            others = tuple(at for i, at in enumerate(cell) if i not in axes)
            rank = 0
            for axis, size in zip(axes, sizes, strict=True):
                rank = rank * size + cell[axis]
            size = _num_cells([layout.grid.axes[i] for i in axes])
            meeting = meetings.setdefault((name, others), Meeting(size))
            found[cell][name] = ThreadComm(rank, size, meeting)
    return found


def _count(it: Case, comms: Mapping[str, ThreadComm], phase: str) -> None:
    """A cell entered exactly the collectives that the rule declares."""
    for name, comm in comms.items():
        exchange = it.rule.algorithms.get(name)
        declared = () if exchange is None else exchange.forward if phase == "forward" else exchange.backward
        assert comm.num_calls == len(declared), f"{phase} {name}: {comm.num_calls} collectives, declared {declared}"
        comm.num_calls = 0
