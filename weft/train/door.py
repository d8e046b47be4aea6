"""parallelize(): from an ordinary module to this rank's share of it.

In: a module (or a function that makes it), an example, a plan. Out: under torchrun the rank's module, with
`emulate=True` a module with all ranks as threads of this process; both are called, trained and saved alike:

    parallel = weft.parallelize(model, example, plan="dp=2,tp=2")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-4)
    loss = parallel.train_step(batch, optimizer)

A part of an eager model returns what the original part does, complete on every rank; the model around it runs the same
on every rank, and gradients flow through the part to inputs that require one:

    model.encoder = weft.parallelize(model.encoder, example=torch.zeros(8, 64, requires_grad=True), plan="tp=2")
    model(batch).backward()

In evaluation a batch of other arguments (without labels) has a program of its own, which returns the model's outputs;
`parallel.generate(...)` decodes as a Hugging Face model does.

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
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from weft.cache import DEFAULT
from weft.compile import Compiled, compile_program
from weft.errors import PlanError, RunError
from weft.plan.plan import Plan
from weft.runtime.alone import Alone
from weft.runtime.connect import connect, is_launched
from weft.runtime.initialise import Start, begin, module_tensors
from weft.runtime.parallel import Batch
from weft.runtime.transport import Transport
from weft.train.emulated import Emulated, EmulatedPipeline
from weft.train.generating import Generate, generates
from weft.train.opened import AnyParallel, Content, EvalFiles, is_pipeline, num_devices, open_rank
from weft.train.weights import Replayed, Values, Weights, sample_hash
from weft.verify.door import PlanLike

Model = nn.Module | Callable[[], nn.Module]


def parallelize(  # noqa: PLR0913 - each is a choice of the user's
    model: Model,
    example: Any,
    plan: PlanLike,
    *,
    emulate: bool = False,
    devices: int | None = None,
    cache: str | Path | None = DEFAULT,
    seed: int = 0,
    weights: Weights | None = None,
    outputs: Literal["loss", "all"] | None = None,
) -> nn.Module:
    """Draw a module across devices.

    Args:
        model: a module whose forward returns a scalar loss, or tensors (a part of an eager model that runs the same on
            every rank), or a function that makes it: then no rank ever holds more
            than its own parts and one whole parameter, unless the construction looks at its values. It trains in the
            mode that it is in; `eval()` of the result is a program of its own, made when it is first called.
        example: a batch of one optimizer step; every batch has its form.
        plan: a recipe string (`dp=2,tp=2`), a plan file, `path.py:function`, a Plan, or a function of the Graph.
        emulate: run all ranks as threads of this process.
        devices: how many the plan is for; as many as it needs if not given. A job of k times as many ranks trains k
            replicas, each on its own batches, with averaged gradients.
        cache: where programs are kept, to be found again, read and edited; None keeps none.
        seed: of the random streams, and of the generator while `model()` is called, if it is a function.
        weights: where the values come from, if not from the module: a state dict, or files of one.
        outputs: "loss" returns the loss alone, as a forward with a loss does unless told otherwise; "all" returns what
            the forward returns, whole on every rank. Backward then starts from what the caller makes of it: gradients
            flow back to inputs that require one in the example. An output without a gradient counts as zeros.
    """
    if outputs not in (None, "loss", "all"):
        raise RunError(f"outputs is {outputs!r}", remedy='"loss", "all", or leave it out')
    start = Start(model) if isinstance(model, nn.Module) else begun(model, seed)
    opened = _Opening(start, weights, seed)
    programs = _Programs(model, example, plan, devices, cache, seed, "any" if outputs is None else outputs)
    if emulate:
        files = programs.training(start.module)
        eval_files = _Once(programs.evaluation)
        kind = EmulatedPipeline if is_pipeline(files) else Emulated
        made: nn.Module = kind(
            lambda transport: opened.rank(files, transport, eval_files), num_devices(files), eval_files
        )
    elif not is_launched():
        files = programs.training(start.module)
        refuse_processes(num_devices(files))
        made = opened.rank(files, Alone(), programs.evaluation)
    else:
        job = connect()
        refuse_different(job.transport, start)
        files = job.share(lambda: programs.training(start.module))
        refuse_size(num_devices(files), job.transport.num_ranks)
        made = opened.rank(files, job.transport, lambda batch: job.share(lambda: programs.evaluation(batch)))
    if generates(start.module):
        made.__dict__["generate"] = Generate(programs.module, made, example)
    return made


class _Programs:
    """Compiles the programs of a model: for training, and for evaluation as they are asked for."""

    def __init__(
        self,
        model: Model,
        example: Any,
        plan: PlanLike,
        devices: int | None,
        cache: str | Path | None,
        seed: int,
        outputs: str,
    ) -> None:
        self._model, self._example, self._plan = model, example, plan
        self._devices, self._cache, self._seed, self._outputs = devices, cache, seed, outputs
        self._trained: Plan | None = None

    def module(self) -> nn.Module:
        """The original, made anew if it can be: what a function made is not kept whole for this."""
        return self._model if isinstance(self._model, nn.Module) else begin(self._model, self._seed).module

    def training(self, module: nn.Module) -> Content:
        made = said(
            compile_program(module, self._example, self._plan, self._devices, folder=self._cache, outputs=self._outputs)
        )
        self._trained, self._devices = made.plan, made.plan.devices
        return made.files

    def evaluation(self, batch: Batch | None) -> Content:
        """For the example, or for a batch of other arguments: that one returns all that the forward does."""
        module = self.module()
        plan, example = self._plan, self._example if batch is None else as_example(batch)
        if isinstance(plan, Plan):
            # a Plan is about the graph of training: what it says is said again, of this one
            plan = partial(Plan, devices=plan.devices, lines=plan.lines)
        with in_eval(module):
            return said(
                compile_program(
                    module,
                    example,
                    plan,
                    self._devices,
                    folder=self._cache,
                    outputs=self._outputs if batch is None else "any",
                    like=self._trained,
                )
            ).files


def as_example(batch: Batch) -> Any:
    """A batch as an example."""
    args, kwargs = batch
    if args and kwargs:
        raise RunError(
            "a batch of other arguments than the example's is given partly by position, partly by keyword",
            remedy="give all of them by keyword",
        )
    return args or kwargs


class _Opening:
    """Makes the module of a rank, with the values that were asked for.

    Only what the values need of the module is kept: a hollow one goes."""

    def __init__(self, start: Start, weights: Weights | None, seed: int) -> None:
        own: Values = start.module if start.record is None else Replayed(start.record)
        self._values, self._own, self._seed = own if weights is None else weights, own, seed
        self._known = frozenset(module_tensors(start.module))

    def rank(self, files: Content, transport: Transport, eval_files: EvalFiles) -> AnyParallel:
        return open_rank(
            files,
            transport,
            self._values,
            seed=self._seed,
            otherwise=self._own,
            known=self._known,
            eval_files=eval_files,
        )


def begun(model: Callable[[], nn.Module], seed: int) -> Start:
    """The module of a function, without its values if that can be; says so if not."""
    start = begin(model, seed)
    if start.record is None:
        warnings.warn(
            f"the module is built whole on every rank, not one parameter at a time: {start.reason}", stacklevel=3
        )
    return start


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
            f"the program in {compiled.directory} was edited and is run as it is; `weft verify FILE --program "
            f"{compiled.directory}` compares it with one device; delete it to have it made anew",
            stacklevel=3,
        )
    return compiled


def refuse_processes(devices: int) -> None:
    """This process is the only one."""
    if devices > 1:
        raise RunError(
            f"the plan needs {devices} processes, and this one is alone",
            remedy=f"torchrun --nproc-per-node {devices} SCRIPT, or parallelize(..., emulate=True)",
        )


def refuse_size(devices: int, num_ranks: int) -> None:
    if num_ranks % devices:
        raise PlanError(
            f"the plan is for {devices} devices, the job has {num_ranks} processes",
            remedy=f"start a multiple of {devices}, or choose another plan",
        )


def refuse_different(transport: Transport, start: Start) -> None:
    """Every rank takes its parts of its own module: they must be the same module."""
    mine = bytes.fromhex(sample_hash(start.module) if start.record is None else start.record.digest())
    everybody = tuple(range(transport.num_ranks))
    found = transport.all_gather(torch.tensor(list(mine), dtype=torch.uint8, device=transport.device), everybody)
    other = next((rank for rank, theirs in enumerate(found) if bytes(theirs.tolist()) != mine), None)
    if other is not None:
        raise RunError(
            f"the modules of ranks {transport.rank} and {other} differ",
            remedy="make the module the same on every rank: torch.manual_seed(...) before it, or pass a function",
        )


class _Once:
    """Makes each program once, whichever thread asks first."""

    def __init__(self, make: EvalFiles) -> None:
        self._make, self._lock = make, threading.Lock()
        self._found: dict[str, Content] = {}

    def __call__(self, batch: Batch | None) -> Content:
        key = "" if batch is None else _told(batch)
        with self._lock:
            if key not in self._found:
                self._found[key] = self._make(batch)
            return self._found[key]


def _told(batch: Batch) -> str:
    """Equal for batches that one program serves."""
    leaves, spec = pytree.tree_flatten(batch)
    kinds = [
        f"{tuple(leaf.shape)} {leaf.dtype} {leaf.requires_grad}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    ]
    return f"{spec} {kinds}"
