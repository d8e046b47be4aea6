"""The batch dims of a model's inputs, by what the model does with them, and ops that mix the rows of a batch.

In: a Graph and the rules of its ops. Out: for each input its batch dim, if nobody has said. Dim 0 of the inputs that
have as many rows as the batch is taken for it, unless the graph shows that it is another dim: one that a parameter has
too (a weight for each class), or an inner dim of another input (a mask over positions).

A batch may be cut into micro-batches if every op can be cut along it; ops that cannot are told, since with them
micro-batches give other numbers than the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.ir.graph import Graph, Op
from weft.ops.book import RuleBook
from weft.plan.colors import Color, TensorDim, find_colors
from weft.runtime.microbatches import BatchDim


def batch_dims_of(graph: Graph, rules: RuleBook) -> tuple[BatchDim, ...]:
    """The batch dim of each input, as far as sizes and ops tell."""
    sizes = [graph.tensors[one.tensor].sizes for one in graph.inputs]
    colors = find_colors(graph, rules, 2)
    found = [
        colors.at(TensorDim(one.tensor, 0)) if size else None for one, size in zip(graph.inputs, sizes, strict=True)
    ]
    outer = [bool(size) and not _is_inner(graph, color) for size, color in zip(sizes, found, strict=True)]
    if not any(outer):
        # nothing tells them apart
        outer = [bool(size) for size in sizes]
    rows = next((size[0] for size, fits in zip(sizes, outer, strict=True) if fits), None)
    return tuple(0 if fits and size[0] == rows else None for size, fits in zip(sizes, outer, strict=True))


def _is_inner(graph: Graph, color: Color | None) -> bool:
    """True if a dim 0 is no batch: a parameter has it too, or another input has it further inside."""
    if color is None:
        return False
    inputs = {one.tensor for one in graph.inputs}
    return any(
        tensor in graph.parameter_tensors or (tensor in inputs and any(dim > 0 for dim in dims) and 0 not in dims)
        for tensor, dims in color.dims.items()
    )


def mixing_ops(graph: Graph, rules: RuleBook, dims: Sequence[BatchDim]) -> list[Op]:
    """Ops that take rows of the batch apart (one that cannot be cut along it) or bring them together (one that has it
    twice: each row with each). Where rows lie with others in one dim, an op that needs all of it may only sort them."""
    places = [TensorDim(one.tensor, dim) for one, dim in zip(graph.inputs, dims, strict=True) if dim is not None]
    if not places:
        return []
    color = find_colors(graph, rules, 2, places).at(places[0])
    if color is None:
        # no op at all can be cut along it
        return [op for op in graph.ops if places[0].tensor in op.inputs and not op.kind.startswith("new_")]
    cut, rows = set(color.ops), graph.tensors[places[0].tensor].sizes[places[0].dim]

    def has_rows(name: str) -> bool:
        return any(graph.tensors[name].sizes[dim] == rows for dim in color.dims.get(name, ()))

    return [
        op
        for op in graph.ops
        if not op.constant
        and not op.kind.startswith("new_")
        and ((op.name not in cut and any(map(has_rows, op.inputs))) or len(color.names.get(op.name, ())) > 1)
    ]
