"""compile_program(): the compiler as one list of named, timed passes.

In: a module, an example, a plan. Out: a Compiled: the Graph, the Plan, the emitted files of the program, and the
seconds that each pass took. The passes stand below in the order they run. With a cache, a program that was made before
from the same content is not made again. A pass that raises leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from weft import cache
from weft.codegen import generate
from weft.cost.links import Links
from weft.ir.graph import Graph
from weft.ir.program import Program
from weft.lower import lower
from weft.lower.check import Report, check
from weft.plan.plan import Plan
from weft.runtime.batch import Form, dtype_name
from weft.verify.door import PlanLike, capture_subject, check_fit, make_plan
from weft.verify.model_file import Subject

Say = Callable[[str], None]


@dataclass(frozen=True)
class Compiled:
    """What the compiler made.

    Args:
        program, report: None if the files come from the cache.
        files: of the emitted program, by name.
        directory: of the cache, if there is one.
        edited: the files in the cache are no longer as they were emitted. They are used as they are.
        timings: seconds by pass, in the order they ran.
    """

    graph: Graph
    plan: Plan
    program: Program | None
    report: Report | None
    files: Mapping[str, bytes]
    directory: Path | None = None
    edited: bool = False
    timings: Mapping[str, float] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return self.plan.devices

    def __str__(self) -> str:
        times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.timings.items())
        what = "from the cache" if self.report is None else str(self.report)
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


def compile_subject(
    subject: Subject,
    plan: PlanLike,
    devices: int | None = None,
    *,
    links: Links | None = None,
    folder: str | Path | None = None,
    say: Say = lambda text: None,
) -> Compiled:
    """The same for what a model file gives.

    Args:
        links: what communication costs; gloo's built-in table if not given.
        folder: of the cache; none if not given.
        say: is told what is being done, for a progress display.
    """
    timer = Timer(say)
    with timer("capture"):
        graph = plan.graph if isinstance(plan, Plan) else capture_subject(subject)
        check_fit(graph, subject)
    with timer("plan"):
        made = make_plan(plan, graph, subject, devices)
    if folder is None:
        return build(graph, made, links, timer)
    # other costs may make another program of the same plan
    key = cache.program_key(graph, made, "" if links is None else links.to_json())
    directory = cache.directory_of(Path(folder), graph, key)
    found = cache.look_up(directory, key)
    if found is not None:
        files = found.files()
        return Compiled(graph, made, None, None, files, directory, found.edited, timer.seconds)
    compiled = build(graph, made, links, timer, key)
    found = cache.write(directory, key, compiled.files)
    return replace(compiled, directory=found.directory, edited=found.edited)


def build(graph: Graph, plan: Plan, links: Links | None, timer: Timer, key: str = "") -> Compiled:
    """The passes from a plan to files."""
    with timer("lower"):
        program = lower(plan, links=links)
    with timer("check"):
        report = check(program, plan.rules)
    with timer("emit"):
        about = {"key": key, "batch": form_of(graph).to_json(), "made_from": cache.origin(graph)}
        files = generate(program, about=about)
    return Compiled(graph, plan, program, report, files, timings=timer.seconds)


def form_of(graph: Graph) -> Form:
    """What every batch must look like."""
    keywords = graph.in_spec.child(1).context if graph.in_spec is not None else ()
    tensors = {one.index for one in graph.inputs}
    return Form(
        spec=str(graph.in_spec),
        keywords=tuple(keywords),
        leaves=tuple("" if at in tensors else repr(leaf) for at, leaf in enumerate(graph.leaves)),
        tensors=tuple(
            (one.index, one.where, graph.tensors[one.tensor].sizes, dtype_name(graph.tensors[one.tensor].dtype))
            for one in graph.inputs
        ),
    )


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
