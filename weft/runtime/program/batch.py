"""Form: what a batch looks like, and a batch as the flat tensors that a generated forward takes.

In: positional and keyword arguments, as for the original module. Out: its tensors in the order of the program's
inputs. A batch of another form, shape or dtype than the example's is refused, with the difference, and so is
another value of an argument that is no tensor: the program was made for that one, and another may be made for another
flag or word, or for other answers to what forward asks about tensors (`other_flags`). Dims that were marked in the
example may have other sizes, if the program serves them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.runtime.program.asks import Ask
from weft.runtime.program.reads import Reads
from weft.runtime.program.sizes import FreeSize, Guard, evaluate, refused

Dim = int | str
"""A size, or an expression over free sizes."""

MARKED = "dims whose size may vary are marked in the example: weft.dynamic(tensor, dim)"
ROWS_ONLY = (
    "a plan in stages or micro-batches serves other numbers of rows, and no other sizes: pad to those of the example, "
    "or use a plan without pp and microbatches, which serves all sizes of dims that are marked (weft.dynamic)"
)


class BatchMismatch(ValueError):  # noqa: N818 - says what happened
    """A batch that the program was not made for."""


class OtherForm(BatchMismatch):
    """A batch of other arguments, whatever their sizes."""


@dataclass(frozen=True)
class Form:
    """The form of the example.

    Args:
        spec: the text of its pytree spec.
        keywords: names of the keyword arguments, in the example's order.
        leaves: text of the leaves that are no tensors; "" in place of tensors.
        tensors: for each input of the program, its leaf, its place in words, shape and dtype.
        sizes: that batches choose; guards: what they must fulfil beside.
        asks: what else the forward asks about a batch.
        reads: what it reads besides the batch.
        num_args: how many of its arguments are positional.
    """

    spec: str
    keywords: tuple[str, ...]
    leaves: tuple[str, ...]
    tensors: tuple[tuple[int, str, tuple[Dim, ...], str], ...]
    sizes: tuple[FreeSize, ...] = ()
    guards: tuple[Guard, ...] = ()
    asks: tuple[Ask, ...] = ()
    reads: Reads = field(default_factory=Reads, compare=False)
    num_args: int = 0

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], dims: Sequence[int | None] | None = None
    ) -> list[Tensor]:
        """The tensors of a batch.

        Args:
            dims: the batch dim of each tensor, if batches may have other numbers of rows than the example.
        """
        leaves = self._leaves(args, kwargs)
        if leaves is None:
            raise OtherForm(f"the batch has another form than the example: {self._other_form(args, kwargs)}")
        if self._are_as_ever(leaves):
            return [leaves[at] for at, _, _, _ in self.tensors]
        for number, (leaf, text) in enumerate(zip(leaves, self.leaves, strict=True)):
            if text and (isinstance(leaf, Tensor) or repr(leaf) != text):
                raise OtherForm(_other_value(number, leaf, text))
        for at, where, shape, dtype in self.tensors:
            _check_kind(leaves[at], where, shape, dtype)
        sizes = {one.name: int(leaves[one.leaf].shape[one.dim]) for one in self.sizes}
        shapes = self._shapes(leaves, dims or [None] * len(self.tensors))
        for (at, where, _, _), expected in zip(self.tensors, shapes, strict=True):
            _check_shape(leaves[at], where, expected, sizes, MARKED if dims is None else ROWS_ONLY)
        if reason := refused(self.sizes, self.guards, sizes):
            raise BatchMismatch(reason)
        if reason := self._other_answers(leaves):
            raise OtherForm(reason)
        return [leaves[at] for at, _, _, _ in self.tensors]

    def other_flags(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True for a batch of the example's form in which a flag or word is another, or what forward asks about it: a
        program may be made for it."""
        if not any(self.leaves) and not self.asks:
            return False
        leaves = self._leaves(args, kwargs)
        if leaves is None:
            return False
        pairs = zip(leaves, self.leaves, strict=True)
        others = [leaf for leaf, text in pairs if text and (isinstance(leaf, Tensor) or repr(leaf) != text)]
        if any(not isinstance(leaves[at], Tensor) for at, _, _, _ in self.tensors):
            return False
        return (bool(others) or bool(self._other_answers(leaves))) and all(
            isinstance(leaf, bool | str | None) for leaf in others
        )

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The leaves of a batch in the order of the example; None of one of another form."""
        ordered = {name: kwargs[name] for name in self.keywords if name in kwargs}
        leaves = [*args, *ordered.values()]
        # most batches are flat, and to flatten one takes longer than all else that is asked of it
        if len(kwargs) == len(ordered) and all(isinstance(one, Tensor) for one in leaves):
            return leaves if flat_spec(len(args), tuple(ordered)) == self.spec else None
        leaves, spec = pytree.tree_flatten((tuple(args), {**ordered, **kwargs}))
        return leaves if str(spec) == self.spec and len(leaves) == len(self.leaves) else None

    def _other_form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """How the arguments of a batch are others than the example's."""
        if len(args) != self.num_args or kwargs.keys() != set(self.keywords):
            given, wanted = _arguments(len(args), tuple(kwargs)), _arguments(self.num_args, self.keywords)
            return f"{given}; the example has {wanted}"
        ordered = {name: kwargs[name] for name in self.keywords}
        pairs = zip(_nodes(str(pytree.tree_structure((tuple(args), ordered)))), _nodes(self.spec), strict=False)
        for (kind, keys), (own_kind, own_keys) in pairs:
            if kind != own_kind:
                return f"a {kind} in it, where the example has a {own_kind}"
            if keys != own_keys:
                return _other_keys(keys, own_keys)
        return "as many arguments, and others in them"

    @cached_property
    def _kinds(self) -> list[tuple[tuple[Dim, ...], torch.dtype, bool]] | None:
        """Shape and dtype of each leaf, if there is nothing else to be asked of a batch."""
        if any(self.leaves) or self.asks:
            return None
        return [(shape, getattr(torch, dtype), False) for _, _, shape, dtype in sorted(self.tensors)]

    def _are_as_ever(self, leaves: Sequence[Any]) -> bool:
        """True for tensors like those of the example, which most batches are."""
        kinds = self._kinds
        if kinds is None or not all(isinstance(one, Tensor) for one in leaves):
            return False
        return [(one.shape, one.dtype, one.is_meta) for one in leaves] == kinds

    def _other_answers(self, leaves: Sequence[Any]) -> str:
        """How a batch differs from the example in what forward asks; "" if it does not."""
        tensors, wheres = [leaves[at] for at, _, _, _ in self.tensors], [where for _, where, _, _ in self.tensors]
        return next(filter(None, (ask.difference(tensors, wheres) for ask in self.asks)), "")

    def _shapes(self, leaves: Sequence[Any], dims: Sequence[int | None]) -> list[tuple[Dim, ...]]:
        """What is wanted of each tensor, with as many rows as the first that has some."""
        places = [(leaves[at], dim) for (at, _, _, _), dim in zip(self.tensors, dims, strict=True) if dim is not None]
        rows = next((int(leaf.shape[dim]) for leaf, dim in places), 0)
        return [
            shape if dim is None else (*shape[:dim], rows, *shape[dim + 1 :])
            for (_, _, shape, _), dim in zip(self.tensors, dims, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Form:
        tensors = tuple((at, where, tuple(shape), dtype) for at, where, shape, dtype in found["tensors"])
        sizes = tuple(FreeSize(**one) for one in found["sizes"])
        guards = tuple(Guard(**one) for one in found["guards"])
        asks = tuple(map(Ask.from_json, found["asks"]))
        names, leaves = tuple(found["keywords"]), tuple(found["leaves"])
        return Form(
            found["spec"],
            names,
            leaves,
            tensors,
            sizes,
            guards,
            asks,
            Reads.from_json(found["reads"]),
            found["num_args"],
        )


@cache
def flat_spec(num_args: int, keywords: tuple[str, ...]) -> str:
    """The text of the pytree spec of arguments each of which is a leaf."""
    return str(pytree.tree_structure(((0,) * num_args, dict.fromkeys(keywords, 0))))


def _arguments(num_args: int, keywords: Sequence[str]) -> str:
    """So many arguments, in words."""
    positional = f"{num_args} positional argument{'' if num_args == 1 else 's'}"
    return f"{positional} and {', '.join(keywords)} by keyword" if keywords else positional


def _nodes(spec: str) -> list[tuple[str, str]]:
    """The containers of a pytree spec's text, from the outermost: the kind of each, and the keys of a dict."""
    return re.findall(r"TreeSpec\((\w+), (?:(\[.*?\]|\w+))", spec)


def _other_keys(keys: str, own: str) -> str:
    """How the keys of a dict are others than the example's."""
    try:
        given, wanted = map(ast.literal_eval, (keys, own))
        lacks, has = [one for one in wanted if one not in given], [one for one in given if one not in wanted]
    except (ValueError, SyntaxError, TypeError):  # keys that are no plain values
        return f"a dict has the keys {keys}, in the example {own}"
    if lacks or has:
        found = (f"has {what} {', '.join(map(repr, one))}" for what, one in (("no", lacks), ("also", has)) if one)
        return f"a dict in it {' and '.join(found)}; in the example its keys are {own}"
    return (
        f"the keys of a dict are in the order {keys}, in the example {own}: forward may go over them in their order; "
        f"{{key: batch[key] for key in {own}}} has that of the example"
    )


def _other_value(number: int, leaf: Any, text: str) -> str:
    """What is wrong with an argument that is no tensor."""
    shown = f"a tensor {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
    said = f"argument {number} of the batch is {shown}, in the example it is {text}"
    if isinstance(leaf, int | float) and not isinstance(leaf, bool):
        return f"{said}: a number is part of the program; pass one that changes as a tensor, torch.tensor({leaf!r})"
    return said


def _check_kind(given: Any, where: str, shape: tuple[Dim, ...], dtype: str) -> None:
    if not isinstance(given, Tensor):
        told = "None" if given is None else f"a {type(given).__name__}"
        raise BatchMismatch(f"{where} of the batch is {told}, in the example it is a tensor")
    if given.is_meta:
        raise BatchMismatch(f"{where} of the batch is on the meta device: it has no values")
    if given.dim() != len(shape) or dtype_name(given.dtype) != dtype:
        raise BatchMismatch(_differs(given, where, shape, dtype))


def _check_shape(given: Tensor, where: str, shape: tuple[Dim, ...], sizes: Mapping[str, int], may: str) -> None:
    """Refuse another shape, and say what may vary."""
    wanted = tuple(evaluate(dim, sizes) if isinstance(dim, str) else dim for dim in shape)
    if tuple(given.shape) == wanted:
        return
    told = f", where {', '.join(f'{name} is {size}' for name, size in sizes.items())}" if sizes else ""
    raise BatchMismatch(f"{_differs(given, where, shape, dtype_name(given.dtype))}{told}; {may}")


def _differs(given: Tensor, where: str, shape: tuple[Dim, ...], dtype: str) -> str:
    found, wanted = f"{list(given.shape)} of {dtype_name(given.dtype)}", f"[{', '.join(map(str, shape))}] of {dtype}"
    return f"{where} of the batch is {found}, in the example it is {wanted}"


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")
