"""The reference: the original eager module, trained for three steps and evaluated between them.

In: the user's module and example, untouched (a copy runs). Out: a Sample: the loss and every gradient of each step, the
weights and buffers after the last, what the module returns in evaluation. Promised: nothing of Weft's capture takes
part, only the random draws are replaced by the stream that the Program uses, and in float64 lower dtypes are widened
and the update takes gradients that are rounding only as zero (compare.py). Checkpointed functions run once: what they
save is memory, what they would cost is a second draw of every random number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes as disabled_modes
from torch.utils._pytree import tree_map

from weft.capture.example import flatten_output, split_example
from weft.capture.tracing.modules import computed_attributes
from weft.compile.model_file import Subject, check_loss, inside
from weft.compile.optimizer import make_optimizer
from weft.errors import ModelFileError, RunError, WeftError
from weft.ops.precision import Float64Mode, widen
from weft.runtime.program.surface import modes_kept
from weft.runtime.random import Stream
from weft.runtime.training.microbatches import BatchDim, split_arguments
from weft.verify.batches import OTHER_STEP, batches_of
from weft.verify.compare import Sample, noise_in
from weft.verify.draw_mode import DrawMode
from weft.verify.mixed import OneDevice
from weft.verify.precision import precision_of

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the forward."""
Cut = tuple[Sequence[Batch], Sequence[float]]
"""Micro-batches, and what the loss of each counts."""


@dataclass(frozen=True)
class Evaluation:
    """How a program for evaluation runs a batch.

    Args:
        microbatches: it is run in so many parts.
        whole: it returns what the module does, not the loss alone.
    """

    microbatches: int
    whole: bool


def run_reference(
    subject: Subject,
    *,
    seed: int,
    wide: bool,
    microbatches: int = 1,
    dims: Sequence[BatchDim] | None = None,
    evaluation: Evaluation | None = None,
    other: bool = True,
) -> Sample:
    """Train a copy of the eager module on the batches of `batches.py`.

    Args:
        wide: in float64 throughout; otherwise in the module's own precision.
        microbatches: the batch of a step is run in so many parts, whose losses count as the subject says.
        dims: the batch dim of each tensor in the example.
        evaluation: how the module is evaluated, if it is.
        other: one step is done on other values than the example's, if the module can do that.
    """
    run = partial(_run, subject, seed, wide, microbatches, dims, evaluation)
    if other:
        # whatever else it raises it raises again
        with suppress(Exception):
            return run(other=True)
    return run(other=False)


def _run(
    subject: Subject,
    seed: int,
    wide: bool,
    microbatches: int,
    dims: Sequence[BatchDim] | None,
    evaluation: Evaluation | None,
    *,
    other: bool,
) -> Sample:
    module = copy_module(subject.model)
    # before any mode is on: a copy is not a computation
    examples = batches_of(subject.example, other=other)
    counts = [shares_of(replace(subject, example=one), microbatches, dims) for one in examples]
    batches = [split_example(one) for one in (*examples, copy.deepcopy(examples[OTHER_STEP]))]
    precision = subject.precision
    own = (float_dtype(module) if precision is None else precision.compute) if wide else None
    mixed = None if wide or precision is None else OneDevice(module, precision)
    with ExitStack() as stack:
        stack.enter_context(direct_checkpoints())
        if wide:
            widen_module(module)
            batches = tree_map(widen, batches)
            stack.enter_context(Float64Mode())
        *trained, evaluated = batches
        parts = [split_arguments(args, kwargs, dims, microbatches)[0] for args, kwargs in trained]
        side = _OneSide(module, subject, seed, own, mixed)
        evaluate = None
        if evaluation is not None:
            cut = split_arguments(*evaluated, dims, evaluation.microbatches)[0]
            evaluate = partial(side.evaluate, cut, whole=evaluation.whole)
        return replace(side.train(list(zip(parts, counts, strict=True)), evaluate), other=other)


def shares_of(subject: Subject, microbatches: int, dims: Sequence[BatchDim] | None) -> list[float]:
    """What the loss of each micro-batch of the example counts in that of the step."""
    args, kwargs = split_example(subject.example)
    examples, by_rows = split_arguments(args, dict(kwargs), dims, microbatches)
    if microbatches == 1 or subject.reduction.how == "mean":
        return by_rows
    with inside(subject.path, "reduction"):
        return subject.reduction.shares(subject.reduction.weights(examples, [1] * microbatches))


