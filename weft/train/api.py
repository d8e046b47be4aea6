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

Promised: rank 0 compiles and all ranks run its program, or raise what it raises; every rank starts from its parts of
the values that the module has, and ranks whose modules differ are refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, Literal

import torch
from torch import nn

from weft.capture.example import register_dataclasses, split_example
from weft.capture.precision import chosen_precision
from weft.capture.rerun import Rerun
from weft.compile.cache import DEFAULT
from weft.compile.model_file import Subject
from weft.compile.pieces import as_example
from weft.compile.programs import Content, Programs
from weft.compile.subject import PlanLike
from weft.errors import PlanError, RunError
from weft.plan.batch import BatchDims
from weft.runtime.checks.batch_checksum import other_than
from weft.runtime.checks.guards import mark_replaced
from weft.runtime.checks.rarely import Rarely
from weft.runtime.checks.wrapping import ordinary
from weft.runtime.jobs.connect import connect, is_launched
from weft.runtime.jobs.devices import Device, choose, look, use_device
from weft.runtime.links.single_rank import SingleRank
from weft.runtime.links.transport import Transport
from weft.runtime.program.calling import Arguments
from weft.runtime.program.files import files_of
from weft.runtime.program.shown.attributes import same_state
from weft.runtime.program.surface import Modes, Surface, surface_of
from weft.runtime.start.initialise import Start, begin, original_order
from weft.runtime.training.parallel import Parallel
from weft.runtime.training.reduction import BadReduction, How, Reduction
from weft.runtime.weights.precision import Precision
from weft.train.emulated import Emulated
from weft.train.generating import Generate, generates
from weft.train.memory.limit import check_limit
from weft.train.opened import open_rank, refusal
from weft.train.starting import Init, Model, started, values_of
from weft.train.together import shared
from weft.train.weights import Values, Weights, sample_hash

Opened = partial[Parallel]
"""Opens a rank's program, with the values that were asked for."""


def parallelize(  # noqa: PLR0913 - each is a choice of the user's
    model: Model,
    example: Any,
    plan: PlanLike,
    *,
    emulate: bool = False,
    devices: int | None = None,
    device: Device | None = None,
    backend: str | None = None,
    timeout: float | None = None,
    cache: str | Path | None = DEFAULT,
    seed: int = 0,
    weights: Weights | None = None,
    init: Init = "exact",
    outputs: Literal["loss", "all"] | None = None,
    reduction: How = "mean",
    batch_dims: BatchDims | None = None,
    memory_limit: str | int | None = None,
    precision: Precision | str | None = None,
) -> nn.Module:
    """Make the parallel module of a module, an example batch and a plan.

    Modes and hooks that are set on the original afterwards have no effect on it; other values of what its forward reads
    (attributes, globals, ...) are refused at the next call.

    Args:
        model: a module whose forward returns a scalar loss, or tensors (a part of an eager model that runs the same on
            every rank), or a function that makes it: then no rank ever holds more than its own parts and one whole
            parameter, unless the construction looks at its values. It may lie on the meta device. It trains in the
            mode that it is in; `eval()` of the result is a program of its own, made when it is first called.
        example: a batch of one optimizer step; every batch has its form.
        plan: a recipe string (`dp=2,tp=2`), a plan file, `path.py:function`, a Plan, or a function of the Graph.
        emulate: run all ranks as threads of this process.
        devices: how many the plan is for; as many as it needs if not given. A job of k times as many ranks trains k
            replicas, each on its own batches, with averaged gradients.
        device, backend: where this rank computes, `cuda`, `cpu`, over `nccl`, `gloo`. If not given: on accelerators,
            if every rank has one of its own, else on the CPU (docs/gpus.md). timeout: seconds for one collective (60).
        cache: where programs are kept, to be found again, read and edited; None keeps none.
        seed: of the random streams, and of the generator while `model()` is called, if it is a function.
        weights: where the values come from, if not from the module: a state dict, or files of one.
        init: how a function's values are made: "exact" as on one device, "counter" of the same distributions, each rank
            its own elements; or a function that gives a module on the meta device its values (docs/state.md).
        outputs: what a call returns: what the forward returns, whole on every rank, with gradients, also to inputs that
            require one in the example; if that is more than a loss, by a second program, made at the first call.
            "loss": the loss alone; "all": all of it, by one program.
        reduction: how losses of micro-batches, and of replicas, become that of a step in `train_step`: "mean" by their
            rows, "sum", or a function that is called with each as the model is and gives its weight: `per_token(...)`.
        batch_dims: the batch dim of each tensor of a batch, in order or by name, None for one without; else dim 0.
        memory_limit: `2GiB`: a plan that needs more for a rank's tensors, with AdamW, is refused before it starts.
        precision: "bf16", "fp16" or a `weft.Precision`: compute so, with float32 masters of weights (docs/state.md).
    """
    with ordinary():
        wanted, reduced = _wanted_outputs(outputs), reduction_of(reduction)
        start = started(model, seed, init, weights)
        chosen = chosen_precision(precision, start.module, error=RunError)
        original = partial(_original, model, seed)
        surface = _surface(start.module, original, example, chosen, live=isinstance(model, nn.Module))
        settings = {"seed": seed, "reduction": reduced, "surface": surface, "returns_all": outputs is None}
        opened = _opened(start, values_of(start, init), _without_extra(weights, surface), chosen, **settings)
        about = partial(Subject, example=example, batch_dims=batch_dims, reduction=reduced, precision=chosen)
        programs = Programs(partial(_subject, about, original), plan, devices, cache=cache, outputs=wanted)
        trained = partial(_trained, programs, about(start.module), memory_limit)
        asked: dict[str, Any] = {"device": device, "backend": backend, "timeout": timeout}
        made = (_emulated if emulate else _launched)(trained, start, opened, programs, asked)
    if isinstance(model, nn.Module):
        mark_replaced(model.parameters(), refusal)
    if generates(start.module):
        made.__dict__["generate"] = Generate(original, made, example)
    return made


