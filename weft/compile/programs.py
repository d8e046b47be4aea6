"""Programs: what the compiler makes of one model, when it is asked for.

In: a model, an example, a plan. Out: the files of the program for training; later those for evaluation, for batches of
other arguments, and, of plans in pieces, for micro-batches of other sizes. Promised: all keep parameters where training
has them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.capture.specialise import at_example
from weft.compile.model_file import Subject
from weft.compile.passes import Compiled, about_graph, compile_subject, is_open, returned
from weft.compile.pieces import InPieces, as_example, is_in_pieces, refuse_inference
from weft.compile.subject import PlanLike, capture_subject, check_fit, make_plan
from weft.compile.variants import at_size, for_evaluation
from weft.ir.graph import Graph
from weft.plan.plan import Plan
from weft.runtime.program.asks import memory_format
from weft.runtime.program.calling import Arguments
from weft.runtime.program.files import files_of
from weft.runtime.program.returns import lost
from weft.runtime.program.surface import Modes, modes_kept, modes_of, set_modes

Content = Mapping[str, bytes]
"""Files of a program by name."""


@dataclass(frozen=True)
class Wanted:
    """A program that is not there yet.

    Args:
        evaluation: it is not that of training at another size.
        modes: what is in training mode.
        batch: of other arguments than the example's.
        rows: of micro-batches that a program in pieces is to serve too.
        outputs: it is to return all that the forward returns, not its loss alone.
    """

    evaluation: bool = True
    modes: Modes = frozenset()
    batch: Arguments | None = None
    rows: int | None = None
    outputs: bool = False


class Programs:
    """Compiles the programs of a model.

    Args:
        subject: gives the model and its example, anew unless the module is given: what a function made is not kept.
        devices: as many as the plan needs if None.
        cache: where programs are kept; None keeps none.
        outputs: as of `compile_subject`.
    """

    def __init__(
        self,
        subject: Callable[[nn.Module | None], Subject],
        plan: PlanLike,
        devices: int | None,
        *,
        cache: str | Path | None,
        outputs: str = "loss",
    ) -> None:
        self._subject, self._plan, self._devices, self._cache, self._outputs = subject, plan, devices, cache, outputs
        self._trained: Plan | None = None
        self._captured: tuple[Graph, Modes] | None = None
        self._pieces: InPieces | None = None
        self._evaluations: dict[str, InPieces] = {}
        self._found, self._lock = dict[str, Content](), threading.Lock()

    def training(self, module: nn.Module | None = None) -> Content:
        """The program for training; `module`: that of the subject, if it is there already."""
        subject = self._subject(module)
        made = said(compile_subject(subject, self._plan, self._devices, folder=self._cache, outputs=self._outputs))
        self.after(made)
        if self._outputs == "all":
            tell_lost(made.graph)
        if not made.graph.out_spec.is_leaf():
            # a program that returns more than the loss may be asked for
            self._captured = made.graph, modes_of(subject.model)
        return made.files

    def after(self, training: Compiled) -> Programs:
        """These programs, with what was compiled for training already."""
        refuse_inference(training.plan)
        self._trained, self._devices = training.plan, training.plan.devices
        self._pieces = training.pieces if is_in_pieces(training.plan) else None
        return self

    def __call__(self, wanted: Wanted) -> Content:
        """Another program; each is made once, whichever thread asks first."""
        key = f"{wanted.evaluation} {sorted(wanted.modes)} {wanted.rows} {wanted.outputs} {told(wanted.batch)}"
        with self._lock:
            if key not in self._found:
                self._found[key] = files_of(self._made(wanted))
            return self._found[key]

    def _made(self, wanted: Wanted) -> Content:
        if self._trained is None:
            self.training()
        assert self._trained is not None
        subject = self._subject(None)
        if not is_in_pieces(self._trained):
            return self._whole(self._about(subject, wanted.batch), wanted)
        if not wanted.evaluation:
            assert wanted.rows is not None, "the program for training is there"
            made = at_size(self._trained_pieces(), subject, wanted.rows, self._make(subject))
            return made.files()
        about = self._about(subject, wanted.batch)
        with in_modes(about.model, wanted.modes):
            return self._evaluation(about, wanted)

    def _about(self, subject: Subject, batch: Arguments | None) -> Subject:
        if batch is None:
            return subject
        return replace(subject, example=as_example(batch), grad=torch.is_grad_enabled())

    def _whole(self, subject: Subject, wanted: Wanted) -> Content:
        """The program for other modes, or one that returns more."""
        plan, captured = self._plan, None
        if wanted.batch is None and self._captured is not None and self._captured[1] == wanted.modes:
            captured = self._captured[0]
        if isinstance(plan, Plan):
            # a Plan is about the graph of training: what it says is said again, of this one
            plan = partial(Plan, devices=plan.devices, lines=plan.lines)
        with in_modes(subject.model, wanted.modes):
            made = said(
                compile_subject(
                    subject,
                    plan,
                    self._devices,
                    folder=self._cache,
                    outputs=self._outputs_of(wanted),
                    like=self._trained,
                    captured=captured,
                )
            )
        if wanted.batch is not None:
            tell_lost(made.graph)
        return made.files

    def _outputs_of(self, wanted: Wanted) -> str:
        """As of `compile_subject`. In evaluation a batch of other arguments need not have a loss."""
        if wanted.outputs:
            return "forward"
        return self._outputs if wanted.batch is None or "" in wanted.modes or self._outputs == "all" else "any"

    def _trained_pieces(self) -> InPieces:
        """The pieces of training; they are made again if the program came from a cache."""
        if self._pieces is None:
            made = compile_subject(self._subject(None), self._plan, self._devices, outputs=self._outputs)
            assert made.pieces is not None, "a program in pieces was asked for"
            self._pieces = made.pieces
        return self._pieces

    def _evaluation(self, subject: Subject, wanted: Wanted) -> Content:
        """That of a model in pieces: forwards alone; with `rows`, for micro-batches of another size."""
        key, make = f"{sorted(wanted.modes)} {wanted.outputs} {told(wanted.batch)}", self._make(subject)
        outputs = self._outputs_of(wanted)
        if key not in self._evaluations:
            graph = at_example(capture_subject(subject, trains=False))
            check_fit(graph, subject)
            opened = is_open(graph, outputs)
            names = [name for name in graph.outputs if name is not None] if opened else [str(graph.loss)]
            self._evaluations[key] = for_evaluation(
                self._trained_pieces(), subject, graph, make, returns=list(dict.fromkeys(names))
            )
        made = self._evaluations[key]
        output = returned(made.whole).to_json() if is_open(made.whole, outputs) else None
        about = {**about_graph(made.whole), "output": output}
        return (made if wanted.rows is None else at_size(made, subject, wanted.rows, make)).files(about)

    def _make(self, subject: Subject) -> Callable[[Graph], Plan]:
        return partial(make_plan, self._plan, subject=subject, devices=self._devices)


def tell_lost(graph: Graph) -> None:
    """Warn of what a program cannot return, where all that the forward returns was asked for."""
    if kinds := lost(graph.out_leaves):
        warnings.warn(f"the forward returns a {kinds[0]}, which a program does not: it is None", stacklevel=4)


def told(batch: Arguments | None) -> str:
    """Equal for batches that one program serves."""
    if batch is None:
        return ""
    leaves, spec = pytree.tree_flatten(batch)
    kinds = [
        f"{tuple(leaf.shape)} {leaf.dtype} {leaf.requires_grad} {memory_format(leaf)}"
        if isinstance(leaf, Tensor)
        else repr(leaf)
        for leaf in leaves
    ]
    return f"{spec} {kinds} {torch.is_grad_enabled()}"


@contextmanager
def in_modes(module: nn.Module, modes: Modes) -> Iterator[None]:
    """The module with these submodules in training mode; afterwards each is in the mode it was in."""
    with modes_kept(module):
        set_modes(module, modes)
        yield


def said(compiled: Compiled) -> Compiled:
    """Tell of an edited program; it is used as it is."""
    if compiled.edited:
        warnings.warn(
            f"the program in {compiled.directory} was edited and is run as it is; `weft verify FILE --program "
            f"{compiled.directory}` compares it with one device; delete it to have it made anew",
            stacklevel=3,
        )
    return compiled
