"""One optimizer step of a parallel module, and how a batch becomes arguments.

In: a module that gives gradients (`forward_backward`), its optimizers. Out: the step as one call (`Stepping`).
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn

from weft.runtime.checks.guards import Guard
from weft.runtime.checks.shard_tensor import plainly
from weft.runtime.checks.unchanged import BOUND
from weft.runtime.checks.wrapping import on_all_ranks, wrapped_by, wrapper
from weft.runtime.program.batch import BatchMismatch
from weft.runtime.program.calling import Calling, sign
from weft.runtime.program.name_passthrough import Own
from weft.runtime.program.own_modes import Change, modes_after
from weft.runtime.program.shown.attributes import Attributes
from weft.runtime.program.shown.tree import Shown, shown_tree, with_items
from weft.runtime.program.surface import Modes, Surface
from weft.runtime.training.scaling import GradScaler

FORM = "give batches in the form of the example"


class Optimizer(Protocol):
    """What a step needs of an optimizer."""

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


Optimizers = Optimizer | Sequence[Optimizer]
"""One, or several that update parameters of their own."""


Prepare = Callable[[], Any]
"""What is done with complete gradients before the update."""


class Stepping(Own):
    """A parallel module as its optimizers see it: it is trained where it is, and cannot be copied or wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.guard: Guard | None = None
        """What watches over its parameters."""
        self._surface, self._paths = Surface(), dict[str, Shown]()
        self._flags, self._modes = list[Any](), Modes()
        self._cells: list[list[bool]] = []
        """The modes of what is shown."""
        self.calling: Calling | None = None
        """How the original is called."""
        self.loss_alone = False
        """A call gives the loss alone, whatever the original returns: a step needs no more."""

    def show_surface(self, surface: Surface, *, shows: bool = True) -> Shown:
        """Show what the original shows, in its modes; the tree, to be filled."""
        tree = shown_tree(surface, self._refused, self._change_inside)
        if shows:
            self.show(tree)
        if (node := surface.nodes.get("")) is not None:
            self.tell(node, self._refused, original=surface.original)
        with_items(self, tree)
        self._surface, self.calling = surface, surface.calling
        sign(self, surface.calling)
        self._paths = {path: cast(Shown, one) for path, one in tree.named_modules(remove_duplicate=False) if path}
        self._cells = [vars(one)["_shown_mode"] for one in self._paths.values()]
        self.training = "" in surface.modes
        return tree

    def shown(self) -> Mapping[str, Shown]:
        """The submodules that are shown, by every path."""
        return self._paths

    @property
    def modes(self) -> Modes:
        """What is in training mode."""
        # asked for in every step, and hardly ever another
        if [self.training, *self._cells] != self._flags:
            self._flags = [self.training, *map(list, self._cells)]
            self._modes = frozenset(path for path, one in {"": self, **self._paths}.items() if one.training)
        return self._modes

    @modes.setter
    def modes(self, modes: Modes) -> None:
        self.training = "" in modes
        for path, module in self._paths.items():
            module.training = path in modes

    def share_modes(self, other: Stepping) -> None:
        """What is shown is in the modes of what another shows from now on."""
        for path, module in self._paths.items():
            module.share_mode(other._paths[path])
        self._cells = other._cells

    @abstractmethod
    def follow(self, modes: Modes) -> None:
        """Take on these modes; a program for them is made if there is none, on all ranks together."""

    @on_all_ranks
    def train(self, mode: bool = True) -> Self:
        """As of the original; the first `eval()` makes the program for it, on all ranks together."""
        if self._surface.own_modes:
            self.follow(self._modes_after("", methodcaller("train", mode)))
        else:
            self.follow(frozenset({"", *self._paths} if mode else ()))
        self._train_own(mode)
        return self

    @on_all_ranks
    def eval(self) -> Self:
        """As of the original, which may have its own."""
        if not self._surface.own_modes:
            return self.train(False)
        self.follow(self._modes_after("", methodcaller("eval")))
        self._train_own(False)
        return self

    def _train_own(self, mode: bool) -> None:
        """Modules that the caller has set are in the mode of all."""
        for one in (self, *self._paths.values()):
            for child in one.own_children():
                if child is not None:
                    child.train(mode)

    def _modes_after(self, path: str, change: Change) -> Modes:
        """What a submodule's own `train()` or `eval()` makes of the modes."""
        assert self._surface.original is not None
        return modes_after(self._surface.original(), change, path, self.modes)

    def _change_inside(self, path: str, change: Change) -> None:
        self.modes = self._modes_after(path, change)

    def __setattr__(self, name: str, value: Any) -> None:
        # what the model has is not what the runtime calls so, unless the runtime sets it
        node = self._shown_node
        if name in node.attributes or name in node.buffers or name in node.parameters or name in node.children:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith("weft."):
                return Attributes.__setattr__(self, name, value)
            if name not in self.__dict__ and not isinstance(value, nn.Module | nn.Parameter):
                return object.__setattr__(self, name, value)
        return super().__setattr__(name, value)

    def extra_states(self) -> dict[str, Any]:
        """What the original's modules keep beside tensors, by the names in state dicts; refuses what is not known."""
        return {name: self._extra_holder(name).extra_state() for name in self._surface.extra_states()}

    def check_extra_states(self, found: Mapping[str, Any]) -> None:
        """Refuse others than the program was made with."""
        for name in self._surface.extra_states():
            if name in found:
                self._extra_holder(name).check_extra_state(found[name])

    def _extra_holder(self, name: str) -> Attributes:
        path = name.rpartition(".")[0]
        return self._paths[path] if path else self

    def arranged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as the original takes them, in the form of the example."""
        calling = self.calling
        # every call comes by here, and hardly any is of another form
        if calling is None or (tuple(kwargs) == calling.keywords and len(args) == calling.num_args):
            return args, kwargs
        try:
            return calling.arranged(args, kwargs)
        except BatchMismatch as error:
            raise self._refused(str(error), FORM) from None

    @contextmanager
    def giving_loss(self) -> Iterator[None]:
        """Calls give the loss alone."""
        before = self.loss_alone
        self.set_loss_alone(True)
        try:
            yield
        finally:
            self.set_loss_alone(before)

    def set_loss_alone(self, alone: bool) -> None:
        self.loss_alone = alone

    @abstractmethod
    def forward_backward(self, batch: Any, scale: float | Tensor = 1.0) -> Tensor:
        """Forward and backward; gradients, `scale` times, are added to what was there, the loss is returned."""

    def _tell_raised(self, error: Exception) -> None:
        """An error leaves a call that all ranks make."""

    @abstractmethod
    def _refused(self, message: str, remedy: str) -> Exception:
        """The error for a wrong call."""

    @on_all_ranks
    def train_step(
        self,
        batch: Any,
        optimizer: Optimizers,
        *,
        prepare: Prepare | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Forward, backward, update; the loss before the update.

        Args:
            batch: the replica's, the same on every rank of it.
            optimizer: over all parameters that are to be trained; several go as a list.
            prepare: is called between the gradients and the update: what clips them, say.
            scaler: a `weft.GradScaler`: gradients are those of a scaled loss, and scaled back before that.
        """
        if self.guard is not None:
            self.guard.refuse_others(all_of(optimizer))
        return step_of(self.forward_backward, batch, optimizer, prepare, scaler)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module, but not for what would wrap it, alone or as part of another."""
        if (name := wrapper()) is not None:
            raise self._refused(*wrapped_by(name))
        return super().named_modules(memo, prefix, remove_duplicate)

    def _replicate_for_data_parallel(self) -> Self:
        raise self._refused(*wrapped_by("nn.DataParallel"))

    def __deepcopy__(self, memo: Any) -> Self:
        raise self._refused(*BOUND)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refused(*BOUND)


def all_of(optimizer: Optimizers) -> Sequence[Optimizer]:
    """The optimizers, one by one."""
    return optimizer if isinstance(optimizer, Sequence) else (optimizer,)


def call(module: Callable[..., Any], batch: Any) -> Any:
    """Call with a batch: a tuple of positional arguments, a dict of keyword arguments, or the only argument."""
    args, kwargs = arguments_of(batch)
    return module(*args, **kwargs)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that a batch is."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def loss_of(module: Stepping, batch: Any) -> Tensor:
    """The loss of a batch."""
    with module.giving_loss():
        loss = call(module, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise module._refused(
            "train_step() needs a loss, and forward returns none: no output is called loss, or is the only scalar",
            'let forward return {"loss": loss, ...}; or call the module, make a loss of what it returns, and call '
            "backward() and optimizer.step() yourself",
        )
    if not loss.requires_grad:
        raise module._refused(
            "train_step() has nothing to train: no parameter that requires a gradient takes part in the loss",
            "parameter.requires_grad_(), of what was to be trained when parallelize() was called; parallel.eval() to "
            "evaluate",
        )
    return loss


def step_of(
    forward_backward: Callable[[Any, float | Tensor], Tensor],
    batch: Any,
    optimizer: Optimizers,
    prepare: Prepare | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Gradients, update; the loss before it. Gradients stay to be looked at until the next step."""
    for one in all_of(optimizer):
        plainly(one.zero_grad)(set_to_none=True)
    scale: float | Tensor = 1.0
    if scaler is not None:
        # it lies where gradients do: nobody waits for it
        groups = [group for one in all_of(optimizer) for group in cast(torch.optim.Optimizer, one).param_groups]
        scale = scaler.scale(torch.ones((), device=groups[0]["params"][0].device))
    loss = forward_backward(batch, scale)
    if scaler is not None:
        if isinstance(scaler, GradScaler):
            scaler.saw(loss)  # one of ours, which ends what does not get better
        for one in all_of(optimizer):
            scaler.unscale_(cast(torch.optim.Optimizer, one))
    if prepare is not None:
        prepare()
    for one in all_of(optimizer):
        one.step() if scaler is None else scaler.step(cast(torch.optim.Optimizer, one))
    if scaler is not None:
        scaler.update()
    return loss
