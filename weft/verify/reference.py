"""The reference: the original eager module, trained for two steps.

In: the user's module and example, untouched (a copy runs). Out: a Sample: the loss and every gradient of each step, the
weights and buffers after the last. Promised: nothing of Weft's capture takes part, only the random draws are replaced
by the stream that the Program uses, and in float64 lower dtypes are widened and the update takes gradients that are
rounding only as zero (compare.py). Checkpointed functions run once: what they
save is memory, what they would cost is a second draw of every random number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes as disabled_modes
from torch.utils._pytree import tree_map

from weft.capture.example import split_example
from weft.compile.model_file import Subject, check_loss, inside
from weft.compile.optimizer import make_optimizer
from weft.errors import ModelFileError, RunError, WeftError
from weft.ops.precision import Float64Mode, widen
from weft.runtime.random import Stream
from weft.runtime.training.microbatches import BatchDim, split_arguments
from weft.verify.compare import Sample, noise_in
from weft.verify.draw_mode import DrawMode
from weft.verify.mixed import OneDevice
from weft.verify.precision import precision_of

NUM_STEPS = 2

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the forward."""
Cut = tuple[Sequence[Batch], Sequence[float]]
"""Micro-batches, and what the loss of each counts."""


def run_reference(
    subject: Subject,
    *,
    seed: int,
    wide: bool,
    microbatches: int = 1,
    dims: Sequence[BatchDim] | None = None,
) -> Sample:
    """Train a copy of the eager module for two steps on the example.

    Args:
        wide: in float64 throughout; otherwise in the module's own precision.
        microbatches: the batch of a step is run in so many parts, whose losses count as the subject says.
        dims: the batch dim of each tensor in the example.
    """
    module = copy_module(subject.model)
    # Before any mode is on: a copy is not a computation. One per step, since a forward may write to its input.
    batches = [split_example(copy.deepcopy(subject.example)) for _ in range(NUM_STEPS)]
    precision = subject.precision
    own = (float_dtype(module) if precision is None else precision.compute) if wide else None
    mixed = None if wide or precision is None else OneDevice(module, precision)
    with ExitStack() as stack:
        stack.enter_context(direct_checkpoints())
        if wide:
            widen_module(module)
            batches = tree_map(widen, batches)
            stack.enter_context(Float64Mode())
        counts = shares_of(subject, microbatches, dims)
        parts = [(split_arguments(args, kwargs, dims, microbatches)[0], counts) for args, kwargs in batches]
        return _train(module, parts, subject, seed, own=own, mixed=mixed)


def shares_of(subject: Subject, microbatches: int, dims: Sequence[BatchDim] | None) -> list[float]:
    """What the loss of each micro-batch of the example counts in that of the step."""
    args, kwargs = split_example(subject.example)
    examples, by_rows = split_arguments(args, dict(kwargs), dims, microbatches)
    if microbatches == 1 or subject.reduction.how == "mean":
        return by_rows
    with inside(subject.path, "reduction"):
        return subject.reduction.shares(subject.reduction.weights(examples, [1] * microbatches))


def _train(
    module: nn.Module,
    batches: Sequence[Cut],
    subject: Subject,
    seed: int,
    *,
    own: torch.dtype | None,
    mixed: OneDevice | None,
) -> Sample:
    """Train on the micro-batches of each step; in float64 for a module whose own dtype is given."""
    wide = own is not None
    named = dict(module.named_parameters()) if mixed is None else mixed.named()
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    update = make_optimizer(subject, trained) if trained else None
    losses, gradients = [], []
    for step, parts in enumerate(batches):
        # the model sees the limits of its own dtype; the update, which both sides do in float64, does not
        with nullcontext() if own is None else precision_of(own):
            losses.append(_accumulate(module, parts, subject, seed, step, wide=wide, mixed=mixed))
        gradients.append({name: one.grad.detach().clone() for name, one in named.items() if one.grad is not None})
        if wide:
            # rounding only: taken as zero, as the devices do
            for name, noise in noise_in(gradients[-1]).items():
                named[name].grad = noise.silence(gradients[-1][name])
        if update is not None:
            with inside(subject.path, "the optimizer's step()"):
                update.step()
        for parameter in named.values():
            parameter.grad = None
    weights = {name: one.detach().clone() for name, one in (*named.items(), *module.named_buffers())}
    return Sample(losses=tuple(losses), gradients=tuple(gradients), weights=weights)


