"""The Form of a program's batches, from its Graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from weft.ir.graph import Dim, Graph, Size
from weft.runtime.program.batch import Form, dtype_name
from weft.runtime.program.sizes import FreeSize, Guard


def form_of(graph: Graph, sizes: Sequence[FreeSize] = (), names: Mapping[str, str] | None = None) -> Form:
    """What every batch must look like.

    Args:
        sizes: that batches choose; names: of the Graph's symbols among them.
    """
    keywords = graph.in_spec.child(1).context if graph.in_spec is not None else ()
    tensors = {one.index for one in graph.inputs}
    return Form(
        spec=str(graph.in_spec),
        keywords=tuple(keywords),
        leaves=tuple("" if at in tensors else repr(leaf) for at, leaf in enumerate(graph.leaves)),
        tensors=tuple(
            (
                one.index,
                one.where,
                tuple(_dim(dim, names) for dim in graph.tensors[one.tensor].shape),
                dtype_name(graph.tensors[one.tensor].dtype),
            )
            for one in graph.inputs
        ),
        sizes=tuple(sizes),
        guards=guards_of(graph, names) if names else (),
        asks=graph.asks,
        reads=graph.reads,
        num_args=0 if graph.in_spec is None else graph.in_spec.child(0).num_children,
    )


def guards_of(graph: Graph, names: Mapping[str, str]) -> tuple[Guard, ...]:
    """The Graph's guards over named sizes, without those that always hold."""
    found = (Guard(renamed(text, names), place) for text, place in graph.guards)
    return tuple(guard for guard in found if len(set(guard.text.split(" == "))) == guard.text.count(" == ") + 1)


def _dim(dim: Dim, names: Mapping[str, str] | None) -> int | str:
    if not isinstance(dim, Size):
        return dim
    return dim.hint if names is None else renamed(dim.expr, names)


def renamed(text: str, names: Mapping[str, str]) -> str:
    """An expression over symbols with the names of the sizes."""
    return re.sub(r"\bs\d+\b", lambda found: names[found.group(0)], text)
