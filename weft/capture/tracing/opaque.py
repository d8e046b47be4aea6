"""Opaque calls: what an op keeps of a function that is not looked into.

Enters: the arguments of one call of a registered function (`weft.register_op`) or of an `autograd.Function`. Leaves: an
Opaque, which takes the flat leaves of those arguments, calls the function and gives back the tensors among its results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree

from weft.capture.source import place_here
from weft.errors import CaptureError
from weft.runtime.operators.custom import CustomOp, tensors_in


@dataclass(frozen=True)
class Opaque:
    """One call of something that is not looked into, and how its arguments nest.

    Called with the flattened arguments it runs and returns the tensors among the results: one as itself, several as a
    tuple.
    """

    cls: Any
    """The `autograd.Function`, its own backward intact, or the registered function."""
    leaves: tuple[Any, ...]
    """Flattened arguments; None where a tensor stands."""
    tensors: tuple[int, ...]
    """Positions of the tensors among the leaves."""
    spec: pytree.TreeSpec
    nested: bool = False
    """The results are more than a tensor, or a flat list of tensors."""

    def __call__(self, *leaves: Any, **given: Any) -> Any:
        return tensors_in(self.outputs(leaves, given))

    def outputs(self, leaves: Sequence[Any], given: Mapping[str, Any] | None = None) -> Any:
        """What it returns. `given`: what a cell is given besides, communicators and indices."""
        tree = pytree.tree_unflatten(leaves, self.spec)
        if not isinstance(self.cls, CustomOp):
            return original_apply(self.cls, *tree)
        args, kwargs = tree
        return self.cls.function(*args, **kwargs, **(given or {}))

    def arguments(self, tensors: Sequence[Any]) -> list[Any]:
        """The flattened arguments with these tensors put in their places."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensors, tensors, strict=True):
            leaves[position] = tensor
        return leaves

    @property
    def name(self) -> str:
        found: str = self.cls.__qualname__
        return found.replace("<locals>.", "")

    @property
    def what(self) -> str:
        return f"the {'function' if isinstance(self.cls, CustomOp) else 'autograd.Function'} {self.name}"

    def __str__(self) -> str:
        return self.what

    def refuse_objects(self) -> None:
        """Raise if it is given what the text of a program cannot hold."""
        odd = next((leaf for leaf in self.leaves if not isinstance(leaf, WRITTEN)), None)
        if odd is not None:
            name = getattr(odd, "__qualname__", f"a {type(odd).__qualname__}")
            raise CaptureError(
                f"{self.what} is given {name}, and a program can give it tensors, numbers and words only",
                place=place_here(),
                remedy=CALLED if callable(odd) else GIVEN,
            )


GIVEN = "give it the tensors and numbers that it needs"
CALLED = f"to compute again in backward, torch.utils.checkpoint.checkpoint(..., use_reentrant=False); else {GIVEN}"
WRITTEN = (
    *(type(None), bool, int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""What stands for itself in the text of a program."""


def original_apply(cls: type, *args: Any) -> Any:
    """`cls.apply`, going round what stands in for it while a trace runs."""
    return super(_SingleLevelFunction, cls).apply(*args)  # type: ignore[misc]


def opaque(cls: Any, tree: Any) -> tuple[Opaque, list[torch.Tensor]]:
    """A call taken apart: what stays fixed, and the tensors. `tree` holds the arguments of an `autograd.Function`, or
    (args, kwargs) of a registered function."""
    leaves, spec = pytree.tree_flatten(tree)
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    fixed = tuple(None if i in positions else leaf for i, leaf in enumerate(leaves))
    return Opaque(cls, fixed, positions, spec), [leaves[i] for i in positions]


def is_nested(outputs: Any) -> bool:
    """True unless what a function returned is a tensor, or several in a flat tuple or list."""
    if isinstance(outputs, torch.Tensor):
        return False
    flat = isinstance(outputs, tuple | list) and len(outputs) > 1
    return not (flat and all(isinstance(one, torch.Tensor) for one in outputs))
