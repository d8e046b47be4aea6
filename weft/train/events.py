"""What rank 0 shows while it trains: a progress bar, and TensorBoard events if they are asked for.

In: numbers of each step. Out: a bar on stderr, or a line now and then where stderr is no terminal; events in a
directory. Other ranks show nothing.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weft.train.settings import Settings

EVERY = 10.0
"""Seconds between two lines, where there is no bar."""


class Shown:
    """The display of one rank; a context, so that the terminal is left as it was."""

    def __init__(self, settings: Settings, rank: int, start: int) -> None:
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
        self._task = self._progress.add_task("", total=settings.steps, completed=start, loss=math.nan)
        self._lines = rank == 0 and not settings.show
        self._steps, self._told = settings.steps, time.monotonic()
        self._events: Any = None
        if settings.tensorboard is not None and rank == 0:
            self._events = importlib.import_module("torch.utils.tensorboard").SummaryWriter(settings.tensorboard)

    def __enter__(self) -> Shown:
        self._progress.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._progress.stop()
        if self._events is not None:
            self._events.close()

    def step(self, step: int, loss: float, numbers: Mapping[str, float]) -> None:
        """A step is done."""
        self._progress.update(self._task, advance=1, loss=loss)
        if self._lines and time.monotonic() > self._told + EVERY:
            self._told = time.monotonic()
            print(f"step {step + 1} of {self._steps}: loss {loss:.4f}", file=sys.stderr, flush=True)
        self.write(step, {"train/loss": loss, **numbers})

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers that are only written."""
        if self._events is not None:
            for name, value in numbers.items():
                if not math.isnan(value):
                    self._events.add_scalar(name, value, step)
