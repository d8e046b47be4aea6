"""Parallel: what a user trains: one rank's share of a model, as a module with the original names.

In: the rank's generated program, the form of a batch, a seed. Out: an `nn.Module` whose parameters and buffers are the
program's own (`parameters()` is what the optimizer updates on this rank), called with batches as the original is:

    loss = parallel(*batch); loss.backward()           gradients complete, over replicas averaged
    loss = parallel.train_step(batch, optimizer)

A module that returns no loss returns what the original does, whole on every rank, and backward starts from what the
caller makes of it: the gradients of outputs, and of inputs that require one, are the same on every rank.

A forward in training draws the random numbers of its own step (counted from 0: `parallel.step`) and replica. `eval()`
runs a program of its own, made when it is first asked for, on the same weights; so does, in evaluation, a batch of
other arguments than the example's (one without labels).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.runtime.agree import other_batch
from weft.runtime.batch import BatchMismatch, Form, OtherForm
from weft.runtime.module import ParallelModule, Refusal
from weft.runtime.random import Stream
from weft.runtime.replicas import Replica
from weft.runtime.returns import Returns
from weft.runtime.script import Index
from weft.runtime.training import Optimizer, loss_of, train_step

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True)
class Runnable:
    """A program and how it is called.

    Args:
        returns: the form of the output; None if the program returns a loss.
        needs_grad: for each input whether its gradient goes back to the caller.
    """

    program: ParallelModule
    form: Form
    returns: Returns | None = None
    needs_grad: tuple[bool, ...] = ()

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a batch; refuses one that wants a gradient that the program does not give."""
        inputs = self.form.bind(args, kwargs)
        if not torch.is_grad_enabled():
            return inputs
        for tensor, given, told in zip(inputs, self.needs_grad, self.form.tensors, strict=False):
            if tensor.requires_grad and not given:
                raise BatchMismatch(
                    f"{told[1]} of the batch requires a gradient, in the example it does not: give parallelize() an "
                    f"example whose {told[1]} does (requires_grad_())"
                )
        return inputs

    def run(self, inputs: Sequence[Tensor]) -> Any:
        found = self.program(*inputs)
        return found if self.returns is None else self.returns.build(found)


MakeEval = Callable[[Batch | None], Runnable]
"""Makes the program of `eval()`, for the example or for a batch of another form."""


