"""The training loop of one rank.

In: an Order: what to load, the files of the program, the settings. Out: a Told: losses, evaluations, speed, memory.
The loop is the plain one: forward, backward, clip, update, with the learning rate, the batch and the random numbers of
each step given by its number, so that a run that goes on from a saved state is the run that never stopped.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.compile.model_file import Optimizer, Subject, load_model_file
from weft.compile.optimizer import make_optimizer
from weft.compile.programs import Content, Programs, Wanted
from weft.compile.subject import in_precision
from weft.errors import RunError
from weft.runtime.jobs.connect import Job
from weft.runtime.links.backend import PrefixStore, peak_memory
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.transport import Transport
from weft.runtime.program.files import files_of
from weft.runtime.start.initialise import Start, original_order
from weft.runtime.training.clip import Clip
from weft.runtime.training.parallel import Parallel
from weft.runtime.training.scaling import GradScaler
from weft.runtime.training.step import call
from weft.train.data import Choice, Source, make_source
from weft.train.events import Shown
from weft.train.opened import open_rank
from weft.train.saved import Progress, Saved, restore, save
from weft.train.schedule import Rates
from weft.train.settings import Settings
from weft.train.starting import Init, values_of
from weft.train.weights import Weights


@dataclass(frozen=True)
class Order:
    """What a process is to do.

    Args:
        origin: of the model: a path, or `hf:...`.
        plan: by which programs are made that are needed later, for so many devices.
        eval_files: the program of `eval()`, if there is evaluation.
        saved: the run to go on with.
    """

    origin: str
    files: Content
    settings: Settings
    plan: str = ""
    choice: Choice = field(default_factory=Choice)
    eval_files: Content | None = None
    saved: Saved | None = None

    @property
    def start(self) -> int:
        return 0 if self.saved is None else self.saved.progress.step


@dataclass(frozen=True)
class Told:
    """What a rank tells at the end."""

    losses: tuple[float, ...]
    evaluations: tuple[tuple[int, float], ...]
    steps_per_second: float
    memory: int


def train_rank(transport: ProcessTransport, order: Order) -> Told:
    """What each process does."""
    # every rank makes the model and the data for itself: with the same numbers, also in files that set no seed
    torch.manual_seed(order.settings.seed)
    random.seed(order.settings.seed)
    subject = in_precision(load_model_file(order.origin, hollow=order.settings.seed), order.settings.precision)
    chosen = replace(subject, optimizer=chosen_optimizer(subject, order.settings))
    module = _open(transport, order, subject)
    optimizer = optimizer_of(chosen, module)
    if order.saved is not None:
        restore(order.saved, module, optimizer)
    run = Run(order, module, optimizer, make_source(subject, order.choice), scaler_of(subject, transport, order.saved))
    with Shown(order.settings, transport.rank, order.start) as shown:
        return run.train(shown)


def _open(transport: ProcessTransport, order: Order, subject: Subject) -> Parallel:
    job = Job(transport, PrefixStore("shared", transport.store))
    programs = Programs(lambda module: subject, order.plan, files_of(order.files).devices, cache=order.settings.cache)

    def make_files(wanted: Wanted) -> Content:
        if wanted == Wanted() and order.eval_files is not None:
            return order.eval_files
        return job.share(lambda: programs(wanted))

    return open_subject(
        order.files,
        transport,
        subject,
        order.settings.weights if order.saved is None else order.saved.model,
        order.settings.init,
        seed=order.settings.seed,
        make_files=make_files,
    )


def open_subject(
    files: Content,
    transport: Transport,
    subject: Subject,
    weights: Weights | None = None,
    init: Init = "exact",
    **settings: Any,
) -> Parallel:
    """The rank's module of what a model file gives, with its values or others."""
    own = values_of(Start(subject.model, subject.record), init)
    return open_rank(
        files,
        transport,
        weights or subject.weights or own,
        otherwise=own,
        known=original_order(subject.model),
        reduction=subject.reduction,
        mixed=subject.mixed,
        **settings,
    )


Step = tuple[int, Tensor, dict[str, float | Tensor]]
"""Its number, its loss, and what else is shown of it."""


