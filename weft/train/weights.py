"""Weights: where a rank's parts come from.

In: a module, the record of one (replayed, or counted), a state dict or files of one (`weight_files.py`), and programs
whose parts are to be filled. Out: parts with values, in place. Files are read in pieces of PIECE bytes, this rank's
ranges only; a record is replayed one whole tensor at a time, or counted a few elements at a time. Tensors that are
missing, unknown, without values (on the meta device), of another shape or kind than planned are errors that name them,
raised before the first part is filled.
"""

from __future__ import annotations

import hashlib
import itertools
import linecache
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.compile.weight_files import Files, open_files
from weft.errors import RunError
from weft.runtime.layout.transfer import Index
from weft.runtime.program.batch import dtype_name
from weft.runtime.program.stored import Holds, shapes_of
from weft.runtime.start.counted import Counted, NotElementwise
from weft.runtime.start.initialise import Whole, module_tensors, part_of
from weft.runtime.start.record import At, Record
from weft.runtime.start.replaying import replay

Weights = nn.Module | Mapping[str, Tensor] | Files

NUM_SAMPLES = 64
NUM_NAMES = 8
"""Names that a message lists."""
PIECE = 1 << 24
"""Bytes of a whole tensor that are read at once, unless a single row has more."""
THIS_MODEL = "give weights of this very model"
PASS_A_FUNCTION = "pass the function that makes the module, not the module: each rank makes its own parts only"


@dataclass(frozen=True)
class Replayed:
    """What the function that makes the module would give it, made tensor by tensor.

    Args:
        counts: values by counting instead, made element by element (`runtime/counted.py`).
    """

    record: Record
    counts: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Torch's generator, and its default dtype, are one for all threads."""

    @cached_property
    def counted(self) -> Counted:
        return Counted(self.record)


Values = Weights | Replayed


@dataclass(frozen=True)
class _Wanted:
    """One part that a rank holds."""

    held: Tensor
    index: Index
    shape: tuple[int, ...]


_Parts = dict[str, list[_Wanted]]
"""Parts by the name under which their values are found."""


@torch.no_grad()
def fill_all(
    programs: Sequence[Holds], weights: Values, otherwise: Values | None = None, known: Collection[str] = ()
) -> None:
    """Give every part that the programs of a rank hold its values, in one go through the weights.

    Args:
        otherwise: has what state dicts lack: buffers that are not saved.
        known: all names of the original model; others among the weights are refused. Not given: none are.
    """
    first = _Source(weights)
    if known and (extra := [name for name in first.whole if name not in known]):
        raise RunError(f"the model has no {listed(extra)}", place=first.place, remedy=THIS_MODEL)
    mine: _Parts = {}
    rest: _Parts = {}
    missing = [name for program in programs for name in _sort(program, first, mine, rest, otherwise is not None)]
    if missing:
        raise RunError(f"no values for {listed(missing)}", place=first.place, remedy=THIS_MODEL)
    first.check(mine)
    if otherwise is not None and rest:
        second = _Source(otherwise)
        second.check(rest)
        second.copy(rest)
    first.copy(mine)


def _sort(program: Holds, source: _Source, mine: _Parts, rest: _Parts, has_more: bool) -> Iterator[str]:
    """Put a program's parts with those that the source has, or with the rest; gives the names of what has no values."""
    shapes = shapes_of(program)
    for name, index in program.stored.items():
        held, original = program.part(name), shapes[name]
        if held is None:
            continue  # the other name of a tied one
        wanted = _Wanted(held, index, original.shape)
        found = next((each for each in original.names if each in source.whole), None)
        if found is not None:
            mine.setdefault(found, []).append(wanted)
        elif has_more and not original.persistent:
            rest.setdefault(name, []).append(wanted)
        else:
            yield name


