"""Replicated: what several ranks hold of a parameter stays the same on all of them, or training is refused.

In: a rank's parameters and what each is of the original; a call of `wrong()` that all ranks of the job make at the same
place. Out: nothing, or the parameter that differs and two ranks. Each rank updates what it holds by itself, with the
same gradient: a rank that edits a weight, loads it alone, or has another learning rate drifts away from the others, and
nothing else tells. Of a parameter whose elements lie on several ranks the settings of optimizers are compared
(`settings.py`).

Two numbers per parameter are compared, a sum and a norm: the same bits on ranks of one kind, and on others the same but
for what an optimizer may round otherwise. That takes two passes over the weights, so it is done in a few steps only:
densely at first, then in every 128th; in the first evaluation after a step; and, in a replica, where it is saved.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.runtime.layout.transfer import Index
from weft.runtime.links.transport import Group, Transport

EVERY = 128
"""Steps between two looks; before that, at the powers of two."""
TOLERANCE = 1024
"""Units of rounding, relative to the norm."""
WIDEST = 1e-2
"""The same where a unit is large."""
SETTINGS = -1
"""In place of what is held: what optimizers were set to."""


def is_due(step: int) -> bool:
    """True in the steps in which ranks compare.

    >>> [step for step in range(400) if is_due(step)]
    [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 384]
    """
    return due_from(step) == step


class Drift(NamedTuple):
    """A parameter, and two ranks that have it otherwise."""

    name: str
    one: int
    other: int
    of_settings: bool

    def __str__(self) -> str:
        if self.of_settings:
            return (
                f"the optimizer of rank {self.other} was set otherwise for {self.name} (learning rate, weight decay, "
                f"...) than that of rank {self.one}"
            )
        return f"{self.name} has other values on rank {self.other} than on rank {self.one}, which hold the same of it"


class Replicated:
    """What one rank holds.

    Args:
        held: name, what it is of the original, and the parameter.
        names: of all parameters of the model, those of other ranks too.
        transport: of all ranks of the job.
        settings: gives what optimizers were set to, by the identity of parameters.
    """

    def __init__(
        self,
        held: Sequence[tuple[str, Index, nn.Parameter]],
        names: Iterable[str],
        transport: Transport,
        settings: Callable[[], Mapping[int, int]],
    ) -> None:
        self._held = [((_number(name), _number(str(index))), one) for name, index, one in held]
        self._held += [((_number(name), SETTINGS), one) for name, _, one in held]
        self._settings = settings
        self._num_compared = 0
        self.num_trained = self.due = 0
        """Forwards in training that have begun, and how many there are before the next in which ranks compare."""
        self._names = {_number(name): name for name in names}
        self._everyone, self._transport = tuple(range(transport.num_ranks)), transport
        self._keys: list[list[tuple[int, int]]] | None = None
        """Of each rank, what others hold too: found out in the first look."""

    @property
    def is_trained(self) -> bool:
        """Since ranks have compared."""
        return self._num_compared < self.num_trained

    def wrong(self) -> Drift | None:
        """A parameter, and two ranks that hold it alike and have other values, or update it otherwise. All ranks of the
        job call this together; all get the same answer."""
        self._num_compared, self.due = self.num_trained, due_from(self.num_trained)
        if self._keys is None and len(self._everyone) > 1:
            self._keys = self._shared()
        return self.wrong_among(self._everyone)

    @torch.no_grad()
    def wrong_among(self, ranks: Group) -> Drift | None:
        """The same of some ranks, if all have compared before."""
        if self._keys is None or not any(self._keys[rank] for rank in ranks) or len(ranks) == 1:
            return None
        mine = self._numbers(self._keys[self._transport.rank])
        shapes = [(len(self._keys[rank]), 3) for rank in ranks]
        found = self._transport.all_gather(mine, ranks, shapes=shapes)
        first: dict[tuple[int, int], tuple[int, list[float]]] = {}
        for rank, numbers in zip(ranks, found, strict=True):
            for key, told in zip(self._keys[rank], numbers.tolist(), strict=True):
                other, theirs = first.setdefault(key, (rank, told))
                if not _same(theirs, told):
                    return Drift(self._names[key[0]], other, rank, key[1] == SETTINGS)
        return None

    def _shared(self) -> list[list[tuple[int, int]]]:
        """Of each rank the parameters of which some other holds the same."""
        mine = torch.tensor([key for key, _ in self._held], dtype=torch.int64, device=self._transport.device)
        count = torch.tensor([len(self._held)], dtype=torch.int64, device=self._transport.device)
        shapes = [(int(one), 2) for one in self._transport.all_gather(count, self._everyone)]
        told = self._transport.all_gather(mine.reshape(len(self._held), 2), self._everyone, shapes=shapes)
        keys = [[(int(name), int(index)) for name, index in one.tolist()] for one in told]
        seen: dict[tuple[int, int], int] = {}
        for each in keys:
            for key in each:
                seen[key] = seen.get(key, 0) + 1
        return [[key for key in each if seen[key] > 1] for each in keys]

    def _numbers(self, keys: Sequence[tuple[int, int]]) -> Tensor:
        """A row for each key: of values sum, norm and tolerance, of settings their number."""
        held: Mapping[tuple[int, int], nn.Parameter] = dict(self._held)
        settings, found = self._settings(), torch.zeros(len(keys), 3, dtype=torch.float64)
        found[:, 0] = torch.tensor([settings.get(id(held[key]), 0) for key in keys], dtype=torch.float64)
        found, at = found.to(self._transport.device), [at for at, key in enumerate(keys) if key[1] != SETTINGS]
        if at:
            found[at] = self._of_values([held[keys[one]] for one in at])
        return found

    def _of_values(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        values = [_as_float(one.detach()) for one in parameters]
        sums = [one.sum(dtype=torch.float64) for one in values]
        norms = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in values]
        units = [min(TOLERANCE * torch.finfo(one.dtype).eps, WIDEST) for one in values]
        found = torch.stack([*sums, *norms]).view(2, len(values)).to(self._transport.device)
        return torch.cat([found, found.new_tensor(units)[None]]).t().contiguous()


def due_from(step: int) -> int:
    """The next step in which ranks compare, if it is not this one.

    >>> [step for step in range(400) if due_from(step) == step]
    [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 384]
    """
    if 0 < step < EVERY:
        return 1 << (step - 1).bit_length()
    return -(-step // EVERY) * EVERY


def _as_float(values: Tensor) -> Tensor:
    values = torch.view_as_real(values) if values.is_complex() else values
    return values if values.is_floating_point() else values.double()


def _same(one: Sequence[float], other: Sequence[float]) -> bool:
    """Sums and norms are the same, but for rounding; what is not finite is so on both."""
    far = max(one[2], other[2]) * max(one[1], other[1])
    pairs = list(zip(one[:2], other[:2], strict=True))
    if not all(math.isfinite(number) for pair in pairs for number in pair):
        return all(math.isfinite(mine) == math.isfinite(theirs) for mine, theirs in pairs)
    return all(abs(mine - theirs) <= far for mine, theirs in pairs)


def _number(text: str) -> int:
    return zlib.crc32(text.encode())
