"""Opened programs: from emitted files to the module of one rank.

In: the files of a program, a transport, weights. Out: this rank's `Parallel`. The files are loaded from a directory of
their own that lives as long as the module: the text stays readable in stack traces and debuggers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from weft.cache import write_files
from weft.errors import RunError
from weft.runtime.batch import Form
from weft.runtime.grad_sync import BucketSync
from weft.runtime.parallel import Batch, Parallel, Runnable
from weft.runtime.parallel_pipeline import Cutting, ParallelPipeline
from weft.runtime.pieces import Pieces
from weft.runtime.pipeline_files import PIPELINE, cut_in_pieces, load_pipeline, pipeline_parts
from weft.runtime.program_files import cut_parameter, load_program, read_meta
from weft.runtime.replicas import Replica
from weft.runtime.returns import Returns
from weft.runtime.transport import Transport
from weft.train.weights import Values, fill

Content = Mapping[str, bytes]
"""Files of a program by name."""

AnyParallel = Parallel | ParallelPipeline
"""What a rank trains."""

EvalFiles = Callable[[Batch | None], Content]
"""The program of `eval()`: for the example, or for a batch of other arguments."""


def num_devices(files: Content) -> int:
    """How many ranks a program is for."""
    if is_pipeline(files):
        return int(json.loads(files[PIPELINE])["devices"])
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        write_files(Path(folder), files)
        return int(read_meta(folder)["devices"])


def cut_trained(files: Content) -> str | None:
    """The first trained parameter of which some rank stores a part only; None if there is none."""
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        write_files(Path(folder), files)
        return cut_in_pieces(folder) if is_pipeline(files) else cut_parameter(folder)


def is_pipeline(files: Content) -> bool:
    """True if the program is one in pieces."""
    return PIPELINE in files


def open_program(files: Content, transport: Replica) -> Runnable:
    """The rank's program, its parts still zeros, and how it is called."""
    # gone when it is loaded: a process may end in ways that leave no time to clean up
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        write_files(Path(folder), files)
        program = load_program(folder, transport, grad_sync=BucketSync())
        meta = read_meta(folder)
    returns = meta.get("returns")
    return Runnable(
        program,
        Form.from_json(meta["batch"]),
        None if returns is None else Returns.from_json(returns),
        tuple(meta.get("needs_grad", ())),
    )


def open_rank(
    files: Content,
    transport: Transport,
    weights: Values,
    *,
    seed: int = 0,
    otherwise: Values | None = None,
    known: Collection[str] = (),
    eval_files: EvalFiles | None = None,
) -> AnyParallel:
    """The rank's module, with its values.

    Args:
        otherwise: has the buffers that `weights` lack because they are not saved.
        known: all names of the original model.
        eval_files: gives the programs of `eval()` when they are asked for.
    """
    replica = Replica(transport, num_devices(files))
    if is_pipeline(files):
        return open_pipeline(files, replica, weights, seed=seed, otherwise=otherwise, known=known)
    runnable = open_program(files, replica)
    fill(runnable.program, weights, otherwise, known)

    def make_eval(batch: Batch | None) -> Runnable:
        assert eval_files is not None
        content = eval_files(batch)
        return runnable if content == files else open_program(content, replica)

    return Parallel(runnable, seed=seed, make_eval=None if eval_files is None else make_eval, refusal=refusal)


def open_pipeline(
    files: Content,
    transport: Replica,
    weights: Values,
    *,
    seed: int,
    otherwise: Values | None,
    known: Collection[str],
) -> ParallelPipeline:
    """The same for a program in pieces."""
    told = json.loads(files[PIPELINE])
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        write_files(Path(folder), files)
        rank = load_pipeline(folder, transport, BucketSync)
        pieces = Pieces(tuple(rank.modules), transport, *pipeline_parts(folder))
    for module in pieces.modules:
        fill(module, weights, otherwise, known)
    pieces.join_copies()
    dims = None if told["dims"] is None else tuple(told["dims"])
    cutting = Cutting(Form.from_json(told["batch"]), dims, tuple(told["size_of"]))
    return ParallelPipeline(rank, pieces, cutting, seed=seed, refusal=refusal)


def refusal(message: str, remedy: str) -> RunError:
    """A wrong call of a parallel module, as an error of ours."""
    return RunError(message, remedy=remedy)
