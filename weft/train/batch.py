"""Batches: what a user hands to a forward, as the tensors that the graph takes.

In: positional and keyword arguments, as for the original module. Out: tensors by name of the graph's inputs. A batch of
another form, shape or dtype than the example's is refused, with the difference, and so is another value of an
argument that is no tensor: the program was made for that one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from weft.errors import RunError
from weft.ir.graph import Graph

REMEDY = "give batches of the form of the example, or parallelize with an example of this form"


def bind_batch(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a batch by name of the graph's inputs."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if spec != graph.in_spec:
        raise RunError(
            f"the batch has another form than the example: {_form(args, kwargs)}",
            place=f"{graph.name}.forward",
            remedy=REMEDY,
        )
    tensors = {one.index: one for one in graph.inputs}
    for position, (given, planned) in enumerate(zip(leaves, graph.leaves, strict=True)):
        if position in tensors:
            _check_tensor(graph, tensors[position].tensor, tensors[position].where, given)
        elif isinstance(given, Tensor) or given != planned:
            raise RunError(
                f"argument {position} of the batch is {given!r}, in the example it is {planned!r}",
                place=f"{graph.name}.forward",
                remedy=REMEDY,
            )
    return {one.tensor: leaves[one.index] for one in graph.inputs}


def _check_tensor(graph: Graph, name: str, where: str, given: Any) -> None:
    planned = graph.tensors[name]
    found = (tuple(given.shape), given.dtype) if isinstance(given, Tensor) else type(given).__name__
    if found != (planned.sizes, planned.dtype):
        raise RunError(
            f"{where} of the batch is {_text(given)}, in the example it is {list(planned.sizes)} of {planned.dtype}",
            place=f"{graph.name}.forward",
            remedy=REMEDY,
        )


def _text(given: Any) -> str:
    return f"{list(given.shape)} of {given.dtype}" if isinstance(given, Tensor) else f"a {type(given).__name__}"


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    names = f" and {', '.join(kwargs)}" if kwargs else ""
    return f"{len(args)} positional arguments{names}"
