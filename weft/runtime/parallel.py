"""Parallel: what a user trains: one rank's share of a model, as a module with the original names.

In: the rank's generated program, the form of a batch, a seed. Out: an `nn.Module` whose parameters and buffers are the
program's own (`parameters()` is what the optimizer updates on this rank), called with batches as the original is:

    loss = parallel(*batch); loss.backward()           gradients complete, over replicas averaged
    loss = parallel.train_step(batch, optimizer)

A forward in training draws the random numbers of its own step (counted from 0: `parallel.step`) and replica. `eval()`
runs a program of its own, made when it is first asked for, on the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.runtime.batch import Form
from weft.runtime.module import ParallelModule
from weft.runtime.random import Stream
from weft.runtime.replicas import Replica
from weft.runtime.script import Index
from weft.runtime.training import Optimizer, train_step

MakeEval = Callable[[], ParallelModule]


class Parallel(nn.Module):
    """One rank of a parallel model.

    Args:
        program: for training, on the transport of a replica.
        make_eval: makes the program of `eval()`.
        seed: of the random streams.
    """

    def __init__(
        self, program: ParallelModule, form: Form, *, seed: int = 0, make_eval: MakeEval | None = None
    ) -> None:
        super().__init__()
        self.seed, self.step = seed, 0
        self._form, self._make_eval = form, make_eval
        # Not as sub-modules: names are to be the original ones. What the program holds is shared, not copied.
        self.__dict__["_programs"] = {True: program}
        self._modules, self._parameters, self._buffers = program._modules, program._parameters, program._buffers
        self._non_persistent_buffers_set = program._non_persistent_buffers_set

    @property
    def program(self) -> ParallelModule:
        """The generated program for training."""
        found: ParallelModule = self.__dict__["_programs"][True]
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
        """The loss of the replica's batch, on every rank of it."""
        inputs = self._form.bind(args, kwargs)
        program = self.program if self.training else self._eval_program()
        program.stream = Stream(self.seed, self.step, self.replica)
        self._transport.begin_step(self.step)
        if self.training:
            self.step += 1
        return program(*inputs)

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
            self._eval_program()
        return self

    def _eval_program(self) -> ParallelModule:
        programs = self.__dict__["_programs"]
        if False not in programs:
            assert self._make_eval is not None, "this module was made for training only"
            made = self._make_eval()
            wrong = [name for name, index in self.stored.items() if made.stored.get(name) != index]
            assert not wrong, f"eval() would store {wrong[0]} elsewhere than training does"
            programs[False] = made
        found: ParallelModule = programs[False]
        if found is not self.program:
            share(self.program, found)
        return found


@torch.no_grad()
def share(source: ParallelModule, target: ParallelModule) -> None:
    """Let a program use the weights of another: the very same memory."""
    for name in target.stored:
        held = source.part(name)
        if isinstance(held, nn.Parameter):
            target.part(name).data = held.data
        elif held is not None:
            target.update(name, held)
