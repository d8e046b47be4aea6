"""The batch dims of a model's inputs, as told or by what the model does with them; ops that mix the rows of a batch.

In: a Graph and the rules of its ops. Out: for each input its batch dim, as somebody has said, or found. Dim 0 of the
inputs that have as many rows as the batch is taken for it, unless the graph shows that it is another dim: one that a
parameter has too (a weight for each class), or an inner dim of another input (a mask over positions).

A batch may be cut into micro-batches if every op can be cut along it; ops that cannot are told, since with them
micro-batches give other numbers than the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.errors import PlanError
from weft.ir.graph import Graph, Op
from weft.ops.book import RuleBook
from weft.plan.colors import Color, TensorDim, find_colors
from weft.runtime.training.microbatches import BatchDim

BatchDims = Mapping[str, int | None] | Sequence[int | None]


def told_batch(graph: Graph, batch_dims: BatchDims | None) -> list[TensorDim]:
    """The batch dims of the inputs as a user says, at least one.

    Args:
        batch_dims: for each tensor input its batch dim, in order or by place in the example; None for an input
            without one. If not given: dim 0 of every input of the same size as the first.
    """
    inputs, tensors = graph.inputs, graph.tensors
    if batch_dims is None:
        candidates = [TensorDim(one.tensor, 0) for one in inputs if tensors[one.tensor].sizes]
        sizes = [tensors[one.tensor].sizes[0] for one in candidates]
        size = next((n for n in sizes if n > 1), 1)
        found = [one for one, n in zip(candidates, sizes, strict=True) if n == size]
    elif isinstance(batch_dims, Mapping):
        unknown = sorted(set(batch_dims) - {one.where for one in inputs})
        if unknown:
            raise PlanError(
                f"{unknown[0]!r} is no tensor input", remedy=f"inputs: {', '.join(one.where for one in inputs)}"
            )
        pairs = [(one, batch_dims.get(one.where)) for one in inputs]
        found = [TensorDim(one.tensor, dim) for one, dim in pairs if dim is not None]
    else:
        if len(batch_dims) != len(inputs):
            raise PlanError(
                f"{len(batch_dims)} batch dims for {len(inputs)} tensor inputs",
                remedy=f"give one per input, None for those without: {', '.join(one.where for one in inputs)}",
            )
        found = [TensorDim(one.tensor, d) for one, d in zip(inputs, batch_dims, strict=True) if d is not None]
    return _checked(graph, found)


def _checked(graph: Graph, dims: list[TensorDim]) -> list[TensorDim]:
    if not dims:
        raise PlanError(f"{graph.name} has no input with a batch dim", remedy="name it with batch_dims")
    found = []
    for tensor, dim in dims:
        shape = graph.tensors[tensor].sizes
        if not -len(shape) <= dim < len(shape):
            raise PlanError(
                f"input {where_of(graph, tensor)} of shape {list(shape)} has no dim {dim}", remedy="count dims from 0"
            )
        found.append(TensorDim(tensor, dim % len(shape)))
    sizes = {graph.tensors[one.tensor].sizes[one.dim] for one in found}
    if len(sizes) > 1:
        raise PlanError(
            f"the batch dims of the inputs differ in size: {sorted(sizes)}", remedy="name the right ones in batch_dims"
        )
    return found


def where_of(graph: Graph, tensor: str) -> str:
    """The place of an input in the example."""
    return next(one.where for one in graph.inputs if one.tensor == tensor)


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
    cut, rows = color.members, graph.tensors[places[0].tensor].sizes[places[0].dim]

    def has_rows(name: str) -> bool:
        return any(graph.tensors[name].sizes[dim] == rows for dim in color.dims.get(name, ()))

    return [
        op
        for op in graph.ops
        if not op.constant
        and not op.kind.startswith("new_")
        and ((op.name not in cut and any(map(has_rows, op.inputs))) or len(color.names.get(op.name, ())) > 1)
    ]
