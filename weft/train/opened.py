"""Opened programs: from emitted files to the module of one rank.

In: the files of a program, a transport, weights. Out: this rank's `Parallel`. The files are loaded from memory; their
text is readable in tracebacks and debuggers all the same (`runtime/files.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.capture.source import place_of_call
from weft.errors import RunError
from weft.runtime.batch import Form
from weft.runtime.files import files_of
from weft.runtime.flow import Flow, flow_of
from weft.runtime.grad_sync import BucketSync
from weft.runtime.guarded import guard_rank
from weft.runtime.masters import masters_of, tell_sums, with_masters
from weft.runtime.parallel import Batch, Parallel, Runnable
from weft.runtime.parallel_pipeline import ParallelPipeline
from weft.runtime.pieces import Pieces
from weft.runtime.pipeline_files import load_pipeline, load_sizes, pipeline_parts
from weft.runtime.precision import Mixed
from weft.runtime.program_files import load_program
from weft.runtime.reduction import Reduction
from weft.runtime.replicas import Replica
from weft.runtime.returns import Returns
from weft.runtime.stored import in_order, put_in_order
from weft.runtime.transport import Transport
from weft.train.weights import Values, fill, fill_all

Content = Mapping[str, bytes]
"""Files of a program by name."""

AnyParallel = Parallel | ParallelPipeline
"""What a rank trains."""
T = TypeVar("T", Parallel, ParallelPipeline)


@dataclass(frozen=True)
class Wanted:
    """A program that is not there yet.

    Args:
        evaluation: it is one of `eval()`.
        batch: of other arguments than the example's.
        rows: of micro-batches that a program in pieces is to serve too.
    """

    evaluation: bool = True
    batch: Batch | None = None
    rows: int | None = None


MakeFiles = Callable[[Wanted], Content]
"""Makes programs when they are asked for."""


def open_program(content: Content, transport: Replica) -> Runnable:
    """The rank's program, its parts still zeros, and how it is called."""
    files = files_of(content)
    returns = files.about.get("returns")
    return Runnable(
        load_program(files, transport, grad_sync=BucketSync()),
        Form.from_json(files.about["batch"]),
        None if returns is None else Returns.from_json(returns),
        tuple(files.about.get("needs_grad", ())),
    )


def open_rank(  # noqa: PLR0913 - each is a fact about the run
    content: Content,
    transport: Transport,
    weights: Values,
    *,
    seed: int = 0,
    otherwise: Values | None = None,
    known: Mapping[str, int] | None = None,
    make_files: MakeFiles | None = None,
    reduction: Reduction | None = None,
    mixed: Mixed | None = None,
) -> AnyParallel:
    """The rank's module, with its values.

    Args:
        otherwise: has the buffers that `weights` lack because they are not saved.
        known: all names of the original model, and the place of each in its order, which the rank's module shows too;
            not given: the order of use.
        make_files: gives the programs of `eval()` and those for other sizes when they are asked for.
        reduction: what the losses of micro-batches and replicas count.
        mixed: how a program in another precision than the weights' is trained.
    """
    files, order = files_of(content), known or {}
    replica = Replica(transport, files.devices)
    if files.in_pieces:
        pipeline = open_pipeline(
            files,
            replica,
            lambda pieces: _fill_pieces(pieces, weights, otherwise, order),
            order=order,
            seed=seed,
            make_files=make_files,
            reduction=reduction,
            mixed=mixed,
        )
        return _ready(pipeline, order)
    runnable = open_program(files, replica)
    masters = with_masters(runnable.program, mixed)
    fill(runnable.program if masters is None else masters, weights, otherwise, order)

    def make_eval(batch: Batch | None) -> Runnable:
        assert make_files is not None
        made = make_files(Wanted(batch=batch))
        return runnable if made == files else open_program(made, replica)

    module = Parallel(
        runnable,
        masters=masters,
        seed=seed,
        make_eval=None if make_files is None else make_eval,
        reduction=reduction,
        refusal=refusal,
    )
    return _ready(module, order)


def _ready(module: T, order: Mapping[str, int]) -> T:
    """The module as users see it: watched, what it holds in the original's order."""
    for tree in module.trees():
        put_in_order(tree, order)
    guard_rank(module, refusal)
    return module


def open_pipeline(
    content: Content,
    transport: Replica,
    fill_in: Callable[[Pieces[Any]], None],
    *,
    order: Mapping[str, int] | None = None,
    seed: int,
    make_files: MakeFiles | None,
    reduction: Reduction | None,
    mixed: Mixed | None = None,
) -> ParallelPipeline:
    """The same for a program in pieces; `order`: the place of each name in the original."""
    files, order = files_of(content), order or {}
    flow = flow_of(files.about, load_pipeline(files, transport, BucketSync))
    parts, trained = (in_order(one, order) for one in pipeline_parts(files))
    pieces = Pieces(tuple(flow.rank.modules), transport, parts, trained, order)
    masters = None if mixed is None else masters_of(pieces, mixed)
    tell_sums(flow.modules, mixed)
    fill_in(pieces if masters is None else masters)

    def made(wanted: Wanted) -> Content:
        assert make_files is not None, "this module was made for the example's sizes only"
        return make_files(wanted)

    def make_flow(batch: Batch | None) -> Flow:
        found = files_of(made(Wanted(batch=batch)))
        return flow_of(found.about, load_pipeline(found, transport, BucketSync), batch)

    def make_size(into: Flow, rows: int) -> None:
        found = made(Wanted(into is not flow, into.batch, rows))
        into.add(rows, load_sizes(found, transport, BucketSync, into.rank.sizes[0]))
        tell_sums(into.modules, mixed)

    return ParallelPipeline(
        flow,
        pieces,
        masters=masters,
        seed=seed,
        make_flow=make_flow,
        make_size=make_size,
        reduction=reduction,
        refusal=refusal,
    )


def _fill_pieces(pieces: Pieces[Any], weights: Values, otherwise: Values | None, known: Collection[str]) -> None:
    fill_all(pieces.modules, weights, otherwise, known)
    pieces.join_copies()


def refusal(message: str, remedy: str) -> RunError:
    """A wrong call of a parallel module, as an error of ours."""
    return RunError(message, place=place_of_call(), remedy=remedy)