def _arguments(example: Any) -> Arguments:
    """Of a call. Pytree is to see into them on every rank: one captures, and all are given batches."""
    arguments = split_example(example)
    register_dataclasses(arguments)
    return arguments


def _original(model: Model, seed: int) -> nn.Module:
    return model if isinstance(model, nn.Module) else begin(model, seed).module


def _surface(
    module: nn.Module, original: Callable[[], nn.Module], example: Any, precision: Precision | None, *, live: bool
) -> Surface:
    """What the module shows; if it lives on, also whether its forward still does the same."""
    found = surface_of(module, original, _arguments(example), live=live)
    if not live:
        return found
    # in this thread alone, and before ranks take the module's values: fake tensors stand there meanwhile
    thread, first = get_ident(), Rerun(module, example, found.modes, precision)
    first.learn()

    def rerun(batch: Arguments | None, modes: Modes) -> Callable[[], str]:
        is_first = batch is None and modes == found.modes
        again = first if is_first else Rerun(module, example if batch is None else as_example(batch), modes, precision)
        return Rarely(again.difference, thread)

    return replace(found, rerun=rerun)


def _subject(
    about: Callable[[nn.Module], Subject], original: Callable[[], nn.Module], module: nn.Module | None
) -> Subject:
    return about(original() if module is None else module)


def _opened(start: Start, own: Values, weights: Weights | None, chosen: Precision | None, **settings: Any) -> Opened:
    """Only what the values need of the module is kept: a hollow one goes."""
    return partial(
        open_rank,
        weights=own if weights is None else weights,
        in_autocast=torch.is_autocast_enabled("cpu"),
        otherwise=own,
        known=original_order(start.module),
        mixed=None if chosen is None else chosen.mixed(start.module),
        **settings,
    )


def _without_extra(weights: Weights | None, surface: Surface) -> Weights | None:
    """A state dict without the extra states of modules, which must be those that the program is made with."""
    if not isinstance(weights, Mapping):
        return weights
    for name, state in surface.extra_states().items():
        if name in weights and not same_state(state, weights[name]):
            raise RunError(
                f"the extra state of {name.rpartition('.')[0] or 'the model'} in the weights is not the model's",
                remedy="load it into the model before parallelize()",
            )
    return {name: one for name, one in weights.items() if name not in surface.extra_states()}