def _accumulate(
    module: nn.Module, parts: Cut, subject: Subject, seed: int, step: int, *, wide: bool, mixed: OneDevice | None
) -> Tensor:
    """The gradients of a step, one micro-batch after the other, and its loss."""
    total = None
    if mixed is not None:
        mixed.refresh()
    for micro, (batch, share) in enumerate(zip(*parts, strict=True)):
        args, kwargs = batch if mixed is None else mixed.inputs(batch)
        with (
            DrawMode(Stream(seed, step, micro)),
            inside(subject.path, "the forward"),
            _wide_told(subject, wide=wide),
            nullcontext() if mixed is None else mixed.forward(),
        ):
            output = module(*args, **kwargs)
        loss = check_loss(output, subject.place)
        if not share:
            continue  # counts nothing, whatever it is
        if not bool(torch.isfinite(loss)):
            raise RunError(
                f"the model's own loss is {loss.item()} in step {step + 1}: nothing can be compared",
                place=subject.place,
                remedy="give an example and initial weights with a finite loss",
            )
        loss = loss if share == 1 else loss * share
        with inside(subject.path, "the backward"), _wide_told(subject, wide=wide):
            loss.backward()
        if mixed is not None:
            mixed.add()
        total = loss.detach().clone() if total is None else total + loss.detach()
    if total is None:
        raise RunError(
            f"no micro-batch of step {step + 1} counts anything: nothing can be compared",
            place=subject.place,
            remedy="give an example in which some micro-batch weighs something",
        )
    if mixed is not None:
        mixed.finish()
    return total


@contextmanager
def _wide_told(subject: Subject, *, wide: bool) -> Iterator[None]:
    """Tells a failure of float64 alone as such: the model may well run in its own precision."""
    try:
        yield
    except Exception as error:
        if not wide or isinstance(error, WeftError):
            raise
        with disabled_modes():
            fine = _runs_narrow(subject)
        if not fine:
            raise
        raise ModelFileError(
            f"the forward fails in float64, in which verify runs it: {type(error).__name__}: {error}",
            place=subject.place,
            remedy="use operators that have a float64 version",
        ) from error


def _runs_narrow(subject: Subject) -> bool:
    """True if the model trains in its own precision."""
    module = copy_module(subject.model)
    args, kwargs = split_example(copy.deepcopy(subject.example))
    with suppress(RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError):
        check_loss(module(*args, **kwargs), subject.place).backward()
        return True
    return False


def copy_module(model: nn.Module) -> nn.Module:
    """A deep copy, so that the user's module stays as it is."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                attached = f"{path}.{name}".lstrip(".")
                raise ModelFileError(
                    f"{type(model).__name__} cannot be copied: its attribute {attached} is part of an autograd graph",
                    remedy="detach() the attribute, or compute it in forward",
                )
    return copy.deepcopy(model)


def float_dtype(module: nn.Module) -> torch.dtype:
    """The module's own precision: the float dtype that most of its weights have."""
    counts: dict[torch.dtype, int] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.get_default_dtype()


def widen_module(module: nn.Module) -> None:
    """Turn parameters and buffers to float64 in place. What is tied stays tied."""
    for parameter in module.parameters():
        parameter.data = widen(parameter.data)
        if parameter.grad is not None:
            parameter.grad = None
    made: dict[int, Tensor] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = made.setdefault(id(buffer), widen(buffer))


@contextmanager
def direct_checkpoints() -> Iterator[None]:
    """Let `torch.utils.checkpoint` call its function once, directly."""

    def surround(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        # Re-entrant checkpoints give no gradient at all unless one of their arguments asks for it.
        asked = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in args)
        with torch.set_grad_enabled(asked and torch.is_grad_enabled()):
            return function(*args)

    with (
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", surround),
        mock.patch.object(checkpoint.CheckpointFunction, "apply", apply),
    ):
        yield
