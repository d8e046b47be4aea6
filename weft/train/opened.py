"""Opened programs: from emitted files to the module of one rank.

In: the files of a program, a transport, weights. Out: this rank's `Parallel`. The files are loaded from a directory of
their own that lives as long as the module: the text stays readable in stack traces and debuggers.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from weft.cache import write_files
from weft.runtime.batch import Form
from weft.runtime.grad_sync import BucketSync
from weft.runtime.module import ParallelModule
from weft.runtime.parallel import Parallel
from weft.runtime.program_files import load_program, read_meta
from weft.runtime.replicas import Replica
from weft.runtime.transport import Transport
from weft.train.weights import Weights, fill

Content = Mapping[str, bytes]
"""Files of a program by name."""


def num_devices(files: Content) -> int:
    """How many ranks a program is for."""
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        write_files(Path(folder), files)
        return int(read_meta(folder)["devices"])


def open_program(files: Content, transport: Replica) -> tuple[ParallelModule, Form]:
    """The rank's program, its parts still zeros, and the form of its batches."""
    folder = tempfile.TemporaryDirectory(prefix="weft-")
    write_files(Path(folder.name), files)
    program = load_program(folder.name, transport, grad_sync=BucketSync())
    weakref.finalize(program, folder.cleanup)
    return program, Form.from_json(read_meta(folder.name)["batch"])


def open_rank(
    files: Content,
    transport: Transport,
    weights: Weights,
    *,
    seed: int = 0,
    eval_files: Callable[[], Content] | None = None,
) -> Parallel:
    """The rank's module, with its values.

    Args:
        eval_files: gives the program of `eval()` when it is asked for.
    """
    replica = Replica(transport, num_devices(files))
    program, form = open_program(files, replica)
    fill(program, weights)

    def make_eval() -> ParallelModule:
        assert eval_files is not None
        content = eval_files()
        return program if content == files else open_program(content, replica)[0]

    return Parallel(program, form, seed=seed, make_eval=None if eval_files is None else make_eval)
