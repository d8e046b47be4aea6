"""Opened programs: from emitted files to the module of one rank.

In: the files of a program, a transport, weights. Out: this rank's `Parallel`. The files are loaded from a directory of
their own that lives as long as the module: the text stays readable in stack traces and debuggers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from weft.cache import write_files
from weft.capture.source import place_of_call
from weft.errors import RunError
from weft.runtime.batch import Form
from weft.runtime.flow import Flow, flow_of
from weft.runtime.grad_sync import BucketSync
from weft.runtime.guarded import guard_rank
from weft.runtime.masters import masters_of, tell_sums, with_masters
from weft.runtime.parallel import Batch, Parallel, Runnable
from weft.runtime.parallel_pipeline import ParallelPipeline
from weft.runtime.pieces import Pieces
from weft.runtime.pipeline_files import PIPELINE, cut_in_pieces, load_pipeline, load_sizes, pipeline_parts
from weft.runtime.precision import Mixed
from weft.runtime.program_files import cut_parameters, load_program, read_meta
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


def num_devices(files: Content) -> int:
    """How many ranks a program is for."""
    if is_pipeline(files):
        return int(json.loads(files[PIPELINE])["devices"])
    with _written(files) as folder:
        return int(read_meta(folder)["devices"])


def cut_trained(files: Content) -> dict[str, int]:
    """Trained parameters of which some rank stores a part only, and how many dims each has."""
    with _written(files) as folder:
        return cut_in_pieces(folder) if is_pipeline(files) else cut_parameters(folder)


def is_pipeline(files: Content) -> bool:
    """True if the program is one in pieces."""
    return PIPELINE in files


def open_program(files: Content, transport: Replica) -> Runnable:
    """The rank's program, its parts still zeros, and how it is called."""
    with _written(files) as folder:
        program = load_program(folder, transport, grad_sync=BucketSync())
        meta = read_meta(folder)
    returns = meta.get("returns")
    return Runnable(
        program,
        Form.from_json(meta["batch"]),
        None if returns is None else Returns.from_json(returns),
        tuple(meta.get("needs_grad", ())),
    )


def open_rank(  # noqa: PLR0913 - each is a fact about the run
    files: Content,
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
    replica, order = Replica(transport, num_devices(files)), known or {}
    if is_pipeline(files):
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
        content = make_files(Wanted(batch=batch))
        return runnable if content == files else open_program(content, replica)

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
    files: Content,
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
    order = order or {}
    with _written(files) as folder:
        flow = flow_of(json.loads(files[PIPELINE]), load_pipeline(folder, transport, BucketSync))
        parts, trained = (in_order(one, order) for one in pipeline_parts(folder))
        pieces = Pieces(tuple(flow.rank.modules), transport, parts, trained, order)
    masters = None if mixed is None else masters_of(pieces, mixed)
    tell_sums(flow.modules, mixed)
    fill_in(pieces if masters is None else masters)

    def made(wanted: Wanted) -> Content:
        assert make_files is not None, "this module was made for the example's sizes only"
        return make_files(wanted)

    def make_flow(batch: Batch | None) -> Flow:
        content = made(Wanted(batch=batch))
        with _written(content) as folder:
            rank = load_pipeline(folder, transport, BucketSync)
        return flow_of(json.loads(content[PIPELINE]), rank, batch)

    def make_size(into: Flow, rows: int) -> None:
        with _written(made(Wanted(into is not flow, into.batch, rows))) as folder:
            into.add(rows, load_sizes(folder, transport, BucketSync, into.rank.sizes[0]))
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


@contextmanager
def _written(files: Content) -> Iterator[Path]:
    """A directory with a program, while it is loaded: a process may end in ways that leave no time to clean up."""
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        write_files(Path(folder), files)
        yield Path(folder)


def refusal(message: str, remedy: str) -> RunError:
    """A wrong call of a parallel module, as an error of ours."""
    return RunError(message, place=place_of_call(), remedy=remedy)
