"""parallelize(): from an ordinary module to this rank's share of it.

In: a module (or a function that makes it), an example, a plan. Out: under torchrun the rank's module, with
`emulate=True` a module with all ranks as threads of this process; both are called, trained and saved alike:

    parallel = weft.parallelize(model, example, plan="dp=2,tp=2")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-4)
    loss = parallel.train_step(batch, optimizer)

Promised: rank 0 compiles and all ranks run its program, or none; every rank starts from its parts of the values that
the module has, and ranks whose modules differ are refused.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.cache import DEFAULT
from weft.compile import Compiled, compile_program
from weft.errors import PlanError, RunError
from weft.plan.plan import Plan
from weft.runtime.alone import Alone
from weft.runtime.connect import connect, is_launched
from weft.runtime.initialise import build
from weft.runtime.parallel import Parallel
from weft.runtime.transport import Transport
from weft.train.emulated import Emulated
from weft.train.opened import Content, num_devices, open_rank
from weft.train.weights import Weights, sample_hash
from weft.verify.door import PlanLike

Model = nn.Module | Callable[[], nn.Module]


def parallelize(
    model: Model,
    example: Any,
    plan: PlanLike,
    *,
    emulate: bool = False,
    devices: int | None = None,
    cache: str | Path | None = DEFAULT,
    seed: int = 0,
    weights: Weights | None = None,
) -> nn.Module:
    """Draw a module across devices.

    Args:
        model: a module whose forward returns a scalar loss, or a function that makes it. It trains in the mode that
            it is in; `eval()` of the result is a program of its own, made when it is first called.
        example: a batch of one optimizer step; every batch has its form.
        plan: a recipe string (`dp=2,tp=2`), a plan file, `path.py:function`, a Plan, or a function of the Graph.
        emulate: run all ranks as threads of this process.
        devices: how many the plan is for; as many as it needs if not given. A job of k times as many ranks trains k
            replicas, each on its own batches, with averaged gradients.
        cache: where programs are kept, to be found again, read and edited; None keeps none.
        seed: of the random streams, and of the generator while `model()` is called, if it is a function.
        weights: where the values come from, if not from the module: a state dict, or files of one.
    """
    whole = model if isinstance(model, nn.Module) else build(model, seed)
    values: Weights = whole if weights is None else weights

    def compiled(module: nn.Module, how: PlanLike = plan) -> Content:
        return said(compile_program(module, example, how, devices, folder=cache)).files

    def compiled_eval() -> Content:
        # made anew if it can be: what a function made is not kept whole for this
        module = model if isinstance(model, nn.Module) else build(model, seed)
        with in_eval(module):
            # a Plan is about the graph of training: what it says is said again, of this one
            return compiled(
                module, plan if not isinstance(plan, Plan) else partial(Plan, devices=plan.devices, lines=plan.lines)
            )

    if emulate:
        eval_files, files = _Once(compiled_eval), compiled(whole)

        def make(transport: Transport) -> Parallel:
            return open_rank(files, transport, values, seed=seed, eval_files=eval_files)

        return Emulated(make, num_devices(files), eval_files)
    if not is_launched():
        return alone(compiled(whole), values, seed, compiled_eval)
    job = connect()
    refuse_different(job.transport, whole)
    files = job.share(lambda: compiled(whole))
    refuse_size(num_devices(files), job.transport.num_ranks)
    return open_rank(files, job.transport, values, seed=seed, eval_files=lambda: job.share(compiled_eval))


@contextmanager
def in_eval(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; afterwards each part of it is in the mode it was in."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def said(compiled: Compiled) -> Compiled:
    """Tell of an edited program; it is used as it is."""
    if compiled.edited:
        warnings.warn(
            f"the program in {compiled.directory} was edited and is run as it is; `weft verify --program "
            f"{compiled.directory}` compares it with one device; delete it to have it made anew",
            stacklevel=3,
        )
    return compiled


def alone(files: Content, weights: Weights, seed: int, eval_files: Callable[[], Content]) -> nn.Module:
    """On the one device of this process."""
    devices = num_devices(files)
    if devices > 1:
        raise RunError(
            f"the plan needs {devices} processes, and this one is alone",
            remedy=f"torchrun --nproc-per-node {devices} SCRIPT, or parallelize(..., emulate=True)",
        )
    return open_rank(files, Alone(), weights, seed=seed, eval_files=eval_files)


def refuse_size(devices: int, num_ranks: int) -> None:
    if num_ranks % devices:
        raise PlanError(
            f"the plan is for {devices} devices, the job has {num_ranks} processes",
            remedy=f"start a multiple of {devices}, or choose another plan",
        )


def refuse_different(transport: Transport, module: nn.Module) -> None:
    """Every rank takes its parts of its own module: they must be the same module."""
    mine = bytes.fromhex(sample_hash(module))
    everybody = tuple(range(transport.num_ranks))
    found = transport.all_gather(torch.tensor(list(mine), dtype=torch.uint8, device=transport.device), everybody)
    other = next((rank for rank, theirs in enumerate(found) if bytes(theirs.tolist()) != mine), None)
    if other is not None:
        raise RunError(
            f"the modules of ranks {transport.rank} and {other} differ",
            remedy="make the module the same on every rank: torch.manual_seed(...) before it, or pass a function",
        )


class _Once:
    """Calls a function once, whichever thread asks first."""

    def __init__(self, make: Callable[[], Content]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._found: Content | None = None

    def __call__(self) -> Content:
        with self._lock:
            if self._found is None:
                self._found = self._make()
            return self._found
