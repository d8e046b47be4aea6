"""Leaf aliases: what a program reads in place of its parameters.

In: the trained parameters of a rank, and where they stand in a tree of containers. Out: while the program runs, leaves
on the same memory stand in their places. What comes to a leaf in backward is an addend of the program's, which is
summed over ranks; what comes to the parameter itself is from outside (a regulariser in the caller's loss), and complete
as it is. Autograd adds both up before anybody sees them, if they come to one leaf.

Promised: a leaf lies where its parameter lies, and needs a gradient if that does; a parameter with hooks of the user's
is read itself, so that they see its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from weft.runtime.program.stored import Container

Hear = Callable[[str, Tensor], None]
"""Hears the name of a parameter when autograd has come to it, or to the leaf that stands for it."""


@dataclass(frozen=True)
class Arrived:
    """The hook of a program."""

    hear: Hear
    name: str

    def __call__(self, leaf: Tensor) -> None:
        self.hear(self.name, leaf)


def has_hook_after(parameter: Tensor) -> bool:
    """True if a hook of others waits for the gradient of a parameter."""
    hooks: Mapping[int, object] | None = parameter._post_accumulate_grad_hooks
    return hooks is not None and any(not isinstance(hook, Arrived) for hook in hooks.values())


def is_watched(parameter: Tensor) -> bool:
    """True if somebody else waits for autograd to come to a parameter."""
    return bool(parameter._backward_hooks) or has_hook_after(parameter)


class LeafAliases:
    """The leaves of one program.

    Args:
        tree: what holds the parameters.
        places: all names of each parameter, by the first.
        known: the names of tensors that stand for parameters, by identity: those of leaves are added.
        hear: is told what arrives.
    """

    def __init__(
        self, tree: Container, places: Mapping[str, tuple[str, ...]], known: dict[int, str], hear: Hear
    ) -> None:
        self._known, self._hear = known, hear
        self._places = {name: [tree.holder_of(each) for each in names] for name, names in places.items()}
        self._leaves: dict[str, Tensor] = {}
        self._read_themselves: dict[str, RemovableHandle] = {}
        self._by_holder: dict[Container, dict[str, Tensor]] = {}
        self._depth = 0
        self.state: object = None
        """Of the parameters, set before a forward by who has looked at them: the same object as long as they lie where
        they lay, need gradients as they did and have the same hooks; None if nobody has looked."""
        self._right_for: object = None
        """The state that leaves were last made right for."""

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Before a forward."""
        if self.state is None or self.state is not self._right_for:
            self.refresh(parameters)
            self._right_for = self.state
        self.state = None

    def refresh(self, parameters: Mapping[str, Tensor]) -> None:
        """Parameters may lie elsewhere, be frozen or have hooks."""
        for name in self._places:
            parameter, leaf = parameters[name], self._leaves.get(name)
            if is_watched(parameter):
                self._read_itself(name, parameter)
            elif leaf is None or leaf.data_ptr() != parameter.data_ptr() or leaf.stride() != parameter.stride():
                self._read_leaf(name, parameter)
            elif leaf.requires_grad != parameter.requires_grad:
                # another leaf: the graphs of forwards that were made before go on as they were
                self._read_leaf(name, parameter)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The program runs, or runs again."""
        self._depth += 1
        for holder, leaves in self._by_holder.items():
            holder.__dict__["_leaves"] = leaves
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                for holder in self._by_holder:
                    holder.__dict__["_leaves"] = None

    def _read_leaf(self, name: str, parameter: Tensor) -> None:
        self._forget(name)
        leaf = parameter.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(Arrived(self._hear, name))
        leaf.requires_grad_(parameter.requires_grad)
        self._leaves[name], self._known[id(leaf)] = leaf, name
        # a graph may know it longer than this; what has its identity next is not it
        weakref.finalize(leaf, self._known.pop, id(leaf), None)
        for holder, last in self._places[name]:
            self._by_holder.setdefault(holder, {})[last] = leaf

    def _read_itself(self, name: str, parameter: Tensor) -> None:
        if name not in self._read_themselves:
            self._forget(name)
            hook = Arrived(self._hear, name)
            self._read_themselves[name] = parameter.register_post_accumulate_grad_hook(hook)

    def _forget(self, name: str) -> None:
        """Nothing stands for a parameter, and nothing is heard of itself."""
        self._right_for = None
        if name in self._leaves:
            del self._leaves[name]
            for holder, last in self._places[name]:
                del self._by_holder[holder][last]
        if name in self._read_themselves:
            self._read_themselves.pop(name).remove()
