"""compile_program(): the compiler as one list of named, timed passes.

In: a module, an example, a plan. Out: a Compiled: the Graph, the Plan, the Program with its proof, the emitted files
where the caller wants them, and the seconds that each pass took. The passes stand below in the order they run. A pass
that raises leaves nothing behind: files are written whole, by `weft/cache.py`, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from weft.cost.links import Links
from weft.ir.graph import Graph
from weft.ir.program import Program
from weft.lower import lower
from weft.lower.check import Report, check
from weft.plan.plan import Plan
from weft.verify.door import PlanLike, capture_subject, check_fit, make_plan
from weft.verify.model_file import Subject

Say = Callable[[str], None]


@dataclass(frozen=True)
class Compiled:
    """What the compiler made.

    Args:
        timings: seconds by pass, in the order they ran.
    """

    graph: Graph
    plan: Plan
    program: Program
    report: Report
    timings: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.timings.items())
        return f"{self.graph.name} on {self.program.devices} devices: {self.report} ({times})"


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
    say: Say = lambda text: None,
) -> Compiled:
    """The same for what a model file gives.

    Args:
        links: what communication costs; gloo's built-in table if not given.
        say: is told what is being done, for a progress display.
    """
    timer = Timer(say)
    with timer("capture"):
        graph = plan.graph if isinstance(plan, Plan) else capture_subject(subject)
        check_fit(graph, subject)
    with timer("plan"):
        made = make_plan(plan, graph, subject, devices)
    with timer("lower"):
        program = lower(made, links=links)
    with timer("check"):
        report = check(program, made.rules)
    return Compiled(graph, made, program, report, timer.seconds)


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
