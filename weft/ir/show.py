"""Graphs as text, the same between runs.

Enters: a Graph. Leaves: inputs, parameters, buffers, constants, then one line an op, with the user's line above the
ops that it made:

    # model.py:62  q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
    %h.0.attn.c_attn/linear: float64[4 8 48] grad = linear.default(%h.0.ln_1/layer_norm, %h.0.attn.c_attn.weight)

Marks in brackets say how an op ran: [no_grad], [autocast bfloat16], [recompute 1], [const], [draw 3].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from weft.ir.graph import Autocast, Buffer, Graph, Op, Parameter, Ref, Size, Tensor

SIMPLE = (int, float, str, bool, type(None), Ref, Size, torch.dtype, torch.device, torch.layout, torch.memory_format)


def show_graph(graph: Graph) -> str:
    """The whole Graph."""
    return "\n".join([*_head(graph), "", *_body(graph), "", *_tail(graph)]) + "\n"


def show_op(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """One op as one line; also of an op whose tensors are unknown."""
    outputs = ", ".join(str(tensors.get(name, f"%{name}: unknown")) for name in op.outputs)
    given = [show_arg(arg) for arg in op.args] + [f"{key}={show_arg(value)}" for key, value in op.kwargs]
    return f"{outputs} = {op.target.removeprefix('aten.')}({', '.join(given)}){_marks(op)}"


def around(lines: Sequence[str], at: int, reach: int) -> str:
    """The numbered lines near one of them, which is marked."""
    near = range(max(0, at - reach), min(len(lines), at + reach + 1))
    return "\n".join(f"{'>' if i == at else ' '} {i:4d}  {lines[i]}" for i in near)


def show_arg(arg: Any) -> str:
    """An argument; an object without a stable text by its type."""
    if isinstance(arg, tuple):
        return f"[{', '.join(map(show_arg, arg))}]"
    if isinstance(arg, str):
        return repr(arg)
    return str(arg).removeprefix("torch.") if isinstance(arg, SIMPLE) else f"<{type(arg).__name__}>"


def _marks(op: Op) -> str:
    marks = [] if op.grad else ["no_grad"]
    if isinstance(op.autocast, Autocast):
        marks.append(
            f"autocast {str(op.autocast.dtype).removeprefix('torch.')}" if op.autocast.enabled else "no autocast"
        )
    marks += [f"recompute {op.recompute}"] if op.recompute is not None else []
    marks += ["const"] if op.constant else []
    marks += [f"draw {op.draw}"] if op.draw is not None else []
    return _bracketed(marks)


def _bracketed(marks: Iterable[str]) -> str:
    return "".join(f" [{mark}]" for mark in marks)


def _head(graph: Graph) -> Iterator[str]:
    yield f"graph {graph.name}"
    for symbol, (tensor, dim) in sorted(graph.symbols.items()):
        yield f"size {symbol} = dim {dim} of %{tensor}"
    for guard, place in graph.guards:
        yield f"where {guard}" + (f"  # {place}" if place else "")
    for item in graph.inputs:
        yield f"input {graph.tensors[item.tensor]}  # {item.where}"
    for parameter in graph.parameters:
        yield f"parameter {graph.tensors[parameter.tensor]}{_parameter_marks(parameter)}"
    for buffer in graph.buffers:
        yield f"buffer {graph.tensors[buffer.tensor]}{_buffer_marks(buffer)}"
    for name in graph.constants:
        yield f"constant {graph.tensors[name]}"


def _parameter_marks(parameter: Parameter) -> str:
    marks = [f"also {name}" for name in parameter.names[1:]]
    marks += [] if parameter.trainable else ["frozen"]
    marks += [] if parameter.used else ["unused"]
    return _bracketed(marks)


def _buffer_marks(buffer: Buffer) -> str:
    marks = [f"also {name}" for name in buffer.names[1:]]
    marks += [] if buffer.persistent else ["not persistent"]
    marks += [] if buffer.update is None else [f"becomes %{buffer.update}"]
    return _bracketed(marks)


def _body(graph: Graph) -> Iterator[str]:
    last = None
    for op in graph.ops:
        if op.source != last and op.source.line:
            yield f"# {op.source}"
        last = op.source
        yield show_op(op, graph.tensors)


def _tail(graph: Graph) -> Iterator[str]:
    outputs = ", ".join("-" if name is None else f"%{name}" for name in graph.outputs)
    yield f"return {outputs}"
    yield f"loss {'-' if graph.loss is None else f'%{graph.loss}'}"