def _wanted_outputs(outputs: str | None) -> str:
    if outputs not in (None, "loss", "all"):
        raise RunError(f"outputs is {outputs!r}", remedy='"loss", "all", or leave it out')
    return outputs or "any"


def _trained(programs: Programs, subject: Subject, memory_limit: str | int | None) -> Content:
    """The program for training, if it keeps within its limit."""
    files = programs.training(subject.model)
    if memory_limit is not None:
        check_limit(files, subject, memory_limit, tell=lambda text: warnings.warn(text, stacklevel=4))
    return files


def _emulated(
    trained: Callable[[], Content], start: Start, opened: Opened, programs: Programs, asked: dict[str, Any]
) -> nn.Module:
    """All ranks as threads of this process."""
    refuse_asked(asked)
    files = files_of(trained())
    make = partial(opened, files, make_files=programs)
    return Emulated(make, files.devices, programs, opened.keywords["known"], opened.keywords["surface"])


def _launched(
    trained: Callable[[], Content],
    start: Start,
    opened: Opened,
    programs: Programs,
    asked: dict[str, Any],
) -> nn.Module:
    """The rank that this process is."""
    timeout, backend = asked["timeout"], asked["backend"]
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):
        raise RunError(f"timeout={timeout!r} is no time", remedy="seconds that one collective may take, such as 600")
    if backend is not None and not isinstance(backend, str):
        raise RunError(f"backend={backend!r} is no backend", remedy='a name, such as "gloo" or "nccl"')
    if not is_launched():
        chosen = choose([replace(look(asked["device"], asked["backend"]), local=(0, 1))], 0)
        files = files_of(trained())
        refuse_processes(files.devices)
        if chosen.device.type != "cpu" or chosen.idle:
            chosen.tell()
        return opened(files, SingleRank(use_device(chosen.device)), make_files=programs)
    job = connect(**asked, whose=type(start.module).__name__)
    refuse_different(job.transport, start)
    files = files_of(shared(job, trained))
    refuse_size(files.devices, job.transport.num_ranks)
    return opened(files, job.transport, make_files=lambda wanted: shared(job, lambda: programs(wanted)))


def refuse_asked(asked: Mapping[str, object]) -> None:
    """Emulated ranks are threads on the CPU."""
    for name, value in asked.items():
        if value is not None and (name, str(value)) != ("device", "cpu"):
            raise RunError(
                f"{name}={value!r} is asked for, and emulate=True runs all ranks as threads on the CPU",
                remedy=f"leave out {name}=, or start processes: torchrun --nproc-per-node N SCRIPT",
            )


def reduction_of(how: How) -> Reduction:
    """How losses are reduced; refuses what is none."""
    try:
        return Reduction(how)
    except BadReduction as error:
        raise RunError(str(error), remedy='"mean", "sum", or a function that weighs a micro-batch') from None


def refuse_processes(devices: int) -> None:
    """This process is the only one."""
    if devices > 1:
        raise RunError(
            f"the plan needs {devices} processes, and this one is alone",
            remedy=f"torchrun --nproc-per-node {devices} SCRIPT, or parallelize(..., emulate=True)",
        )


def refuse_size(devices: int, num_ranks: int) -> None:
    """Processes must be whole replicas."""
    if num_ranks % devices:
        raise PlanError(
            f"the plan is for {devices} devices, the job has {num_ranks} processes",
            remedy=f"start a multiple of {devices}: each {devices} train a replica; or choose another plan",
        )


def refuse_different(transport: Transport, start: Start) -> None:
    """Every rank takes its parts of its own module: they must be the same module."""
    mine = bytes.fromhex(sample_hash(start.module) if start.record is None else start.record.digest())
    other = other_than(torch.tensor(list(mine), dtype=torch.uint8, device=transport.device), transport)
    if other is not None:
        raise RunError(
            f"the modules of ranks {transport.rank} and {other} differ",
            remedy="make the module the same on every rank: torch.manual_seed(...) before it, or pass a function",
        )
