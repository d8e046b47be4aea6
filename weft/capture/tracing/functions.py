"""Functions that are not looked into, and what they change outside of themselves.

Enters: the module, a trace of it, and its Graph. Leaves: nothing, or a `CaptureError` with the line, if forward or
backward of an `autograd.Function`, or a registered function, changes a global, a class attribute or a container: each
rank would count for itself, and so would those who try how it may be cut. Each form of a function runs on small
operands, as discovery runs it; what settles at the first run, and caches, are let be. Promised: what is outside is as
it was before.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from weft.capture.source import package_of
from weft.capture.tracing.opaque import Opaque
from weft.capture.tracing.surroundings import Surroundings
from weft.capture.tracing.watch import blame
from weft.errors import CaptureError
from weft.ir.graph import Graph, Op
from weft.ops.discover import question_of
from weft.ops.specimen import RECIPES, SMALL, form_of, shrunk, specimens, with_recipe
from weft.ops.trial import FAILURES, undisturbed

REMEDY = "return it as an output, keep it in a buffer of the module, or pass it in as an argument"


@contextmanager
def functions_watched(module: nn.Module, functions: Sequence[Opaque]) -> Iterator[Callable[[Graph], None]]:
    """While this is entered, what functions change is put back at the end. Gives what refuses those of a Graph."""
    if not functions:
        yield lambda graph: None
        return
    surroundings = Surroundings(module, [one.cls for one in functions])
    try:
        yield lambda graph: refuse_stateful(graph, surroundings)
    finally:
        surroundings.restore()


def refuse_stateful(graph: Graph, surroundings: Surroundings) -> None:
    """Raise if a function changes what lies outside of it."""
    ops = {question_of(op, graph): op for op in graph.ops if isinstance(op.function, Opaque)}
    for question, op in ops.items():
        run = _runs(op, question.it.reads)
        run()
        settled = surroundings.again()
        try:
            run()
            if (found := settled.changed()) is not None:
                raise _refusal(op, found, run)
        finally:
            settled.restore()


def _runs(op: Op, reads: Sequence[Any]) -> Callable[[], None]:
    """Runs an op on small operands, forward and backward, if it takes any."""
    form = form_of(op, reads)
    with _quietly():
        form = shrunk(form, SMALL)

    def run() -> None:
        with _quietly(), suppress(*FAILURES):
            tried = with_recipe(form)
            for _ in specimens(tried, [RECIPES[tried.recipe]], 0, gradients=True):
                pass

    return run


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings(), undisturbed():
        warnings.simplefilter("ignore")
        yield


def _refusal(op: Op, found: tuple[str, Callable[[], Any]], run: Callable[[], None]) -> CaptureError:
    name, state = found
    function = op.function
    assert isinstance(function, Opaque), "only these are tried"
    file = inspect.getsourcefile(inspect.unwrap(getattr(function.cls, "function", function.cls))) or ""
    return CaptureError(
        f"{function.what} changes {name}, outside of itself: each rank would change its own, by its part of the batch",
        place=blame(run, state, {package_of(file)}) or str(op.source),
        remedy=REMEDY,
    )