class _Source:
    """Whole tensors by name, and how parts of them are copied."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self.place = str(values) if isinstance(values, str | Path) else type(values).__name__
        self.whole: Mapping[str, Tensor | Whole | At]
        if isinstance(values, Replayed):
            self.whole, self.place = values.record.tensors, "the function that makes the module"
        else:
            self.whole = open_weights(values)

    def check(self, parts: _Parts) -> None:
        """Refuse what does not fit, or has no values."""
        wrong = [text for name, ones in parts.items() for text in _misfits(name, self.whole[name], ones[0])]
        if wrong:
            raise RunError("; ".join(wrong[:NUM_NAMES]), place=self.place, remedy=THIS_MODEL)
        empty = [name for name in parts if isinstance(one := self.whole[name], Tensor) and one.is_meta]
        if empty:
            own = isinstance(self._values, nn.Module)
            remedy = f"weights=FILES for what a state dict has; for the rest, {PASS_A_FUNCTION}"
            raise RunError(
                f"{listed(empty)}: on the meta device, which has shapes and no values",
                place=self.place,
                remedy=remedy if own else "load the weights on the CPU, or give their files",
            )
        if isinstance(self._values, Replayed):
            _check_replayed(self._values, parts)

    def copy(self, parts: _Parts) -> None:
        """Fill the parts."""
        if not isinstance(self._values, Replayed):
            for name, ones in parts.items():
                _hand_out(self.whole[name], ones)  # type: ignore[arg-type]
            return
        with self._values.lock:
            if self._values.counts:
                _count(self._values, parts)
            else:
                replay(self._values.record, parts, lambda name, tensor: _hand_out(tensor, parts[name]))


def _hand_out(tensor: Tensor | Whole, parts: Sequence[_Wanted]) -> None:
    for one in parts:
        copy_part(tensor, one.index, one.held)


def _count(values: Replayed, parts: _Parts) -> None:
    for name, ones in parts.items():
        tensor = values.record.tensors[name]
        if isinstance(tensor, Tensor):
            _hand_out(tensor, ones)
            continue
        for one in ones:
            values.counted.fill(name, one.index, one.held)


def _check_replayed(values: Replayed, parts: _Parts) -> None:
    """Refuse what is never set, and what cannot be counted."""
    unset = values.record.unset(parts)
    if unset:
        raise RunError(
            f"{listed(unset)}: the construction never sets the values",
            remedy="give them values (torch.zeros, nn.init), or weights=FILES",
        )
    if not values.counts:
        return
    try:
        values.counted.check(parts)
    except NotElementwise as error:
        raise RunError(
            f"{error.name} cannot be counted: {error.function} mixes the elements of what is drawn",
            place=_quoted(error.place),
            remedy='init="exact", or an initialisation of which each element is drawn by itself',
        ) from None


def _quoted(place: str) -> str:
    """A line of a file with what stands there."""
    file, _, line = place.rpartition(":")
    return f"{place}  {linecache.getline(file, int(line)).strip()}".rstrip() if file else place


def copy_part(whole: Tensor | Whole, index: Index, into: Tensor) -> None:
    """Write the part at `index` of a whole tensor, piece by piece: nothing as large as the part is made beside it."""
    if not index:
        into.copy_(part_of(whole, index))
        return
    rows = max(1, PIECE // max(1, into.element_size() * math.prod(into.shape[1:])))
    for box in itertools.product(_runs(index[0], rows), *(_runs(intervals) for intervals in index[1:])):
        target = into
        for dim, (start, stop, at) in enumerate(box):
            target = target.narrow(dim, at, stop - start)
        target.copy_(_read(whole, tuple((start, stop) for start, stop, _ in box)))


def _read(whole: Tensor | Whole, box: Sequence[tuple[int, int]]) -> Tensor:
    if isinstance(whole, Tensor):
        return whole.detach()[tuple(slice(*one) for one in box)]
    return whole.read(tuple((one,) for one in box))


def _runs(intervals: Sequence[tuple[int, int]], most: int | None = None) -> list[tuple[int, int, int]]:
    """Where each run of indices starts and ends in the whole, and where it lies in the part.

    >>> _runs([(4, 7), (0, 1)], 2)
    [(4, 6, 0), (6, 7, 2), (0, 1, 3)]
    """
    found, at = [], 0
    for start, stop in intervals:
        for first in range(start, stop, most or max(1, stop - start)):
            last = stop if most is None else min(stop, first + most)
            found.append((first, last, at))
            at += last - first
    return found


def _misfits(name: str, whole: Any, wanted: _Wanted) -> Iterator[str]:
    """What is wrong with a tensor, if anything is."""
    shape = tuple(whole.size if isinstance(whole, At) else whole.shape)
    if shape != wanted.shape:
        yield f"{name} has shape {list(shape)}, planned as {list(wanted.shape)}"
    elif whole.dtype is None or _kind(whole.dtype) != _kind(wanted.held.dtype):
        yield f"{name} is {_word(whole.dtype)}, planned as {_word(wanted.held.dtype)}"


def _kind(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"


def _word(dtype: torch.dtype | None) -> str:
    return "of a dtype that torch does not have" if dtype is None else dtype_name(dtype)


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - NUM_NAMES
    return ", ".join(names[:NUM_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def open_weights(weights: Weights) -> Mapping[str, Tensor | Whole]:
    """Whole tensors by name, nothing read yet where that can be."""
    if isinstance(weights, nn.Module):
        return module_tensors(weights)
    return weights if isinstance(weights, Mapping) else open_files(weights)


def sample_hash(module: nn.Module) -> str:
    """A hash of some elements of every tensor: modules made under different seeds differ in it."""
    digest = hashlib.sha256()
    for name, tensor in module_tensors(module).items():
        flat = tensor.detach().reshape(-1)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if flat.numel() and not flat.is_meta:
            at = torch.linspace(0, flat.numel() - 1, min(NUM_SAMPLES, flat.numel()), dtype=torch.float64).long()
            digest.update(str(flat[at.to(flat.device)].tolist()).encode())
    return digest.hexdigest()
