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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.runtime.batch import BatchMismatch, Form, OtherForm
from weft.runtime.masters import Masters
from weft.runtime.module import ParallelModule, Refusal
from weft.runtime.one_rank import OneRank
from weft.runtime.random import Stream
from weft.runtime.reduction import Reduction
from weft.runtime.returns import Returns
from weft.runtime.stored import Holds
from weft.runtime.training import arguments_of, loss_of
from weft.runtime.unchanged import ASSIGN

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


class Parallel(OneRank):
    """One rank of a parallel model.

    Args:
        runnable: the program for training, on the transport of a replica.
        make_eval: makes the programs of `eval()`.
        seed: of the random streams.
        reduction: what the batches of replicas count, in `forward_backward` and `train_step`; a backward that the user
            starts averages them.
        refusal: makes the error for a wrong call.
        masters: of the program's parameters, if it computes in another precision.
    """

    def __init__(
        self,
        runnable: Runnable,
        *,
        masters: Masters | None = None,
        seed: int = 0,
        make_eval: MakeEval | None = None,
        reduction: Reduction | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        super().__init__(seed=seed, reduction=reduction or Reduction(), refusal=refusal)
        self._make_eval = make_eval
        program = runnable.program
        # Not as sub-modules: names are to be the original ones. What the program holds is shared, not copied.
        self.__dict__["_training"], self.__dict__["_evaluation"], self.__dict__["_masters"] = runnable, [], masters
        shown = program if masters is None else masters.tree
        self._modules, self._parameters, self._buffers = shown._modules, shown._parameters, shown._buffers
        self._non_persistent_buffers_set = shown._non_persistent_buffers_set
        if masters is None and self._transport.whole.num_ranks > 1:
            program.read_apart()
        if refusal is not None:
            program.refusal = refusal

    @property
    def program(self) -> ParallelModule:
        """The generated program for training."""
        found: ParallelModule = self.__dict__["_training"].program
        return found

    @property
    def masters(self) -> Holds:
        found: Masters | None = self.__dict__["_masters"]
        return self.program if found is None else found

    def trees(self) -> Iterable[nn.Module]:
        return (self,)

    def when_complete(self, then: Callable[[], None]) -> None:
        self.program.after_backward = then

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the replica's batch, or what the original returns, on every rank of it."""
        try:
            runnable = self.runnable(args, kwargs)
            inputs = runnable.bind(args, kwargs)
        except BatchMismatch as error:
            raise self._refused(str(error), "give batches in the form of the example") from None
        self.refuse_surroundings()
        program = runnable.program
        program.stream = Stream(self.seed, self.step, self.replica)
        kind = "training" if program is self.program else f"evaluation {id(program)}"
        if self._transport.begin_program(self.step, f"{kind} {[tuple(tensor.shape) for tensor in inputs]}"):
            self._refuse_other_batches(inputs)
        if self.training:
            self.step += 1
        elif runnable.returns is None:
            self._weigh(args, kwargs, inputs)
        found = runnable.run(inputs)
        if program is not self.program:
            # buffers that a forward of evaluation has changed
            give_back(program, self.program)
        return found

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

    def forward_backward(self, batch: Any, scale: float = 1.0) -> Tensor:
        """Forward and backward; gradients, `scale` times, are added to what was there, the loss is returned."""
        loss = loss_of(self, batch)
        count = self._count(*arguments_of(batch)) * scale
        (loss if count == 1 else loss * count).backward()
        return loss.detach()

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """What the batch counts in gradients that are averaged over replicas."""
        form: Form = self.__dict__["_training"].form
        self._weigh(args, kwargs, form.bind(args, kwargs))
        if self.num_replicas == 1 or (self.reduction.how == "mean" and not form.sizes):
            # all replicas have as many rows
            return 1.0
        (count,) = self.reduction.counts([self._weight], [one for (one,) in self._totals(self._weight)])
        return count

    def _weigh(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Tensor]) -> None:
        rows = next((int(tensor.shape[0]) for tensor in inputs if tensor.dim()), 1)
        (self._weight,) = self._weighed([(args, kwargs)], [rows])

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """What this rank holds, as `state_dict` gives it."""
        if assign:
            raise self._refused(*ASSIGN)
        return super().load_state_dict(state_dict, strict=strict)

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
    target.full_weights, target.masters, target.sums = source.full_weights, source.masters, source.sums
    if source.inner is not None:
        target.read_apart()
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
