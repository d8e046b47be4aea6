"""`weft train FILE --plan P`: compile here, start local processes, train.

In: a model file, a plan, a number of steps. Out: the losses and how fast it went. The launcher compiles; each process
gets its share of the program, makes the model of the file, keeps its own parts and trains on `data()`, or on
`example()` again and again. A rank that fails ends all, with one message; so does Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from weft.compile import compile_subject
from weft.errors import ModelFileError, PlanError, RunError
from weft.runtime.launch import Pool
from weft.runtime.processes import ProcessTransport
from weft.train.opened import cut_parameter, open_rank
from weft.verify.model_file import Inside, Optimizer, Subject, load_model_file
from weft.verify.optimizer import check_on_parts, make_optimizer
from weft.verify.parallel import told

Say = Callable[[str], None]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        devices: processes to start; as many as the plan needs if not given, and k times that for k replicas.
        lr: of AdamW, instead of the optimizer of the file.
        cache: where programs are kept; None keeps none.
        show: draw a progress bar.
    """

    steps: int = 10
    devices: int | None = None
    lr: float | None = None
    seed: int = 0
    show: bool = False
    cache: str | Path | None = None


@dataclass(frozen=True)
class Trained:
    """What came of it. Losses are means over the replicas."""

    losses: tuple[float, ...]
    steps_per_second: float
    """After the first step; NaN if there was no other."""
    devices: int
    replicas: int

    def as_json(self) -> dict[str, Any]:
        return {
            "loss_from": self.losses[0],
            "loss_to": self.losses[-1],
            "losses": list(self.losses),
            "steps": len(self.losses),
            "steps_per_second": None if math.isnan(self.steps_per_second) else self.steps_per_second,
            "devices": self.devices,
            "replicas": self.replicas,
        }


@dataclass(frozen=True)
class Order:
    """What a process is to do."""

    path: Path
    files: Mapping[str, bytes]
    settings: Settings


def train_file(
    path: str | Path, plan: str, settings: Settings, *, say: Say = lambda text: None, tell: Say = lambda text: None
) -> Trained:
    """Train the model of a file on local processes.

    Args:
        say: is told what is being done, for a progress display.
        tell: is told what a user must know: that the program was edited.
    """
    say("loading the model")
    subject = load_model_file(path)
    assert subject.path is not None
    compiled = compile_subject(subject, plan, _devices_for(plan, settings.devices), folder=settings.cache, say=say)
    if compiled.edited:
        tell(
            f"the program in {compiled.directory} was edited and is run as it is; compare it with one device: "
            f"weft verify {path} --program {compiled.directory}"
        )
    chosen = replace(subject, optimizer=chosen_optimizer(subject, settings))
    check_on_parts(chosen, cut_parameter(compiled.files))
    devices = compiled.devices
    num_ranks = devices if settings.devices is None else settings.devices
    if num_ranks % devices:
        raise PlanError(
            f"the plan is for {devices} devices, {num_ranks} were asked for",
            remedy=f"ask for a multiple of {devices}: each {devices} train a replica",
        )
    order = Order(subject.path.resolve(), compiled.files, settings)
    say(f"starting {num_ranks} processes")
    with Pool(num_ranks, preload=(__name__,)) as pool:
        found = told(lambda: pool.run(train_rank, order))
    losses = zip(*(one[0] for one in found[::devices]), strict=True)
    return Trained(
        losses=tuple(statistics.fmean(step) for step in losses),
        steps_per_second=found[0][1],
        devices=num_ranks,
        replicas=num_ranks // devices,
    )


def _devices_for(plan: str, devices: int | None) -> int | None:
    """A function in a file must be told how many devices there are; recipes and plan files know it themselves."""
    return devices if ".py:" in plan else None


