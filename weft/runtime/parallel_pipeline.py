"""ParallelPipeline: what a user trains if the plan is in pieces: one rank's share, as a module with the original names.

In: the rank's pieces and events (`pipeline.py`), the form of a batch, a seed. Out: an `nn.Module` whose parameters and
buffers are those of the rank's pieces, trained step by step:

    loss = parallel.train_step(batch, optimizer)

A step runs all micro-batches in the order of the schedule and leaves complete gradients, over replicas averaged; its
loss is that of the replica's batch, on every rank. There is no forward by itself: micro-batches go forward and backward
in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys

from weft.runtime.agree import other_batch
from weft.runtime.batch import BatchMismatch, Form
from weft.runtime.microbatches import BatchDim, default_dims, rows_of, shares, split
from weft.runtime.module import Refusal
from weft.runtime.pieces import Pieces
from weft.runtime.pipeline import Rank
from weft.runtime.replicas import Replica
from weft.runtime.script import Index
from weft.runtime.training import Optimizer, call

NO_FORWARD = (
    "a model in pieces has no forward of its own: its micro-batches go forward and backward in turn",
    "loss = parallel.train_step(batch, optimizer); or parallel.forward_backward(batch), then optimizer.step()",
)
NO_EVAL = (
    "a model in pieces trains only: there is no program for its evaluation",
    "evaluate a saved model on one device, or under a plan without pp and microbatches",
)


@dataclass(frozen=True)
class Cutting:
    """How a batch becomes micro-batches.

    Args:
        dims: the batch dim of each input; None: wherever it has as many rows as the first.
        size_of: which size each micro-batch has.
    """

    form: Form
    dims: tuple[BatchDim, ...] | None
    size_of: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.size_of)

    def cut(self, inputs: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[float]]:
        """The inputs of each micro-batch, and what its loss counts."""
        if self.count == 1:
            return [list(inputs)], [1.0]
        dims = default_dims(inputs) if self.dims is None else self.dims
        return split(inputs, dims, self.count), shares(rows_of(inputs, dims), self.count)


class ParallelPipeline(nn.Module):
    """One rank of a parallel model in pieces.

    Args:
        refusal: makes the error for a wrong call.
    """

    def __init__(self, rank: Rank, pieces: Pieces, cutting: Cutting, *, seed: int, refusal: Refusal) -> None:
        super().__init__()
        self.seed, self.step = seed, 0
        self._refusal, self._rank, self._cutting = refusal, rank, cutting
        self.program = pieces
        # so that to(), double() and the like reach them; their names are told by the methods below
        self.pieces = nn.ModuleList(pieces.modules)
        self.__dict__["_nothing"] = nn.Parameter(torch.empty(0))

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
        return self.program.transport

    # Training.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refusal(*NO_FORWARD)

    def bind(self, batch: Any) -> list[Tensor]:
        """The tensors of a batch; refuses one of another form than the example's."""
        args, kwargs = call(lambda *args, **kwargs: (args, kwargs), batch)
        try:
            return [tensor.detach() for tensor in self._cutting.form.bind(args, kwargs)]
        except BatchMismatch as error:
            raise self._refusal(str(error), "give batches in the form of the example") from None

    def forward_backward(self, batch: Any) -> Tensor:
        """All micro-batches of a step; gradients are added to what was there, the loss is returned.

        Args:
            batch: the replica's, the same on every rank of it.
        """
        if not torch.is_grad_enabled():
            raise self._refusal(*NO_EVAL)
        inputs = self.bind(batch)
        if self._transport.begin_step(self.step, f"pipeline {[tuple(tensor.shape) for tensor in inputs]}"):
            self._refuse_other_batches(inputs)
        held = [parameter for module in self.program.modules for _, parameter in module.trained()]
        before = [parameter.grad for parameter in held]
        for parameter in held:
            parameter.grad = None
        batches, counts = self._cutting.cut(inputs)
        losses = self._rank.step(
            batches, counts, self.seed, self.step, size_of=self._cutting.size_of, first=self.replica * len(batches)
        )
        self.step += 1
        for copy in self.program.copies:
            if copy.alike:
                copy.other.grad = None  # the first copy has the sum of all
        for parameter, earlier in zip(held, before, strict=True):
            if earlier is not None and parameter.grad is not None:
                parameter.grad = earlier.add_(parameter.grad)
        return torch.stack([loss * share for loss, share in zip(losses, counts, strict=True)]).sum()

    def train_step(self, batch: Any, optimizer: Optimizer) -> Tensor:
        """All micro-batches of a step, and the update; the loss before it."""
        optimizer.zero_grad(set_to_none=True)
        loss = self.forward_backward(batch)
        optimizer.step()
        return loss

    def train(self, mode: bool = True) -> ParallelPipeline:
        if not mode:
            raise self._refusal(*NO_EVAL)
        super().train(mode)
        return self

    def _refuse_other_batches(self, inputs: Sequence[Tensor]) -> None:
        other = other_batch(inputs, self._transport)
        if other is not None:
            raise self._refusal(
                f"ranks {self._transport.rank} and {other} of a replica were given different batches",
                "give every rank of a replica the same whole batch; each takes its part itself",
            )

    # What it holds, by the original names.

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """What the rank's optimizer updates; if there is nothing, an empty one: optimizers refuse an empty list."""
        found = [parameter for _, parameter in self.named_parameters()]
        return iter(found or [self.__dict__["_nothing"]])

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What the rank holds, once each; a copy in another layout stands under the same name again."""
        for name, held in (*self._named(prefix, twice=not remove_duplicate), *self._apart(prefix)):
            if isinstance(held, nn.Parameter):
                yield name, held

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        for name, held in self._named(prefix, twice=not remove_duplicate):
            if not isinstance(held, nn.Parameter):
                yield name, held

    def _named(self, prefix: str, *, twice: bool) -> Iterator[tuple[str, Tensor]]:
        start = f"{prefix}." if prefix else ""
        for name, held in self.program.held():
            for each in (name, *(self.program.parts[name].tied if twice else ())):
                yield f"{start}{each}", held

    def _apart(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        start = f"{prefix}." if prefix else ""
        return ((f"{start}{name}", held) for name, held in self.program.apart())

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """What this rank holds, under the original names."""
        found = {} if destination is None else destination
        for name, held in self.program.held():
            part = self.program.parts[name]
            if part.persistent:
                for each in (name, *part.tied):
                    found[f"{prefix}{each}"] = held if keep_vars else held.detach()
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """What this rank holds, as `state_dict` gives it."""
        unexpected = [name for name in state_dict if name not in self.stored]
        missing = [name for name in self.state_dict() if name not in state_dict]
        if strict and (unexpected or missing):
            what = f"knows no {unexpected[0]}" if unexpected else f"is given no {missing[0]}"
            raise self._refusal(
                f"rank {self._transport.rank} {what}", "load what state_dict() of the same plan gave on this rank"
            )
        if assign:
            raise self._refusal("assign=True would part what pieces share", "load with assign=False")
        for module in self.program.modules:
            mine = {name: value for name, value in state_dict.items() if name in module.stored}
            module.load_state_dict(mine, strict=False)
        return IncompatibleKeys(missing, unexpected)
