"""verify(): does a plan give the same numbers as one device?

In: a module (or model file) and a plan. Out: a Result. The steps stand below in the order they run: capture, plan,
lower, check, then the eager reference and the devices (emulated, or true processes), both in float64, the comparison,
and the search for the first difference if there is one. Last both sides run in the model's own precision: that
rounding is told, not judged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from weft.capture import capture
from weft.capture.example import is_marked
from weft.capture.precision import chosen_precision
from weft.capture.specialise import at_example
from weft.codegen.sampled import generate_for_sizes
from weft.cost.links import load as load_links
from weft.errors import ModelFileError, PlanError, RunError
from weft.ir.graph import Graph
from weft.ir.program import Program
from weft.lower import lower
from weft.lower.check import check
from weft.ops.arguments import arguments, overload
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.runtime.launch import Pool
from weft.runtime.precision import Precision
from weft.verify.compare import Difference, FirstDifference, Processes, Result, Rounded, Sample, compare, count_silenced
from weft.verify.judged import round_off, run_both
from weft.verify.locate import locate, locate_in_code
from weft.verify.model_file import Inside, Subject, load_model_file
from weft.verify.optimizer import check_optimizer
from weft.verify.parallel import run_parallel, whole_tensors
from weft.verify.pieces import compile_pieces, is_in_pieces, refuse_inference
from weft.verify.pipelined import judge_pieces
from weft.verify.processes import emitted, make_pool
from weft.verify.reference import run_reference
from weft.verify.sizes import with_other_sizes
from weft.verify.summary import summarize

PlanLike = Plan | str | Path | Callable[[Graph], Plan]
Say = Callable[[str], None]


def verify(  # noqa: PLR0913 - the public door: each argument is a choice of the user's
    model_or_file: nn.Module | str | Path,
    example: Any = None,
    *,
    plan: PlanLike,
    devices: int | None = None,
    links: str | Path | None = None,
    seed: int = 0,
    tolerance: float = 1e-9,
    processes: bool = False,
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
        precision: "bf16", or a `weft.Precision`: the plan is compared in it too, against one device by its definition.
        say: is told what is being done, for a progress display.
    """
    say("loading the model")
    subject = in_precision(make_subject(model_or_file, example), precision)
    say("capturing the model")
    graph = graph_for(plan, subject)
    check_fit(graph, subject)
    say("lowering the plan")
    made = make_plan(plan, at_example(graph), subject, devices)
    costs = None if links is None else load_links(links)
    if is_in_pieces(made):
        refuse_inference(made)
        remade = partial(make_plan, plan, subject=subject, devices=devices)
        pieces = compile_pieces(subject, made, capture_subject, remade, links=costs)
        with ExitStack() as stack:
            pool = stack.enter_context(make_pool(made.devices)) if processes else None
            return judge_pieces(pieces, subject, seed=seed, tolerance=tolerance, say=say, pool=pool)
    lowered = partial(lower, links=costs)
    program = lowered(made)
    say("checking the program")
    report = check(program)
    check_optimizer(subject, program)
    with ExitStack() as stack:
        files = None
        if graph.symbols:
            say("making one program for all sizes")
            files = generate_for_sizes(
                graph, made, partial(make_plan, plan, subject=subject, devices=devices), lowered
            ).files
        pool = stack.enter_context(make_pool(program.devices)) if processes else None
        result = judge(program, subject, seed=seed, tolerance=tolerance, say=say, pool=pool)
        if files is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-")))
            for name, content in files.items():
                (folder / name).write_bytes(content)
            result = with_other_sizes(result, folder, graph, subject, seed=seed, pool=pool, say=say)
    return replace(result, summary=summarize(program, report))


def make_subject(model_or_file: nn.Module | str | Path, example: Any) -> Subject:
    """The module and its example."""
    if not isinstance(model_or_file, nn.Module):
        return load_model_file(model_or_file)
    if example is None:
        raise ModelFileError(
            f"no example was given for {type(model_or_file).__name__}",
            remedy="pass the batch of one optimizer step: a tuple of arguments or a dict of keyword arguments",
        )
    return Subject(model_or_file, example)


def in_precision(subject: Subject, precision: Precision | str | None) -> Subject:
    """A subject in the precision that was asked for, or in its own."""
    if precision is None:
        return subject
    found = chosen_precision(precision, subject.model, error=RunError, place=f"precision {str(precision)!r}")
    return replace(subject, precision=found)


def capture_subject(subject: Subject, *, trains: bool = True) -> Graph:
    """The Graph of a subject; refuses one without a loss if it is to be trained by one."""
    with Inside(subject.path, "the forward", only=(SystemExit,)):
        graph = capture(subject.model, subject.example, precision=subject.precision)
    check_dense(graph)
    if trains and (graph.loss is None or not graph.tensors[graph.loss].needs_grad):
        raise ModelFileError(
            "the forward gives no loss to train: "
            + ("it returns no scalar" if graph.loss is None else "its loss depends on no trained parameter"),
            place=subject.place,
            remedy="return a scalar loss that depends on a trained parameter, or a dict or model output that has one",
        )
    return graph


