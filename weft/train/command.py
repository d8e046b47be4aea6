"""`weft train FILE --plan P`: compile here, start local processes, train.

In: a model file, a plan, settings. Out: the losses, how fast it went, what it needed. The launcher checks everything
that can be checked, then compiles; each process gets its share of the program, makes the model of the file, keeps its
own parts and trains (`train/loop.py`). A rank that fails ends all, with one message; so do Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.capture.example import split_example
from weft.compile import Compiled, compile_subject
from weft.compile.model_file import Subject, load_model_file
from weft.compile.optimizer import check_on_parts, make_optimizer
from weft.compile.programs import Programs, Wanted
from weft.compile.subject import in_precision
from weft.compile.weight_files import open_files
from weft.errors import RunError
from weft.ops.coverage import coverage, unruled_warnings
from weft.runtime.jobs.launch import Pool
from weft.runtime.program.load import cut_parameters
from weft.runtime.start.initialise import Start
from weft.train.api import refuse_size
from weft.train.data import Choice, Source, check_file, make_source
from weft.train.loop import Order, Told, chosen_optimizer, train_rank
from weft.train.memory.expected import alike_ranks
from weft.train.memory.limit import check_limit, tell_scarce
from weft.train.saved import check_saved, check_target, open_saved
from weft.train.settings import Settings, Trained
from weft.train.starting import check_start
from weft.train.text import vocabularies
from weft.verify.ranks import told

Say = Callable[[str], None]

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM, as shells have them."""
MEBI = 1 << 20
MILESTONES = 6
"""So many losses of a run are shown at most, beside the first and the last."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers and `timeout` send: the run ends as after Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM an exception while the run goes on."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        # only the main thread may set handlers; elsewhere somebody else runs the process
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def train_file(
    path: str | Path,
    plan: str,
    settings: Settings,
    *,
    say: Say = lambda text: None,
    tell: Say = lambda text: None,
    pool: Pool | None = None,
) -> Trained:
    """Train the model of a file on local processes.

    Args:
        say: is told what is being done, for a progress display.
        tell: is told what a user must know: that the program was edited, that an operator has no rule.
        pool: of processes that are there already, as many as are needed.
    """
    if settings.save is not None:
        check_target(settings.save)
    if settings.data is not None:
        check_file(settings.data)
    saved = None if settings.resume is None else open_saved(settings.resume)
    if saved is not None and saved.progress.rates not in ("", str(settings.rates)):
        tell(
            f"the learning rate of the saved run was {saved.progress.rates}, it goes on {settings.rates}: not the run "
            "that never stopped"
        )
    say("loading the model")
    subject = _load(path, settings)
    compiled = compile_subject(subject, plan, _devices_for(plan, settings.devices), folder=settings.cache, say=say)
    _tell(compiled, path, tell)
    chosen = replace(subject, optimizer=chosen_optimizer(subject, settings))
    check_on_parts(chosen, cut_parameters(compiled.files))
    if settings.memory_limit is not None:
        say("foreseeing memory")
        check_limit(compiled.files, chosen, settings.memory_limit, ranks=alike_ranks(compiled), tell=tell)
    num_ranks = settings.devices or compiled.devices
    refuse_size(compiled.devices, num_ranks)
    if settings.memory_limit is None:
        tell_scarce(compiled, chosen, num_ranks, tell)
    choice = Choice(settings.data, settings.eval_every is not None, vocabularies(compiled.graph), settings.seed)
    source = make_source(subject, choice)
    order = Order(subject.origin, compiled.files, settings, plan, choice, saved=saved)
    programs = Programs(lambda module: subject, plan, compiled.devices, cache=settings.cache).after(compiled)
    if settings.eval_every is not None:
        say("compiling the evaluation")
        order = replace(order, eval_files=programs(Wanted()))
    _check_states(order, chosen, compiled, source)
    asked = {name: getattr(settings, name) for name in ("device", "backend", "timeout")}
    with Pool(num_ranks, **asked, preload=(__name__,)) if pool is None else nullcontext(pool) as workers:
        where = workers.chosen[0]
        tell(f"warning: {where.idle}" if where.idle else str(where))
        say(f"starting {num_ranks} processes")
        found: list[Told] = told(lambda: workers.run(train_rank, order))
    replicas = num_ranks // compiled.devices
    unit, per_step = count_example(subject.example)
    return Trained(
        losses=found[0].losses,
        steps_per_second=found[0].steps_per_second,
        devices=num_ranks,
        replicas=replicas,
        evaluations=found[0].evaluations,
        unit=unit,
        per_step=per_step * replicas,
        memory=tuple(one.memory for one in found),
        start=order.start,
        saved=settings.save,
    )


def _load(path: str | Path, settings: Settings) -> Subject:
    """The model of a file, hollow if that can be; refuses one without values, and weights that cannot be read."""
    if settings.weights is not None:
        open_files(settings.weights)
    subject = in_precision(load_model_file(path, hollow=settings.seed), settings.precision)
    check_start(Start(subject.model, subject.record), settings.init, has_weights=settings.weights is not None)
    return subject


def _tell(compiled: Compiled, path: str | Path, tell: Say) -> None:
    if compiled.edited:
        tell(
            f"the program in {compiled.directory} was edited and is run as it is; compare it with one device: "
            f"weft verify {path} --program {compiled.directory}"
        )
    if compiled.devices > 1:
        for text in unruled_warnings(coverage(compiled.graph).kinds):
            tell(f"warning: {text}")


def _devices_for(plan: str, devices: int | None) -> int | None:
    """A function in a file must be told how many devices there are; recipes and plan files know it themselves."""
    return devices if ".py:" in plan else None


def _check_states(order: Order, chosen: Subject, compiled: Compiled, source: Source) -> None:
    """Refuse a state that cannot be saved whole, or that is of another run."""
    settings = order.settings
    hidden = [one.names[0] for one in compiled.graph.buffers if one.update is not None and not one.persistent]
    if hidden and (settings.save or settings.resume):
        raise RunError(
            f"{hidden[0]} changes in every step and is not in the state dict: a resumed run would differ",
            place=chosen.place,
            remedy="register_buffer(..., persistent=True)",
        )
    if order.saved is None:
        return
    trained = [parameter for parameter in chosen.model.parameters() if parameter.requires_grad]
    kind = type(make_optimizer(chosen, trained)).__name__
    check_saved(order.saved, compiled.graph, optimizer=kind, seed=settings.seed, alphabet=source.alphabet)
    if order.start >= settings.steps:
        raise RunError(
            f"the saved run has done {order.start} steps, and {settings.steps} were asked for",
            remedy=f"--steps counts from the start: more than {order.start}",
        )


def count_example(example: Any) -> tuple[str, int]:
    """What a batch counts as: tokens if its first tensor holds integers of (rows, length), else samples."""
    first = next((one for one in pytree.tree_leaves(split_example(example)) if isinstance(one, Tensor)), None)
    if first is None or not first.dim():
        return "samples", 1
    if first.dim() == 2 and not first.dtype.is_floating_point:
        return "tokens", first.numel()
    return "samples", first.shape[0]


def run(options: argparse.Namespace) -> int:
    """The command: 0 if it trained, 130 if it was interrupted."""
    console = Console(stderr=True)
    taken = {name: value for name, value in vars(options).items() if name in Settings.__dataclass_fields__}
    settings = Settings(**taken, show=console.is_terminal and not options.json)
    status = console.status("starting")

    def say(text: str) -> None:
        # from here on rank 0 draws its own bar
        if text.startswith("starting"):
            status.stop()
        status.update(text)

    try:
        with status, terminable():
            tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
            trained = train_file(options.file, options.plan, settings, say=say, tell=tell)
    except KeyboardInterrupt as interrupt:
        # no way to tell it else: what ends the processes is the same for both signals
        terminated = isinstance(interrupt, Terminated)
        what = "terminated" if terminated else "interrupted"
        console.print(f"{what}: all processes have ended")
        if options.json:
            print(json.dumps({"error": what, "at": "", "try": ""}))
        return TERMINATED if terminated else INTERRUPTED
    show_trained(trained, f"{options.file} under {options.plan}")
    if options.json:
        print(json.dumps(trained.as_json(), allow_nan=False))
    return 0


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def milestones(steps: int) -> list[int]:
    """Steps whose losses are shown, counted from 1: the first, the last, and some between at round numbers.

    >>> milestones(3), milestones(30), milestones(2500)
    ([1, 2, 3], [1, 5, 10, 15, 20, 25, 30], [1, 500, 1000, 1500, 2000, 2500])
    """
    sizes = (factor * 10**power for power in range(12) for factor in (1, 2, 5))
    every = next(size for size in sizes if steps / size <= MILESTONES)
    return sorted({1, steps, *range(every, steps + 1, every)})


def show_trained(trained: Trained, title: str) -> None:
    """What came of it, for people."""
    show = partial(Console(highlight=False, soft_wrap=True).print, markup=False)
    replicas = f", {trained.replicas} replicas" if trained.replicas > 1 else ""
    show(f"{title} on {trained.devices} processes{replicas}")
    rate = ""
    if not math.isnan(trained.steps_per_second):
        rate = f", {trained.steps_per_second:.3g} steps/s, {_rounded(trained.per_second)} {trained.unit}/s"
    after = f" after {trained.start}" if trained.start else ""
    wide = len(str(trained.start + len(trained.losses)))
    for step in milestones(len(trained.losses))[:-1]:
        show(f"step {trained.start + step:>{wide}}  loss {trained.losses[step - 1]:.4f}")
    show(f"{len(trained.losses)} steps{after}{rate}: loss {trained.losses[0]:.4f} -> {trained.losses[-1]:.4f}")
    if trained.evaluations:
        show(f"evaluation: {', '.join(f'{loss:.4f} at {step}' for step, loss in trained.evaluations[-5:])}")
    most = max(trained.memory, default=0)
    show(f"memory: {most / MEBI:.0f} MiB at most on a rank ({', '.join(f'{m / MEBI:.0f}' for m in trained.memory)})")
    if trained.saved is not None:
        show(f"saved in {trained.saved}; go on with --resume {trained.saved}")
