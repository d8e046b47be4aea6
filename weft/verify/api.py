"""verify(): does a plan give the same numbers as one device?

In: a module (or model file) and a plan. Out: a Result. The programs are compiled as they would be for training and
evaluation; then the eager reference and the devices (emulated, or true processes) train, are evaluated and train on,
both in float64, and are compared; the first difference is looked for if there is one. Last both sides run in the
model's own precision: that rounding is told, not judged.
"""

from __future__ import annotations

from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

from torch import nn

from weft.compile.model_file import Subject
from weft.compile.optimizer import check_on_parts
from weft.compile.passes import Compiled, compile_subject
from weft.compile.pieces import InPieces, refuse_inference
from weft.compile.programs import Programs, Wanted
from weft.compile.subject import PlanLike, in_precision, make_subject
from weft.cost.links import load as load_links
from weft.errors import WeftError
from weft.lower.check import Report
from weft.order import check_schedule
from weft.runtime.jobs.devices import Device
from weft.runtime.program.files import Source, files_of
from weft.runtime.program.load import cut_parameters
from weft.runtime.program.own_modes import modes_after
from weft.runtime.program.surface import modes_of
from weft.runtime.weights.precision import Precision
from weft.verify.compare import Result
from weft.verify.judged import Say, judge
from weft.verify.processes import make_pool
from weft.verify.summary import summarize, summarize_pieces


def verify(  # noqa: PLR0913 - public: each argument is a choice of the user's
    model_or_file: nn.Module | str | Path,
    example: Any = None,
    *,
    plan: PlanLike,
    devices: int | None = None,
    links: str | Path | None = None,
    seed: int = 0,
    tolerance: float = 1e-9,
    processes: bool = False,
    device: Device | None = None,
    backend: str | None = None,
    timeout: float | None = None,
    precision: Precision | str | None = None,
    say: Say = lambda text: None,
) -> Result:
    """Compare a plan on several devices with the eager module on one, in float64.

    Args:
        model_or_file: a module whose forward returns a scalar loss, or the path of a model file.
        example: the batch of one optimizer step, if a module was given.
        plan: a recipe string (`dp=2,tp=2`), a plan file, `path.py:function`, a Plan, or a function of the Graph.
        devices: how many there are; as many as the plan needs if not given.
        links: a file written by `weft profile`; gloo's built-in costs if not given.
        seed: of the random stream that both sides draw from.
        tolerance: the largest difference that still counts as equal.
        processes: devices are processes of this machine, started for it; otherwise they are emulated.
        device, backend, timeout: of processes, as of `parallelize`.
        precision: "bf16", or a `weft.Precision`: the plan is compared in it too, against one device by its definition.
        say: is told what is being done, for a progress display.
    """
    say("loading the model")
    subject = in_precision(make_subject(model_or_file, example), precision)
    costs = None if links is None else load_links(links)
    compiled = compile_subject(subject, plan, devices, links=costs, say=say)
    refuse_inference(compiled.plan)
    pieces = compiled.pieces
    assert pieces is not None, "nothing comes from a cache here"
    if compiled.program is None:
        # an order without backward may be made, and is none to train by
        check_schedule(pieces.pipeline, pieces.schedule)
    files = files_of(compiled.files)
    check_on_parts(subject, cut_parameters(files))
    summary = _summary(pieces, compiled.report)
    evaluation = None
    try:
        evaluation = _evaluation(subject, plan, compiled, say)
    except WeftError as error:
        told = f"evaluation is not compared, and eval() would fail: {error.message}"
        summary = {**summary, "warnings": [*summary.get("warnings", ()), told]}
    with make_pool(compiled.devices, processes=processes, device=device, backend=backend, timeout=timeout) as pool:
        result = judge(
            files,
            compiled.graph,
            subject,
            seed=seed,
            tolerance=tolerance,
            say=say,
            pool=pool,
            pieces=pieces,
            evaluation=evaluation,
        )
    return replace(result, summary=summary)


def _evaluation(subject: Subject, plan: PlanLike, compiled: Compiled, say: Say) -> Source | None:
    """The program for evaluation, as `eval()` of a parallel module has it made; None if training is in its modes."""
    modes = modes_after(subject.model, methodcaller("eval"))
    if modes == modes_of(subject.model):
        return None
    say("compiling the program for evaluation")
    programs = Programs(lambda module: subject, plan, compiled.devices, cache=None, outputs="any")
    return files_of(programs.after(compiled)(Wanted(modes=modes, outputs=True)))


def _summary(made: InPieces, report: Report | None) -> dict[str, Any]:
    if made.program is None:
        return summarize_pieces(made.pipeline, made.schedule, made.spans, made.whole)
    assert report is not None, "a program of the whole batch was checked"
    return summarize(made.program, report)
