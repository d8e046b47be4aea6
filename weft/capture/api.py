"""capture(): from a module and an example to a Graph, as a list of named steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.capture.aliases import refuse_aliases
from weft.capture.assemble import assemble
from weft.capture.builder import Builder, Context, known_shapes
from weft.capture.convert import Converter
from weft.capture.example import Example, flatten_example, marked
from weft.capture.functional import read
from weft.capture.precision import chosen_precision
from weft.capture.sizes import Sizes, guards_of
from weft.capture.state import bind_state
from weft.capture.tracing.expect import emit_expectations
from weft.capture.tracing.functions import functions_watched
from weft.capture.tracing.modules import refuse_modules, warn_of_hooks
from weft.capture.tracing.properties import refuse_identity
from weft.capture.tracing.trace import Trace, trace
from weft.capture.tracing.watch import Watch
from weft.errors import CaptureError
from weft.ir.graph import Autocast, Graph, Op
from weft.ir.verify import verify_graph
from weft.runtime.program.asks import Ask
from weft.runtime.weights.precision import Precision


@known_shapes()
def capture(
    module: nn.Module,
    example: Any,
    *,
    dynamic: Mapping[str, tuple[int, ...]] | None = None,
    precision: Precision | str | None = None,
    grad: bool = True,
) -> Graph:
    """The forward of `module` as a Graph.

    Args:
        module: any module, in the mode (train or eval) that is wanted. It is not changed and its weights are not read.
        example: a tuple of positional arguments, a dict of keyword arguments, or one tensor.
        dynamic: dims whose size may vary: input name or position -> dims; those marked with `weft.dynamic` if not
            given. Other sizes are fixed to the example's.
        precision: in which the forward is to compute (`runtime/precision.py`); its own if not given.
        grad: what the forward is told if it asks `torch.is_grad_enabled()`.

    Raises:
        CaptureError: forward does something that the Graph could not hold faithfully.

    Example:
        >>> graph = capture(nn.Linear(3, 2), torch.zeros(4, 3))
        >>> [op.target for op in graph.ops]
        ['aten.linear.default']
    """
    refuse_modules(module)
    warn_of_hooks(module)
    flat = replace(
        flatten_example(module, example),
        precision=chosen_precision(precision, module, error=CaptureError),
        grad=grad,
    )
    dynamic = marked(flat) if dynamic is None else dynamic
    watch = Watch(module)
    try:
        graph = captured(module, flat, dynamic, watch)
    finally:
        watch.restore_objects()
    verify_graph(graph)
    return graph


def captured(module: nn.Module, flat: Example, dynamic: Mapping[str, tuple[int, ...]], watch: Watch) -> Graph:
    """The Graph of what the eager module does.

    Some models go another way when they are compiled: transformers writes masks out then. A forward that asks is told
    that it is not. If that way cannot be captured, it is told that it is: it may leave out checks that read values.
    """
    asked: list[str] = []
    try:
        return settled(module, flat, dynamic, asked)
    except CaptureError as error:
        if not asked:
            raise
        watch.restore_objects()
        try:
            return settled(module, flat, dynamic, None)
        except CaptureError:
            raise error from None


def settled(module: nn.Module, flat: Example, dynamic: Mapping[str, tuple[int, ...]], asked: list[str] | None) -> Graph:
    """The Graph of every forward, also after the first one has changed what settles (`watch.py`)."""
    traced = trace(module, flat, dynamic, tolerant=True, asked=asked)
    graph = convert(module, flat, traced)
    if traced.kept and dynamic:
        # what is kept has values in fixed sizes only
        trace(module, flat, {}, tolerant=True, asked=asked, varying=dynamic)
    if traced.settling:
        second = convert(module, flat, trace(module, flat, dynamic, asked=asked))
        refuse_unsettled(graph, second)
        return replace(graph, reads=second.reads)
    return graph


def refuse_unsettled(first: Graph, second: Graph) -> None:
    """Forward changed some object and then changed it no more: that is harmless if both forwards are the same."""
    if first.ops != second.ops or first.tensors != second.tensors or first.outputs != second.outputs:
        raise CaptureError(
            f"the second forward of {first.name} differs from its first, because the first changes an object",
            remedy="run forward once before capture, or set the object up in __init__",
        )


def convert(module: nn.Module, flat: Example, traced: Trace) -> Graph:
    """The Graph of a trace."""
    with functions_watched(module, traced.found.functions) as refuse_stateful:
        graph, builder = assembled(module, flat, traced)
        refuse_stateful(graph)
    if flat.grad:
        refuse_trained_constants(graph)
    return replace(graph, guards=guards_of(traced.fake_mode, builder.sizes, graph)) if graph.symbols else graph


def assembled(module: nn.Module, flat: Example, traced: Trace) -> tuple[Graph, Builder]:
    """The same, and what built it."""
    builder = Builder(traced.fake_mode, Sizes())
    state = bind_state(module, flat, traced.program, builder, traced.found.trained)
    converter = Converter(builder, traced.found)
    outputs = converter.run(traced.program.graph_module, state.placeholders, Context(autocast=ambient_autocast()))
    refuse_aliases(state)
    results = [read(handle, builder, Context()) for handle in outputs]
    results = emit_expectations(converter.expected, results, traced.output.loss_among_tensors, builder)
    asks = tuple(Ask.of(kind, place, flat.values, grad=flat.grad) for kind, place in traced.found.asks.items())
    refuse_identity(flat.values, traced.found.reader.lines)
    reads = traced.found.reader.found(module, traced.found.changed, traced.found.calls.given)
    graph = replace(assemble(module, flat, traced.output, state, builder, results), asks=asks, reads=reads)
    return graph, builder


def refuse_trained_constants(graph: Graph) -> None:
    """A tensor that a gradient flows to and that is no parameter: a program would keep its value and its gradient."""
    readers: dict[str, Op | None] = {name: None for name in graph.constants if graph.tensors[name].needs_grad}
    for op in graph.ops:
        if read := next((name for name in op.inputs if name in readers), ""):
            readers |= {name: readers[read] or op for name in op.outputs if graph.tensors[name].needs_grad}
    for name in graph.outputs:
        if name in readers:
            raise CaptureError(
                "forward uses a tensor that requires a gradient and is no parameter of the module: it would not be "
                "trained",
                place=str(reader.source) if (reader := readers[name]) is not None else "",
                remedy="make it an nn.Parameter of the module, and a module that holds it a submodule, or pass it in "
                "as an input; if it is not to be trained, detach() it or set requires_grad_(False)",
            )


def ambient_autocast() -> Autocast | None:
    """The autocast that capture() itself was called in."""
    if not torch.is_autocast_enabled("cpu"):
        return None
    return Autocast("cpu", torch.get_autocast_dtype("cpu"), True)
