"""verify_graph(): a Graph is what its grammar says.

Enters: a Graph. Leaves: nothing, or a `CheckError` that shows the ops around the fault, marked. Checked: names are
unique; every tensor is written once and before it is read; every tensor is known, with sizes that are not negative;
outputs, loss and buffer updates exist; what needs a gradient can have one; draws are numbered in order; no op is dead.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.errors import CheckError
from weft.ir.graph import Graph, Op, Size
from weft.ir.show import around, show_op

REACH = 5


def verify_graph(graph: Graph) -> None:
    """Raise a `CheckError` if the Graph is malformed."""
    written = _check_sources(graph)
    names: set[str] = set()
    last_draw = -1
    for position, op in enumerate(graph.ops):
        for fault in _faults(op, graph, names, written, last_draw):
            raise _error(graph, position, fault)
        names.add(op.name)
        written.update(op.outputs)
        last_draw = op.draw if op.draw is not None else last_draw
    _check_ends(graph, written)
    _check_live(graph)


def _check_sources(graph: Graph) -> set[str]:
    """Tensors that are there before any op runs."""
    sources = [item.tensor for item in graph.inputs] + [item.tensor for item in graph.parameters]
    sources += [item.tensor for item in graph.buffers] + list(graph.constants)
    seen: set[str] = set()
    for name in sources:
        if name in seen:
            raise CheckError(f"%{name} is two of: input, parameter, buffer, constant")
        if name not in graph.tensors:
            raise CheckError(f"%{name} is an input, parameter, buffer or constant, but no tensor")
        seen.add(name)
    for parameter in graph.parameters:
        if graph.tensors[parameter.tensor].needs_grad != parameter.trainable:
            raise CheckError(f"%{parameter.tensor}: trainable is {parameter.trainable}, needs_grad is not")
    return seen


def _faults(op: Op, graph: Graph, names: set[str], written: set[str], last_draw: int) -> Iterator[str]:
    """What is wrong with one op."""
    if op.name in names:
        yield f"the name {op.name} is taken"
    for name in op.inputs:
        if name not in written:
            yield f"%{name} is read before it is written" if name in graph.tensors else f"%{name} does not exist"
    if not op.outputs or len(set(op.outputs)) != len(op.outputs):
        yield "an op makes at least one tensor, each once"
    for name in op.outputs:
        if name in written:
            yield f"%{name} is written twice"
        yield from _tensor_faults(op, graph, name)
    if op.draw is not None and op.draw <= last_draw:
        yield f"draw {op.draw} comes after draw {last_draw}"
    if op.constant and op.draw is not None:
        yield "a random op is not constant"
    if op.target.startswith("function:") != (op.function is not None):
        yield "a function: target and a callable go together"


def _tensor_faults(op: Op, graph: Graph, name: str) -> Iterator[str]:
    tensor = graph.tensors.get(name)
    if tensor is None:
        yield f"%{name} has no shape and dtype"
        return
    if tensor.name != name:
        yield f"%{name} is filed as %{tensor.name}"
    if not all(isinstance(dim, int | Size) and int(dim) >= 0 for dim in tensor.shape):
        yield f"%{name} has a size that is negative or no integer: {tensor.shape}"
    if tensor.needs_grad and not op.grad:
        yield f"%{name} needs a gradient but is made without grad mode"
    if tensor.needs_grad and not _is_differentiable(tensor.dtype):
        yield f"%{name} needs a gradient but is {tensor.dtype}"
    if tensor.needs_grad and not any(graph.tensors[i].needs_grad for i in op.inputs if i in graph.tensors):
        yield f"%{name} needs a gradient but none of the op's inputs does"


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _check_ends(graph: Graph, written: set[str]) -> None:
    """Outputs, loss and updates."""
    ends = [("output", name) for name in graph.outputs if name is not None]
    ends += [("update", buffer.update) for buffer in graph.buffers if buffer.update is not None]
    for kind, name in ends:
        if name not in written:
            raise _error(graph, len(graph.ops), f"the {kind} %{name} is never written")
    if graph.loss is not None and graph.loss not in graph.outputs:
        raise _error(graph, len(graph.ops), f"the loss %{graph.loss} is no output")
    if graph.loss is not None and graph.tensors[graph.loss].shape != ():
        raise _error(graph, len(graph.ops), f"the loss {graph.tensors[graph.loss]} is no scalar")
    unknown = sorted(set(graph.tensors) - written)
    if unknown:
        raise _error(graph, len(graph.ops), f"%{unknown[0]} is a tensor that nothing makes")
    for buffer in graph.buffers:
        if buffer.update is not None and graph.tensors[buffer.update].shape != graph.tensors[buffer.tensor].shape:
            raise _error(graph, len(graph.ops), f"the update of %{buffer.tensor} has another shape")


def _check_live(graph: Graph) -> None:
    needed = {name for name in graph.outputs if name is not None}
    needed |= {buffer.update for buffer in graph.buffers if buffer.update is not None}
    for position in reversed(range(len(graph.ops))):
        op = graph.ops[position]
        if needed.isdisjoint(op.outputs):
            raise _error(graph, position, "this op is dead: no output or buffer update depends on it")
        needed.update(op.inputs)


def _error(graph: Graph, position: int, fault: str) -> CheckError:
    """The fault with the ops around it."""
    lines = [*(show_op(op, graph.tensors) for op in graph.ops), "return"]
    place = graph.ops[position].place if position < len(graph.ops) else ""
    return CheckError(f"malformed graph {graph.name}: {fault}\n{around(lines, position, REACH)}", place=place)
