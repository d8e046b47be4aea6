"""Emulated: all ranks of a parallel module as threads of this process, behind the calls of one.

In: a function that makes a rank's module on its transport. Out: a module whose call gives the loss of rank 0 and whose
backward runs every rank's. `parameters()` are those of all ranks, so that one elementwise optimizer updates them all,
as one per rank would; `state_dict()` is the original module's: whole tensors under the original names. The rank threads
live as long as the module; when a rank fails, all end, and the error names it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.errors import RunError, WeftError
from weft.runtime.context import Ambient
from weft.runtime.module import shapes_of
from weft.runtime.parallel import Parallel
from weft.runtime.script import Index
from weft.runtime.training import Optimizer, train_step
from weft.runtime.transfers import take
from weft.runtime.transport import Transport
from weft.verify.parallel import emulate, join

Make = Callable[[Transport], Parallel]
Work = Callable[[Parallel], Any]


class Crew:
    """Threads that each keep one rank's module and do what they are told with it."""

    modules: Sequence[Parallel]

    def __init__(self, num_ranks: int, make: Make) -> None:
        self._told: list[queue.SimpleQueue[Work | None]] = [queue.SimpleQueue() for _ in range(num_ranks)]
        self._heard: queue.SimpleQueue[tuple[int, Any] | WeftError] = queue.SimpleQueue()
        told, heard = self._told, self._heard

        def body(transport: Transport) -> None:
            try:
                module = make(transport)
                heard.put((transport.rank, module))
                while (work := told[transport.rank].get()) is not None:
                    heard.put((transport.rank, work(module)))
            finally:
                # one rank that ends, for whatever reason, ends all
                for other in told:
                    other.put(None)

        def run() -> None:
            try:
                emulate(num_ranks, body)
            except WeftError as error:
                heard.put(error)

        threading.Thread(target=run, name="ranks", daemon=True).start()
        weakref.finalize(self, _dismiss, told)
        self.modules = self._answers()

    def each(self, work: Work) -> list[Any]:
        """Do something on every rank; the results in rank order."""
        ambient = Ambient.here()

        def under_ambient(module: Parallel) -> Any:
            with ambient.entered():
                return work(module)

        for told in self._told:
            told.put(under_ambient)
        return self._answers()

    def _answers(self) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < len(self._told):
            answer = self._heard.get()
            if isinstance(answer, WeftError):
                # the ranks are gone: the next call must hear of it too
                self._heard.put(answer)
                raise RunError(answer.message, place=answer.place, remedy=answer.remedy) from answer
            found[answer[0]] = answer[1]
        return [found[rank] for rank in sorted(found)]


def _dismiss(told: Sequence[queue.SimpleQueue[Work | None]]) -> None:
    for one in told:
        one.put(None)


class Emulated(nn.Module):
    """A parallel module with all of its ranks here.

    Args:
        make: makes a rank's module on its transport.
        prepare_eval: is called before the ranks go to `eval()`, here and not in their threads.
    """

    replica, num_replicas = 0, 1

    def __init__(self, make: Make, num_ranks: int, prepare_eval: Callable[[], Any]) -> None:
        super().__init__()
        self._prepare_eval = prepare_eval
        self._crew = Crew(num_ranks, make)
        self.ranks = nn.ModuleList(self._crew.modules)
        self._stored = [module.stored for module in self._crew.modules]
        originals = [shapes_of(module.program) for module in self._crew.modules]
        self._shapes = {name: found.shape for one in originals for name, found in one.items()}
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of the batch, as every rank has it."""
        losses: list[Tensor] = self._crew.each(lambda module: module(*args, **kwargs))
        if not torch.is_grad_enabled():
            return losses[0]
        found: Tensor = _Ranks.apply(self._anchor, self._crew, losses)
        return found

    def train_step(self, batch: Any, optimizer: Optimizer) -> Tensor:
        """Forward, backward, update of all ranks; the loss before the update."""
        return train_step(self, batch, optimizer)

    def train(self, mode: bool = True) -> Emulated:
        """As of any module; the first `eval()` compiles the program for it."""
        self.training = mode
        if not mode:
            self._prepare_eval()
        self._crew.each(lambda module: module.train(mode))
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The original module's: whole tensors, put together from the ranks' parts."""
        parts = [dict(rank.state_dict()) for rank in self.ranks]
        found = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            pieces = [(rank, self._stored[rank][name], part[name]) for rank, part in enumerate(parts) if name in part]
            found[name], faults = join(self._shapes[name], pieces)
            if faults:
                raise RunError(f"{name}: {'; '.join(faults)}", remedy="give the ranks one elementwise optimizer")
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Cut whole tensors into the ranks' parts; arguments as of `nn.Module.load_state_dict`."""
        found = None
        for rank, stored in zip(self.ranks, self._stored, strict=True):
            parts = {name: self._part(name, whole, stored) for name, whole in state_dict.items() if name in stored}
            unknown = {name: whole for name, whole in state_dict.items() if name not in self._shapes}
            found = rank.load_state_dict({**parts, **unknown}, *args, **kwargs)
        return found

    def _part(self, name: str, whole: Tensor, stored: Mapping[str, Index]) -> Tensor:
        if tuple(whole.shape) != self._shapes[name]:
            raise RunError(
                f"{name} has shape {list(whole.shape)}, planned as {list(self._shapes[name])}",
                remedy="load a state dict of this very model",
            )
        return take(whole, stored[name])


class _Ranks(torch.autograd.Function):
    """Rank 0's loss as a root of autograd whose backward is that of every rank's loss."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, crew: Crew, losses: Sequence[Tensor]) -> Tensor:
        ctx.crew, ctx.losses = crew, losses
        return losses[0].detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        mine = dict(zip(map(id, ctx.crew.modules), ctx.losses, strict=True))
        with torch.enable_grad():
            ctx.crew.each(lambda module: mine[id(module)].backward(grad.to(mine[id(module)].device)))
        return None, None, None