class Parallel(nn.Module):
    """One rank of a parallel model.

    Args:
        runnable: the program for training, on the transport of a replica.
        make_eval: makes the programs of `eval()`.
        seed: of the random streams.
        refusal: makes the error for a wrong call.
    """

    def __init__(
        self, runnable: Runnable, *, seed: int = 0, make_eval: MakeEval | None = None, refusal: Refusal | None = None
    ) -> None:
        super().__init__()
        self.seed, self.step = seed, 0
        self._make_eval, self._refusal = make_eval, refusal
        program = runnable.program
        # Not as sub-modules: names are to be the original ones. What the program holds is shared, not copied.
        self.__dict__["_training"], self.__dict__["_evaluation"] = runnable, []
        self._modules, self._parameters, self._buffers = program._modules, program._parameters, program._buffers
        self._non_persistent_buffers_set = program._non_persistent_buffers_set
        if refusal is not None:
            program.refusal = refusal

    @property
    def program(self) -> ParallelModule:
        """The generated program for training."""
        found: ParallelModule = self.__dict__["_training"].program
        return found

    @property
    def stored(self) -> Mapping[str, Index]:
        """What this rank holds of each parameter and buffer of the original."""
        return self.program.stored

    @property
    def replica(self) -> int:
        """The number of the replica that this rank is part of: which share of the data it is to be fed."""
        return self._transport.number

    @property
    def num_replicas(self) -> int:
        return self._transport.num_replicas

    @property
    def _transport(self) -> Replica:
        found = self.program.transport
        assert isinstance(found, Replica)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the replica's batch, or what the original returns, on every rank of it."""
        try:
            runnable = self.runnable(args, kwargs)
            inputs = runnable.bind(args, kwargs)
        except BatchMismatch as error:
            if self._refusal is None:
                raise
            raise self._refusal(str(error), "give batches in the form of the example") from None
        program = runnable.program
        program.stream = Stream(self.seed, self.step, self.replica)
        kind = "training" if program is self.program else f"evaluation {id(program)}"
        if self._transport.begin_step(self.step, f"{kind} {[tuple(tensor.shape) for tensor in inputs]}"):
            self._refuse_other_batches(inputs)
        if self.training:
            self.step += 1
        found = runnable.run(inputs)
        if program is not self.program:
            # buffers that a forward of evaluation has changed
            give_back(program, self.program)
        return found

    def _refuse_other_batches(self, inputs: Sequence[Tensor]) -> None:
        other = other_batch(inputs, self._transport)
        if other is not None:
            message = f"ranks {self._transport.rank} and {other} of a replica were given different batches"
            if self._refusal is None:
                raise BatchMismatch(message)
            raise self._refusal(
                message, "give every rank of a replica the same whole batch; each takes its part itself"
            )

    def runnable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Runnable:
        """The program for a batch; in evaluation one is made if its arguments are others than any program's."""
        if self.training:
            found: Runnable = self.__dict__["_training"]
            return found
        known: list[Runnable] = self._evaluations()
        for one in known:
            if fits(one.form, args, kwargs):
                return self._shared(one)
        made = self._made((tuple(args), dict(kwargs)))
        known.append(made)
        return self._shared(made)

    def has_program(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if no program would have to be made for a batch."""
        known: list[Runnable] = self.__dict__["_evaluation"]
        return self.training or any(fits(one.form, args, kwargs) for one in known)

    def forward_backward(self, batch: Any) -> Tensor:
        """Forward and backward; gradients are added to what was there, the loss is returned."""
        loss = loss_of(self, batch)
        loss.backward()
        return loss.detach()

    def train_step(self, batch: Any, optimizer: Optimizer) -> Tensor:
        """Forward, backward, update; the loss before the update.

        Args:
            batch: the replica's, the same on every rank of it.
        """
        return train_step(self, batch, optimizer)

    def train(self, mode: bool = True) -> Parallel:
        """As of any module; the first `eval()` makes the program for it, on all ranks together."""
        super().train(mode)
        if not mode:
            self._evaluations()
        return self

    def _evaluations(self) -> list[Runnable]:
        """The programs for evaluation, that of the example first."""
        known: list[Runnable] = self.__dict__["_evaluation"]
        if not known:
            known.append(self._made(None))
        return known

    def _made(self, batch: Batch | None) -> Runnable:
        assert self._make_eval is not None, "this module was made for training only"
        made = self._make_eval(batch)
        wrong = [name for name, index in made.program.stored.items() if self.stored.get(name) != index]
        assert not wrong, f"eval() would store {wrong[0]} elsewhere than training does"
        if self._refusal is not None:
            made.program.refusal = self._refusal
        return made

    def _shared(self, runnable: Runnable) -> Runnable:
        if runnable.program is not self.program:
            share(self.program, runnable.program)
        return runnable


def fits(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if the arguments are those of the form, whatever their sizes."""
    try:
        form.bind(args, kwargs)
    except OtherForm:
        return False
    except BatchMismatch:
        return True
    return True


@torch.no_grad()
def share(source: ParallelModule, target: ParallelModule) -> None:
    """Let a program use the weights of another: the very same parameters, so that their gradients are too."""
    for name in target.stored:
        held = source.part(name)
        if isinstance(held, nn.Parameter):
            target.adopt(name, held)
        elif held is not None:
            target.update(name, held)


def give_back(source: ParallelModule, target: ParallelModule) -> None:
    """Let a program know what another has made of the buffers."""
    for name in target.stored:
        held = source.part(name) if name in source.stored else None
        if held is not None and not isinstance(held, nn.Parameter):
            target.update(name, held)