@dataclass(frozen=True)
class _OneSide:
    """The module on one device; in float64 if its own dtype is given."""

    module: nn.Module
    subject: Subject
    seed: int
    own: torch.dtype | None
    mixed: OneDevice | None

    def train(self, batches: Sequence[Cut], evaluate: Callable[[], list[Tensor]] | None) -> Sample:
        """Train on the micro-batches of each step."""
        module, subject, mixed = self.module, self.subject, self.mixed
        named = dict(module.named_parameters()) if mixed is None else mixed.named()
        trained = [parameter for parameter in named.values() if parameter.requires_grad]
        update = make_optimizer(subject, trained) if trained else None
        losses, gradients, outputs = [], [], list[Tensor]()
        for step, parts in enumerate(batches):
            losses.append(self._accumulate(parts, step))
            gradients.append({name: one.grad.detach().clone() for name, one in named.items() if one.grad is not None})
            if self.own is not None:
                # rounding only: taken as zero, as the devices do
                for name, noise in noise_in(gradients[-1]).items():
                    named[name].grad = noise.silence(gradients[-1][name])
            if update is not None:
                with inside(subject.path, "the optimizer's step()"):
                    update.step()
            for parameter in named.values():
                parameter.grad = None
            if step == OTHER_STEP and evaluate is not None:
                outputs = evaluate()
        weights = {name: one.detach().clone() for name, one in (*named.items(), *module.named_buffers())}
        return Sample(losses=tuple(losses), gradients=tuple(gradients), weights=weights, outputs=tuple(outputs))

    def evaluate(self, parts: Sequence[Batch], *, whole: bool) -> list[Tensor]:
        """What the module returns of each part in evaluation, or its loss."""
        with modes_kept(self.module):
            self.module.eval()
            found = [self._forward(part, OTHER_STEP + 1, micro) for micro, part in enumerate(parts)]
        if not whole:
            return [check_loss(one, self.subject.place).detach() for one in found]
        return [leaf.detach().clone() for one in found for leaf in flatten_output(one)[1]]

    def _forward(self, batch: Batch, step: int, micro: int) -> Any:
        args, kwargs = batch if self.mixed is None else self.mixed.inputs(batch)
        with (
            # the model sees the limits of its own dtype; the update, which both sides do in float64, does not
            nullcontext() if self.own is None else precision_of(self.own),
            DrawMode(Stream(self.seed, step, micro)),
            inside(self.subject.path, "the forward"),
            _wide_told(self.subject, wide=self.own is not None),
            nullcontext() if self.mixed is None else self.mixed.forward(),
        ):
            return self.module(*args, **kwargs)

    def _accumulate(self, parts: Cut, step: int) -> Tensor:
        """The gradients of a step, one micro-batch after the other, and its loss."""
        total, subject, mixed = None, self.subject, self.mixed
        if mixed is not None:
            mixed.refresh()
        for micro, (batch, share) in enumerate(zip(*parts, strict=True)):
            loss = check_loss(self._forward(batch, step, micro), subject.place)
            if not share:
                continue  # counts nothing, whatever it is
            if not bool(torch.isfinite(loss)):
                raise RunError(
                    f"the model's own loss is {loss.item()} in step {step + 1}: nothing can be compared",
                    place=subject.place,
                    remedy="give an example and initial weights with a finite loss",
                )
            loss = loss if share == 1 else loss * share
            with (
                nullcontext() if self.own is None else precision_of(self.own),
                inside(subject.path, "the backward"),
                _wide_told(subject, wide=self.own is not None),
            ):
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
    computed = [vars(module).get(name) for module, name in computed_attributes(model)]
    # torch copies no tensor that was computed; these are computed again
    memo = {id(value): value.detach() for value in computed if isinstance(value, Tensor)}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None and id(value) not in memo:
                attached = f"{path}.{name}".lstrip(".")
                raise ModelFileError(
                    f"{type(model).__name__} cannot be copied: its attribute {attached} is part of an autograd graph",
                    remedy="detach() the attribute, or compute it in forward",
                )
    return copy.deepcopy(model, memo)


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
