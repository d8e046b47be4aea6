"""compile_program(): the compiler as one list of named, timed passes.

In: a module, an example, a plan. Out: a Compiled: the Graph, the Plan, the emitted files of the program, and the
seconds that each pass took. The passes stand below in the order they run. With a cache, a program that was made before
from the same content is not made again. A pass that raises leaves nothing behind.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from weft.capture.specialise import at_example
from weft.codegen.sizes.sampled import Make, generate_for_sizes
from weft.compile import cache
from weft.compile.model_file import Subject
from weft.compile.pieces import InPieces, is_in_pieces, lower_prepared, prepare_pieces, warn_of_marks
from weft.compile.subject import PlanLike, check_fit, graph_for, make_plan
from weft.cost.links import Links
from weft.errors import CaptureError, PlanError
from weft.ir.graph import Graph
from weft.ir.program import Program
from weft.lower import lower, stored_parameters
from weft.lower.check import Report, check
from weft.lower.idle import reached_from_some
from weft.plan.plan import Plan
from weft.runtime.program.returns import NotReturned, Returns, returns_of

Say = Callable[[str], None]
About = dict[str, Any]
"""What is written about a program: where it comes from, what it returns."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler made.

    Args:
        files: of the emitted program, by name.
        pieces: what they were generated from. None if they come from the cache.
        report: of the check of a program without stages and micro-batches.
        directory: of the cache, if there is one.
        edited: the files in the cache are no longer as they were emitted. They are used as they are.
        timings: seconds by pass, in the order they ran.
    """

    graph: Graph
    plan: Plan
    files: Mapping[str, bytes] = field(default_factory=dict)
    pieces: InPieces | None = None
    report: Report | None = None
    directory: Path | None = None
    edited: bool = False
    timings: Mapping[str, float] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return self.plan.devices

    @property
    def program(self) -> Program | None:
        """That of a plan without stages and micro-batches; None if it comes from the cache."""
        return None if self.pieces is None else self.pieces.program

    def __str__(self) -> str:
        times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.timings.items())
        what = "from the cache" if self.pieces is None else f"{len(self.pieces.pipeline.segments)} pieces"
        what = what if self.report is None else str(self.report)
        return f"{self.graph.name} on {self.devices} devices: {what} ({times})"


def compile_program(
    module: nn.Module, example: Any, plan: PlanLike, devices: int | None = None, **settings: Any
) -> Compiled:
    """Compile a module for the devices of a plan.

    Args:
        module: its forward returns a scalar loss.
        example: the batch of one optimizer step.
        plan: a recipe string (`dp=2,tp=2`), a plan file, `path.py:function`, a Plan, or a function of the Graph.
        devices: how many there are; as many as the plan needs if not given.
        settings: of `compile_subject`.
    """
    return compile_subject(Subject(module, example), plan, devices, **settings)


@contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for no cycles meanwhile: what passes make lives until their end, and would be looked at in vain."""
    if not gc.isenabled():
        # by another thread's compilation, maybe, which ends now: what is not switched off here stays as it is
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@uncollected()
def compile_subject(  # noqa: PLR0913 - each is a choice of the caller's
    subject: Subject,
    plan: PlanLike,
    devices: int | None = None,
    *,
    links: Links | None = None,
    folder: str | Path | None = None,
    outputs: str = "loss",
    like: Plan | None = None,
    captured: Graph | None = None,
    say: Say = lambda text: None,
) -> Compiled:
    """The same for what a model file gives.

    Args:
        links: what communication costs; gloo's built-in table if not given.
        folder: of the cache; none if not given.
        outputs: "loss": the forward must return one, and the program does. "all": the program returns what the forward
            returns, and backward starts from there. "any": a loss if there is one, else all. "forward": a loss if
            that is what the forward returns, else all.
        like: a plan of the same model: parameters are stored as it has them.
        captured: the Graph, if it is there already.
        say: is told what is being done, for a progress display.
    """
    timer = Timer(say)
    with timer("capture"):
        graph = captured or graph_for(plan, subject, trains=outputs == "loss")
        check_fit(graph, subject)
        if is_open(graph, outputs):
            returned(graph)
    with timer("plan"):

        def make(other: Graph) -> Plan:
            return make_plan(plan, other, subject, devices)

        made = make(at_example(graph))
    known = Compiled(graph, made, timings=timer.seconds)
    costs = "" if links is None else links.to_json()
    if is_in_pieces(made):
        if is_open(graph, outputs):
            raise _no_loss(graph, subject.place)
        with timer("micro-batches"):
            prepared = prepare_pieces(subject, made, make)
            warn_of_marks(graph, prepared.dims)

        def lower_all() -> InPieces:
            with timer("pieces"):
                return lower_prepared(prepared, links=links)

        if callable(prepared.plans[0].schedule):
            # the order of a step by a function is known when it has been called
            known = replace(known, pieces=lower_all())
        order = "" if known.pieces is None else known.pieces.schedule
        return kept(
            known,
            folder,
            lambda about: _emitted(known, known.pieces or lower_all(), timer, about),
            f"{costs} {order}",
            prepared.plans,
        )
    if returns_all := is_open(graph, outputs):
        costs += str(returned(graph))
    emitted = partial(_emit_whole, known, make, links, like, timer, returns_all=returns_all)
    # other costs may make another program of the same plan
    return kept(known, folder, emitted, costs, () if like is None else (like,))