def train_rank(transport: ProcessTransport, order: Order) -> tuple[list[float], float]:
    """What each process does: losses of all steps, and steps per second after the first."""
    settings, subject = order.settings, load_model_file(order.path)
    module = open_rank(order.files, transport, subject.model, seed=settings.seed)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    chosen = replace(subject, optimizer=chosen_optimizer(subject, settings))
    update = own_optimizer(chosen, parameters) if parameters else _Nothing()
    losses: list[float] = []
    started = time.perf_counter()
    batches = _batches(subject, module.replica, module.num_replicas)
    with _bar(settings, transport.rank) as advance:
        for step in range(settings.steps):
            losses.append(module.train_step(next(batches), update).item())
            if not math.isfinite(losses[-1]):
                raise RunError(f"the loss is {losses[-1]} in step {step}", remedy="a smaller --lr, or other data")
            advance(losses[-1])
            if step == 0:
                started = time.perf_counter()
    seconds = time.perf_counter() - started
    return losses, (settings.steps - 1) / seconds if settings.steps > 1 else math.nan


def chosen_optimizer(subject: Subject, settings: Settings) -> Optimizer:
    """That of the file, or the one that was asked for."""
    return subject.optimizer if settings.lr is None else _adamw(settings.lr)


def own_optimizer(subject: Subject, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer over this rank's parameters, and over no other tensor."""
    made = make_optimizer(subject, parameters)
    own = {id(parameter) for parameter in parameters}
    given = [parameter for group in made.param_groups for parameter in group["params"]]
    strange = [parameter for parameter in given if id(parameter) not in own]
    if strange:
        raise ModelFileError(
            f"optimizer(parameters) updates {len(strange)} tensors that are not among the parameters it was given, the "
            f"first of shape {list(strange[0].shape)}",
            place=subject.place,
            remedy="make it over `parameters`: a model made in the file is not the one that is trained",
        )
    return made


class _Nothing:
    """The optimizer of a rank that stores no trained parameter."""

    def step(self) -> None:
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        return None


def _adamw(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr)


def _batches(subject: Subject, replica: int, num_replicas: int) -> Iterator[Any]:
    """The batches of one replica, without end: `data()` from its start again when it has run out."""
    while subject.data is not None:
        number = -1
        with Inside(subject.path, "data()"):
            for number, batch in enumerate(subject.data()):
                if number % num_replicas == replica:
                    yield batch
        if number + 1 < num_replicas:
            raise ModelFileError(
                f"data() gave {number + 1} batches for {num_replicas} replicas",
                place=subject.place,
                remedy="give at least one for each",
            )
    while True:
        yield subject.example


class _bar:  # noqa: N801 - used as a function
    """A progress bar on rank 0; `advance(loss)` after each step."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=rank != 0 or not settings.show,
            transient=True,
        )
        self._task = self._progress.add_task("", total=settings.steps, loss=math.nan)

    def __enter__(self) -> Callable[[float], None]:
        self._progress.start()
        return lambda loss: self._progress.update(self._task, advance=1, loss=loss)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._progress.stop()


def run(options: argparse.Namespace) -> int:
    """The command: 0 if it trained, 130 if it was interrupted."""
    console = Console(stderr=True)
    settings = Settings(
        steps=options.steps,
        devices=options.devices,
        lr=options.lr,
        seed=options.seed,
        show=console.is_terminal and not options.json,
        cache=options.cache,
    )
    status = console.status("starting")

    def say(text: str) -> None:
        # from here on rank 0 draws its own bar
        if text.startswith("starting"):
            status.stop()
        status.update(text)

    try:
        with status:
            tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
            trained = train_file(options.file, options.plan, settings, say=say, tell=tell)
    except KeyboardInterrupt:
        console.print("interrupted: all processes have ended")
        return INTERRUPTED
    show = Console(highlight=False, soft_wrap=True)
    replicas = f", {trained.replicas} replicas" if trained.replicas > 1 else ""
    show.print(f"{options.file} under {options.plan} on {trained.devices} processes{replicas}", markup=False)
    rate = "" if math.isnan(trained.steps_per_second) else f", {trained.steps_per_second:.3g} steps/s"
    show.print(f"{len(trained.losses)} steps{rate}: loss {trained.losses[0]:.4f} -> {trained.losses[-1]:.4f}")
    if options.json:
        print(json.dumps(trained.as_json(), allow_nan=False))
    return 0
