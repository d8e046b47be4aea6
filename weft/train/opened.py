"""Opened programs: from emitted files to the module of one rank.

In: the files of a program, a transport, weights. Out: this rank's `Parallel`. The files are loaded from a directory of
their own that lives as long as the module: the text stays readable in stack traces and debuggers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.cache import write_files
from weft.capture.source import place_of_call
from weft.errors import RunError
from weft.runtime.flow import Flow, flow_of, whole_flow
from weft.runtime.grad_sync import BucketSync
from weft.runtime.guarded import guard_rank
from weft.runtime.masters import masters_of, tell_sums
from weft.runtime.microbatches import Arguments
from weft.runtime.module import ParallelModule
from weft.runtime.parallel import Parallel
from weft.runtime.pieces import Pieces
from weft.runtime.pipeline_files import PIPELINE, cut_in_pieces, load_pipeline, load_sizes, pipeline_parts
from weft.runtime.precision import Mixed
from weft.runtime.program_files import cut_parameters, load_program, read_meta
from weft.runtime.reduction import Reduction
from weft.runtime.replicas import Replica
from weft.runtime.stored import in_order
from weft.runtime.transport import Transport
from weft.train.weights import Values, fill_all

Content = Mapping[str, bytes]
"""Files of a program by name."""


@dataclass(frozen=True)
class Wanted:
    """A program that is not there yet.

    Args:
        evaluation: it is one of `eval()`.
        batch: of other arguments than the example's.
        rows: of micro-batches that a program in pieces is to serve too.
    """

    evaluation: bool = True
    batch: Arguments | None = None
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


def open_flow(files: Content, transport: Replica, batch: Arguments | None = None) -> Flow:
    """The rank's programs, their parts still zeros, and how batches go through them.

    Args:
        batch: of other arguments than the example's, for which the program was made.
    """
    with _written(files) as folder:
        if is_pipeline(files):
            return flow_of(json.loads(files[PIPELINE]), load_pipeline(folder, transport, BucketSync), batch)
        return whole_flow(load_program(folder, transport, grad_sync=BucketSync()), read_meta(folder), transport)


def _pieces_of(files: Content, flow: Flow, transport: Replica, order: Mapping[str, int]) -> Pieces[ParallelModule]:
    """The rank's programs as one."""
    if flow.is_whole:
        parts, trained = flow.program.stored_parts(), flow.program.trained_parts()
    else:
        with _written(files) as folder:
            parts, trained = pipeline_parts(folder)
    modules = tuple(flow.rank.modules)
    return Pieces(modules, transport, in_order(parts, order), in_order(trained, order), order)


def open_rank(files: Content, transport: Transport, weights: Values, **settings: Any) -> Parallel:
    """The rank's module, with its values, watched over. All ranks of a replica call this together.

    Args:
        settings: of `open_module`.
    """
    module = open_module(files, transport, weights, **settings)
    guard_rank(module, refusal)
    return module


def open_module(  # noqa: PLR0913 - each is a fact about the run
    files: Content,
    transport: Transport,
    weights: Values | None,
    *,
    seed: int = 0,
    otherwise: Values | None = None,
    known: Mapping[str, int] | None = None,
    make_files: MakeFiles | None = None,
    reduction: Reduction | None = None,
    mixed: Mixed | None = None,
) -> Parallel:
    """The rank's module.

    Args:
        weights: its values; zeros if None.
        otherwise: has the buffers that `weights` lack because they are not saved.
        known: all names of the original model, and the place of each in its order, which the rank's module shows too;
            not given: the order of use.
        make_files: gives the programs of `eval()` and those for other sizes when they are asked for.
        reduction: what the losses of micro-batches and replicas count.
        mixed: how a program in another precision than the weights' is trained.
    """
    replica, order = Replica(transport, num_devices(files)), known or {}
    flow = open_flow(files, replica)
    pieces = _pieces_of(files, flow, replica, order)
    masters = masters_of(pieces, mixed, at_once=flow.is_whole)
    tell_sums(flow.modules, mixed)
    if weights is not None:
        fill_all((masters or pieces).modules, weights, otherwise, order)
    (masters or pieces).join_copies()

    def made(wanted: Wanted) -> Content:
        assert make_files is not None, "this module was made for training, at the example's sizes, only"
        return make_files(wanted)

    def make_flow(batch: Arguments | None) -> Flow:
        content = made(Wanted(batch=batch))
        return flow if flow.is_whole and content == files else open_flow(content, replica, batch)

    def make_size(into: Flow, rows: int) -> None:
        with _written(made(Wanted(into is not flow, into.batch, rows))) as folder:
            into.add(rows, load_sizes(folder, replica, BucketSync, into.rank.sizes[0]))
        tell_sums(into.modules, mixed)

    return Parallel(
        flow,
        pieces,
        masters=masters,
        seed=seed,
        make_flow=make_flow,
        make_size=make_size,
        reduction=reduction,
        refusal=refusal,
    )


@contextmanager
def _written(files: Content) -> Iterator[Path]:
    """A directory with a program, while it is loaded: a process may end in ways that leave no time to clean up."""
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        write_files(Path(folder), files)
        yield Path(folder)


def refusal(message: str, remedy: str) -> RunError:
    """A wrong call of a parallel module, as an error of ours."""
    return RunError(message, place=place_of_call(), remedy=remedy)