def kept(
    known: Compiled, folder: str | Path | None, emitted: Callable[[About], Compiled], more: str, others: Sequence[Plan]
) -> Compiled:
    """The program, from the cache if it is there; without a folder it is just made.

    Args:
        known: what is there without the files.
        emitted: makes it, given what is to be written about its origin.
        more, others: what else it is made from, beside the graph and the plan.
    """
    told = about_graph(known.graph)
    if folder is None:
        return emitted({"key": "", **told})
    key = cache.program_key(known.graph, known.plan, more, others)
    directory = cache.directory_of(Path(folder), known.plan, key)
    found, made = cache.look_up(directory, key), known
    if found is None:
        made = emitted({"key": key, **told})
        found = cache.write(directory, key, made.files)
    else:
        made = replace(known, files=found.complete())
    return replace(made, directory=found.directory, edited=bool(found.edited))


def _emit_whole(
    known: Compiled,
    make: Make,
    links: Links | None,
    like: Plan | None,
    timer: Timer,
    about: About,
    *,
    returns_all: bool,
) -> Compiled:
    """The passes from a plan without stages and micro-batches to files.

    Args:
        make: plans the graph at other sizes, if it has dynamic dims.
        returns_all: the program returns what the forward returns.
    """
    graph, plan = known.graph, known.plan
    stored = None if like is None else stored_parameters(like, links=links)
    lowered = partial(lower, links=links, outputs="open" if returns_all else "loss", stored=stored)
    if returns_all:
        about["output"] = returned(graph).to_json()
        outputs = list(dict.fromkeys(name for name in graph.outputs if name is not None))
        inputs = [one.tensor for one in graph.inputs]
        some = reached_from_some(graph, outputs, inputs)
        about["reached_from"] = {inputs.index(name): places for name, places in some.items()}
    about["needs_grad"] = [graph.tensors[one.tensor].needs_grad for one in graph.inputs]
    if graph.symbols:
        with timer("emit for all sizes"):
            sized = generate_for_sizes(graph, plan, make, lowered, about=about)
        return replace(known, files=sized.files, pieces=InPieces.of(plan, sized.program), report=sized.report)
    with timer("lower"):
        program = lowered(plan)
    with timer("check"):
        report = check(program, plan.rules)
    return replace(_emitted(known, InPieces.of(plan, program), timer, about), report=report)


def _emitted(known: Compiled, pieces: InPieces, timer: Timer, about: About) -> Compiled:
    with timer("emit"):
        return replace(known, files=pieces.files(about), pieces=pieces)


def returned(graph: Graph) -> Returns:
    """What the forward returns; refuses what a program cannot give back."""
    try:
        return returns_of(graph.out_spec, graph.outputs, graph.out_leaves)
    except NotReturned as error:
        raise CaptureError(
            str(error),
            remedy="return tensors and plain values, in tuples, lists, dicts or dataclasses of an importable class",
        ) from None


def _no_loss(graph: Graph, place: str) -> PlanError:
    """The error of a pipeline over a forward whose outputs are asked for, or that returns no loss."""
    shapes = [list(graph.tensors[name].shape) for name in graph.outputs if name is not None]
    scalars = shapes.count([])
    what, remedy = ", ".join(map(str, shapes[:3])), 'return {"loss": loss, "logits": logits}: evaluation returns both'
    if graph.loss is not None:
        what, remedy = "all outputs", 'leave out outputs="all": evaluation returns what the forward returns'
    elif scalars > 1:
        what, remedy = f"{scalars} scalars, none of which is called loss", 'return {"loss": loss, ...}'
    elif shapes in ([[1]], [[1, 1]]):
        remedy = "return a scalar, loss.squeeze()"
    return PlanError(
        f"a plan in stages or micro-batches trains a loss, and what is asked for returns something else: {what}",
        place=place,
        remedy=f"{remedy}; or a plan without pp and microbatches",
    )


def is_open(graph: Graph, outputs: str) -> bool:
    """True if the program returns what the forward returns, not its loss alone."""
    return (
        outputs == "all"
        or (outputs != "loss" and graph.loss is None)
        or (outputs == "forward" and not graph.out_spec.is_leaf())
    )


def about_graph(graph: Graph) -> About:
    """What is written about every program: what it was made from, and whether the forward returns a loss, more than
    that, or none."""
    alone = "loss" if graph.out_spec.is_leaf() else "more"
    return {"made_from": cache.origin(graph), "forward": "none" if graph.loss is None else alone}


class Timer:
    """Times passes by name and says which one runs."""

    def __init__(self, say: Say = lambda text: None) -> None:
        self.seconds: dict[str, float] = {}
        self._say = say

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._say(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