class Run:
    """One rank's run."""

    def __init__(
        self, order: Order, module: Parallel, optimizer: Any, source: Source, scaler: GradScaler | None = None
    ) -> None:
        self._order, self._settings, self._scaler = order, order.settings, scaler
        self._module, self._optimizer, self._source = module, optimizer, source
        self._rates = Rates(optimizer, order.settings.rates)
        self._clip = None if order.settings.clip is None else Clip(module)
        self._evaluations: list[tuple[int, float]] = []

    def train(self, shown: Shown) -> Told:
        """All steps."""
        settings, module, losses = self._settings, self._module, list[float]()
        batches = self._source.batches(module.replica, module.num_replicas, self._order.start)
        started, away = time.perf_counter(), 0.0
        made: list[Step] = []
        for step in range(self._order.start, settings.steps):
            made.append((step, *self._step(step, next(batches))))
            # a device is asked for numbers when it has the next step to do
            while len(made) > (self._lags and losses != [] and not self._pauses(step + 1)):
                losses.append(self._told(*made.pop(0), shown))
            before = time.perf_counter()
            self._between(step + 1, shown)
            away += time.perf_counter() - before
            if len(losses) == 1:
                # the first step warms up
                started, away = time.perf_counter(), 0.0
        seconds = time.perf_counter() - started - away
        rate = (len(losses) - 1) / seconds if len(losses) > 1 else math.nan
        memory = peak_memory(module.program.transport.device)
        return Told(tuple(losses), tuple(self._evaluations), rate, memory)

    @property
    def _lags(self) -> bool:
        """What a step gives is read after the next one was issued."""
        return self._module.program.transport.device.type != "cpu"

    def _step(self, step: int, batch: Any) -> tuple[Tensor, dict[str, float | Tensor]]:
        numbers: dict[str, float | Tensor] = {"train/lr": self._rates.begin(step)}

        def clip() -> None:
            if self._clip is not None:
                numbers["train/gradient_norm"] = self._clip(self._settings.clip or math.inf)

        loss = self._module.train_step(batch, self._optimizer, prepare=clip, scaler=self._scaler)
        return self._module.over_replicas(loss), numbers

    def _told(self, step: int, loss: Tensor, numbers: dict[str, float | Tensor], shown: Shown) -> float:
        """The loss of a step, which is shown; refuses to go on after one that is not finite."""
        found = loss.item()
        if not math.isfinite(found):
            raise RunError(f"the loss is {found} in step {step}", remedy="a smaller --lr, --clip 1.0, or other data")
        shown.step(step, found, {name: float(number) for name, number in numbers.items()})
        return found

    def _pauses(self, done: int) -> bool:
        """After so many steps there is an evaluation, or something is saved."""
        every = (self._settings.eval_every, self._settings.save_every)
        return done == self._settings.steps or any(one is not None and done % one == 0 for one in every)

    def _between(self, done: int, shown: Shown) -> None:
        """Evaluate and save, if it is time."""
        settings, last = self._settings, done == self._settings.steps
        if settings.eval_every is not None and (done % settings.eval_every == 0 or last):
            self._evaluations.append((done, self.evaluate()))
            shown.write(done, {"eval/loss": self._evaluations[-1][1]})
        due = settings.save_every is not None and done % settings.save_every == 0
        if settings.save is not None and (due or last) and self._module.replica == 0:
            kind = type(self._optimizer).__name__
            save(
                settings.save,
                self._module,
                self._optimizer,
                Progress(
                    done,
                    settings.seed,
                    kind,
                    self._source.alphabet,
                    str(settings.rates),
                    scaler={} if self._scaler is None else self._scaler.state_dict(),
                ),
            )

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over the batches for evaluation, without dropout."""
        module = self._module.eval()
        losses = [
            module.over_replicas(call(module, batch).detach()).double()
            for batch in self._source.eval_batches(module.replica, module.num_replicas)
        ]
        module.train()
        return torch.stack(losses).mean().item()


def scaler_of(subject: Subject, transport: ProcessTransport, saved: Saved | None) -> GradScaler | None:
    """float16 has a small range: losses are scaled."""
    if subject.precision is None or subject.precision.compute is not torch.float16:
        return None
    scaler = GradScaler(transport.device.type)
    if saved is not None and saved.progress.scaler:
        scaler.load_state_dict(dict(saved.progress.scaler))
    return scaler


def chosen_optimizer(subject: Subject, settings: Settings) -> Optimizer:
    """That of the file, or the one that was asked for."""
    return subject.optimizer if settings.lr is None else partial(torch.optim.AdamW, lr=settings.lr)


def optimizer_of(subject: Subject, module: Parallel) -> torch.optim.Optimizer:
    """Over what a rank trains."""
    return make_optimizer(subject, [parameter for parameter in module.parameters() if parameter.requires_grad])
