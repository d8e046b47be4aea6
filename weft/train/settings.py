"""Settings: how to train; and Trained: what came of it.

In: choices of the user's, checked for sense when they are made. Out: plain values for the report and for `--json`.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft.errors import RunError
from weft.train.memory.amounts import read_bytes
from weft.train.schedule import Schedule


@dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        steps: optimizer steps of the whole run, those before a resumed one's start counted too.
        devices: processes to start; as many as the plan needs if not given, and k times that for k replicas.
        device, backend: where processes compute; as `parallelize` chooses if not given.
        timeout: seconds that one collective may take.
        lr: of AdamW, instead of the optimizer of the file.
        schedule, warmup: how the learning rate changes over all steps.
        precision: to compute in, instead of the file's own.
        clip: the largest norm of all gradients together.
        init: how the values of the model are made: exactly as on one device, or by counting (`counter`).
        weights: files that they are read from instead.
        data: a text or arrays, instead of `data()`.
        eval_every: steps between two evaluations; one comes at the end too.
        save, save_every: where the state of the run is written, at the end and every so many steps.
        resume: where it is read from.
        tensorboard: where events are written.
        cache: where programs are kept; None keeps none.
        memory_limit: bytes of tensors that a rank may hold, as `2GiB`; a plan that needs more is not started.
        show: draw a progress bar.
    """

    steps: int = 10
    devices: int | None = None
    device: str | None = None
    backend: str | None = None
    timeout: float | None = None
    lr: float | None = None
    seed: int = 0
    schedule: str = "constant"
    warmup: int = 0
    precision: str | None = None
    clip: float | None = None
    init: Literal["exact", "counter"] = "exact"
    weights: str | None = None
    data: str | None = None
    eval_every: int | None = None
    save: str | None = None
    save_every: int | None = None
    resume: str | None = None
    tensorboard: str | None = None
    memory_limit: str | None = None
    show: bool = False
    cache: str | Path | None = None

    def __post_init__(self) -> None:
        _ = self.rates
        if self.memory_limit is not None:
            read_bytes(self.memory_limit)
        if self.clip is not None and not self.clip > 0:
            raise RunError(f"--clip {self.clip} leaves nothing of a gradient", remedy="a bound above 0")
        if self.lr is not None and not (self.lr >= 0 and math.isfinite(self.lr)):
            raise RunError(f"--lr {self.lr} is no learning rate", remedy="a number such as 3e-4")
        if self.weights is not None and self.resume is not None:
            raise RunError("--weights and --resume both say what to start from", remedy="leave out one of them")
        if self.save_every is not None and self.save is None:
            raise RunError("--save-every says when to save, and nothing says where", remedy="add --save DIR")
        if self.tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
            raise RunError(
                "--tensorboard needs tensorboard, which is not installed", remedy='pip install "weft[tensorboard]"'
            )

    @property
    def rates(self) -> Schedule:
        return Schedule(self.schedule, self.warmup, self.steps)


@dataclass(frozen=True)
class Trained:
    """What came of it. Losses are means over the replicas.

    Args:
        losses: of each step.
        evaluations: loss of each evaluation, by the number of steps before it.
        steps_per_second: after the first step; NaN if there was no other.
        unit, per_step: what a step goes through in all replicas: so many tokens, or samples.
        memory: bytes that each rank used at most.
        start: steps of the run that were done before.
        saved: where the state was written.
    """

    losses: tuple[float, ...]
    steps_per_second: float
    devices: int
    replicas: int
    evaluations: tuple[tuple[int, float], ...] = ()
    unit: str = "samples"
    per_step: int = 0
    memory: tuple[int, ...] = ()
    start: int = 0
    saved: str | None = None

    @property
    def per_second(self) -> float:
        """Tokens or samples."""
        return self.steps_per_second * self.per_step

    def as_json(self) -> dict[str, Any]:
        known = not math.isnan(self.steps_per_second)
        return {
            "loss_from": self.losses[0],
            "loss_to": self.losses[-1],
            "losses": list(self.losses),
            "evaluations": [{"step": step, "loss": loss} for step, loss in self.evaluations],
            "steps": len(self.losses),
            "start": self.start,
            "steps_per_second": self.steps_per_second if known else None,
            f"{self.unit}_per_second": self.per_second if known else None,
            "devices": self.devices,
            "replicas": self.replicas,
            "peak_memory": list(self.memory),
            "saved": self.saved,
        }
