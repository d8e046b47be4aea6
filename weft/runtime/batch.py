"""Form: what a batch looks like, and a batch as the flat tensors that a generated forward takes.

In: positional and keyword arguments, as for the original module. Out: its tensors in the order of the program's
inputs. A batch of another form, shape or dtype than the example's is refused, with the difference, and so is
another value of an argument that is no tensor: the program was made for that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class BatchMismatch(ValueError):  # noqa: N818 - says what happened
    """A batch that the program was not made for."""


@dataclass(frozen=True)
class Form:
    """The form of the example.

    Args:
        spec: the text of its pytree spec.
        keywords: names of the keyword arguments, in the example's order.
        leaves: text of the leaves that are no tensors; "" in place of tensors.
        tensors: for each input of the program, its leaf, its place in words, shape and dtype.
    """

    spec: str
    keywords: tuple[str, ...]
    leaves: tuple[str, ...]
    tensors: tuple[tuple[int, str, tuple[int, ...], str], ...]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a batch."""
        ordered = {name: kwargs[name] for name in self.keywords if name in kwargs}
        leaves, spec = pytree.tree_flatten((tuple(args), {**ordered, **kwargs}))
        if str(spec) != self.spec or len(leaves) != len(self.leaves):
            wanted = f"{', '.join(self.keywords)} by keyword" if self.keywords else "positional arguments only"
            given = f"{len(args)} positional arguments" + (f" and {', '.join(kwargs)}" if kwargs else "")
            raise BatchMismatch(f"the batch has another form than the example: {given}; the example has {wanted}")
        for number, (leaf, text) in enumerate(zip(leaves, self.leaves, strict=True)):
            if text and (isinstance(leaf, Tensor) or repr(leaf) != text):
                raise BatchMismatch(f"argument {number} of the batch is {leaf!r}, in the example it is {text}")
        for at, where, shape, dtype in self.tensors:
            _check(leaves[at], where, shape, dtype)
        return [leaves[at] for at, _, _, _ in self.tensors]

    def to_json(self) -> dict[str, Any]:
        return {"spec": self.spec, "keywords": self.keywords, "leaves": self.leaves, "tensors": self.tensors}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Form:
        tensors = tuple((at, where, tuple(shape), dtype) for at, where, shape, dtype in found["tensors"])
        return Form(found["spec"], tuple(found["keywords"]), tuple(found["leaves"]), tensors)


def _check(given: Any, where: str, shape: tuple[int, ...], dtype: str) -> None:
    if not isinstance(given, Tensor):
        raise BatchMismatch(f"{where} of the batch is a {type(given).__name__}, in the example it is a tensor")
    if tuple(given.shape) != shape or dtype_name(given.dtype) != dtype:
        found = f"{list(given.shape)} of {dtype_name(given.dtype)}"
        raise BatchMismatch(f"{where} of the batch is {found}, in the example it is {list(shape)} of {dtype}")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")
