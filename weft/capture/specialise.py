"""specialise(): a Graph with dynamic dims at other sizes.

Enters: a Graph with symbols, a size for each. Leaves: the Graph with plain integers. Every op is tried on fake tensors
of the new sizes: where its outputs do not come out as the symbolic shapes say (a table too short, a size that does
not divide), the op is named instead of giving a wrong Graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.capture.builder import known_shapes
from weft.errors import CaptureError
from weft.ir.graph import Graph, Op, Ref, Size, Tensor, map_refs
from weft.ops.trial import callable_of
from weft.runtime.program.sizes import evaluate


def specialise(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """The Graph with every symbol at the given size.

    Args:
        sizes: symbol -> size, for every symbol of `graph.symbols`; at least 2, as in capture.
    """
    if set(sizes) != set(graph.symbols):
        raise CaptureError(
            f"sizes are given for {', '.join(sorted(sizes)) or 'nothing'}",
            remedy=f"a size for each of {', '.join(sorted(graph.symbols)) or 'no symbol'}",
        )
    for symbol, size in sizes.items():
        if size < 2:
            name, dim = graph.symbols[symbol]
            raise CaptureError(
                f"size {size} for {symbol}, dim {dim} of {name}",
                remedy="at least 2; capture again with an example of that size",
            )
    tensors = {name: fixed_tensor(tensor, sizes) for name, tensor in graph.tensors.items()}
    ops = tuple(fixed_op(op, sizes) for op in graph.ops)
    result = replace(graph, tensors=tensors, ops=ops, symbols={}, guards=())
    try_ops(result)
    return result


def hints(graph: Graph) -> dict[str, int]:
    """Each symbol's size in the example."""
    return {symbol: graph.tensors[tensor].sizes[dim] for symbol, (tensor, dim) in graph.symbols.items()}


def at_example(graph: Graph) -> Graph:
    """The Graph at the sizes of the example; itself if none of its dims is dynamic."""
    return specialise(graph, hints(graph)) if graph.symbols else graph


def worked_out(arg: Any, sizes: Mapping[str, int]) -> Any:
    """An argument with its Sizes worked out."""
    if isinstance(arg, Size):
        return int(evaluate(arg.expr, sizes))
    return tuple(worked_out(item, sizes) for item in arg) if isinstance(arg, tuple) else arg


def fixed_tensor(tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
    return replace(tensor, shape=worked_out(tensor.shape, sizes))


def fixed_op(op: Op, sizes: Mapping[str, int]) -> Op:
    kwargs = tuple((key, worked_out(value, sizes)) for key, value in op.kwargs)
    return replace(op, args=worked_out(op.args, sizes), kwargs=kwargs)


def try_ops(graph: Graph) -> None:
    """Run every op on fake tensors and compare shapes."""
    with FakeTensorMode(), known_shapes(), torch.no_grad():
        for op in graph.ops:
            made = try_op(op, graph)
            wanted = [graph.tensors[name].sizes for name in op.outputs]
            if [tuple(tensor.shape) for tensor in made] != wanted:
                raise CaptureError(
                    f"{op.target} gives {[tuple(tensor.shape) for tensor in made]} instead of {wanted} at these sizes",
                    place=op.place,
                    remedy="capture again with an example of these sizes",
                )


def try_op(op: Op, graph: Graph) -> list[torch.Tensor]:
    """The outputs of an op on fake tensors of its inputs' shapes."""

    def live(ref: Ref) -> torch.Tensor:
        tensor = graph.tensors[ref.name]
        return torch.empty(tensor.sizes, dtype=tensor.dtype)

    call = callable_of(op)
    args, kwargs = map_refs(op.args, live), {key: map_refs(value, live) for key, value in op.kwargs}
    with op.autocast.around() if op.autocast else nullcontext():
        try:
            result = call(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            first = str(error).strip().split("\n")[0]
            raise CaptureError(f"{op.target} fails at these sizes: {first}", place=op.place) from error
    return list(result) if isinstance(result, tuple | list) else [result]
