"""Opened programs: from emitted files to the module of one rank.

In: the files of a program, a transport, weights. Out: this rank's `Parallel`. The files are loaded from memory; their
text is readable in tracebacks and debuggers all the same (`runtime/files.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.capture.source import place_of_call
from weft.compile.programs import Content, Wanted
from weft.errors import RunError
from weft.runtime.checks.guarded import guard_rank
from weft.runtime.links.replicas import Replica
from weft.runtime.links.transport import Transport
from weft.runtime.program.calling import Arguments
from weft.runtime.program.files import files_of
from weft.runtime.program.surface import Modes, Surface
from weft.runtime.training.flow import Flow, open_flow, open_trained
from weft.runtime.training.load import load_sizes
from weft.runtime.training.parallel import Parallel
from weft.runtime.training.reduction import Reduction
from weft.runtime.weights.masters import tell_sums
from weft.runtime.weights.precision import Mixed
from weft.train.weights import Values, fill_all

MakeFiles = Callable[[Wanted], Content]
"""Makes programs when they are asked for."""


def open_rank(
    content: Content, transport: Transport, weights: Values, *, in_autocast: bool = False, **settings: Any
) -> Parallel:
    """The rank's module, with its values, watched over. All ranks of a replica call this together.

    Args:
        in_autocast: the program was captured under autocast.
        settings: of `open_module`.
    """
    module = open_module(content, transport, weights, **settings)
    module.in_autocast = in_autocast
    guard_rank(module, refusal)
    return module


def open_module(  # noqa: PLR0913 - each is a fact about the run
    content: Content,
    transport: Transport,
    weights: Values | None,
    *,
    seed: int = 0,
    otherwise: Values | None = None,
    known: Mapping[str, int] | None = None,
    make_files: MakeFiles | None = None,
    reduction: Reduction | None = None,
    mixed: Mixed | None = None,
    surface: Surface | None = None,
    returns_all: bool = False,
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
        surface: what the original shows besides.
        returns_all: a call gives what the original returns, where that is more than a loss.
    """
    files, order = files_of(content), known or {}
    replica = Replica(transport, files.devices)
    flow, pieces, masters = open_trained(files, replica, mixed, order)
    if weights is not None:
        fill_all((masters or pieces).modules, weights, otherwise, order)
    (masters or pieces).join_copies()

    def made(wanted: Wanted) -> Content:
        assert make_files is not None, "this module was made for training, at the example's sizes, only"
        return make_files(wanted)

    def make_flow(batch: Arguments | None, modes: Modes, outputs: bool) -> Flow:
        found = made(Wanted(modes=modes, batch=batch, outputs=outputs))
        if flow.is_whole and found == files:
            return flow
        other = open_flow(found, replica, batch)
        tell_sums(other.modules, mixed)
        return other

    def make_size(into: Flow, rows: int, modes: Modes) -> None:
        other = into is not flow
        found = made(Wanted(other, modes if other else frozenset(), into.batch, rows, other and returns_all))
        into.add(rows, load_sizes(found, replica, into.rank.sizes[0]))
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
        surface=surface,
        returns_all=returns_all,
    )


def refusal(message: str, remedy: str) -> RunError:
    """A wrong call of a parallel module, as an error of ours."""
    return RunError(message, place=place_of_call(), remedy=remedy)