def graph_for(plan: PlanLike, subject: Subject, *, trains: bool = True) -> Graph:
    """The Graph that a plan is about: its own, unless dims of the example were marked since, or a precision chosen."""
    chosen = subject.precision is not None
    if isinstance(plan, Plan) and not chosen and (plan.graph.symbols or not is_marked(subject.example)):
        return plan.graph
    return capture_subject(subject, trains=trains)


def check_dense(graph: Graph) -> None:
    """Refuse sparse gradients: nothing here can add them up."""
    for op in graph.ops:
        if overload(op.target) is not None and arguments(op).get("sparse") is True:
            raise ModelFileError(
                f"{op.kind} gives a sparse gradient, which cannot be summed over devices",
                place=op.place,
                remedy="leave out sparse=True",
            )


def check_fit(graph: Graph, subject: Subject) -> None:
    """Refuse a graph that was captured from another model or another example."""
    found = {name: tuple(held.shape) for name, held in whole_tensors(graph, subject, wide=False).every()}
    wrong = [name for name, shape in found.items() if graph.tensors[name].sizes != shape]
    if wrong:
        shape, sizes = found[wrong[0]], graph.tensors[wrong[0]].sizes
        raise PlanError(
            f"the plan is for another model: {wrong[0]} is {list(shape)}, planned as {list(sizes)}",
            place=subject.place,
            remedy="capture this model with this example and plan its graph",
        )


def make_plan(plan: PlanLike, graph: Graph, subject: Subject, devices: int | None) -> Plan:
    """A Plan for the graph, from whatever describes one."""
    if isinstance(plan, str | Path):
        return load_plan(str(plan), graph, devices, batch_dims=subject.batch_dims)
    if isinstance(plan, Plan):
        # what it says is said again of the graph at other sizes
        made = plan if plan.graph is graph else Plan(graph, plan.devices, plan.lines)
    else:
        made = plan(graph)
    if not isinstance(made, Plan):
        raise PlanError(f"the plan function returned a {type(made).__name__}", remedy="return a Plan")
    if devices is not None and devices < made.devices:
        raise PlanError(f"the plan needs {made.devices} devices, there are {devices}", remedy="give more devices")
    return made


def judge(
    program: Program,
    subject: Subject,
    *,
    seed: int,
    tolerance: float,
    say: Say = lambda text: None,
    pool: Pool | None = None,
) -> Result:
    """Run both sides and compare them; on the processes of `pool` if there is one."""
    say("training on one device, in float64")
    reference = run_reference(subject, seed=seed, wide=True)
    ours, processes = run_devices(program, subject, reference, seed=seed, say=say, pool=pool)
    differences = compare(ours, reference)
    largest = max(found.value for found in differences)
    equal = largest < tolerance and not ours.disagreements
    first = None
    if not equal:
        say("looking for the first difference")
        first = look(program, subject, ours, reference, seed=seed, tolerance=tolerance, generated=pool is not None)
    say("training on both in the model's own precision")
    rounding, rounded = measure_rounding(program, subject, reference, seed=seed, pool=pool)
    return Result(
        equal=equal and (rounded is None or not rounded.wrong),
        largest_difference=largest,
        differences=differences,
        tolerance=tolerance,
        devices=program.devices,
        first_difference=first,
        disagreements=ours.disagreements,
        rounding=rounding,
        silenced=count_silenced(ours, reference),
        processes=processes,
        rounded=rounded,
    )


def run_devices(
    program: Program, subject: Subject, reference: Sample, *, seed: int, say: Say, pool: Pool | None
) -> tuple[Sample, Processes | None]:
    """Train on the devices in float64; on processes also how they compare with the emulator."""
    say(f"training on {program.devices} emulated devices, in float64")
    if pool is None:
        return run_parallel(program, subject, seed=seed, wide=True, reference=reference), None
    with emitted(program) as directory:
        return run_both(directory, program.graph, subject, reference, seed=seed, say=say, pool=pool)


def look(
    program: Program,
    subject: Subject,
    ours: Sample,
    reference: Sample,
    *,
    seed: int,
    tolerance: float,
    generated: bool,
) -> FirstDifference | None:
    """Where the sides part. The interpreter knows every op; if it agrees with one device, generated code does not."""
    if generated:
        interpreted = run_parallel(program, subject, seed=seed, wide=True, reference=reference)
        if max(found.value for found in compare(interpreted, reference)) < tolerance:
            return locate_in_code(program.graph, ours, reference, tolerance)
    return locate(program, subject, ours, reference, seed=seed, tolerance=tolerance)


def measure_rounding(
    program: Program, subject: Subject, truth: Sample, *, seed: int, pool: Pool | None
) -> tuple[tuple[Difference, ...], Rounded | None]:
    """The largest difference of each kind in the model's own precision; in one that was asked for it is judged."""
    if subject.precision is not None:
        with emitted(program) as directory:
            return round_off(directory, program.graph, subject, truth, seed=seed, pool=pool)
    ours = run_parallel(program, subject, seed=seed, wide=False)
    return compare(ours, run_reference(subject, seed=seed, wide=False)), None
