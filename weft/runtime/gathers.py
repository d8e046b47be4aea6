"""Gathers: how a parameter that is stored in parts is brought to where it is used.

In: the rank's part and the transfers. Out: the whole, now or begun in the background.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from weft.runtime.script import Transfer
from weft.runtime.transfers import Pending, execute_all, start_all
from weft.runtime.transport import Doing, Transport


@dataclass(frozen=True)
class Gather:
    """One parameter's way to where it is used.

    Args:
        number: of the transfers (`numbers.py`).
    """

    name: str
    stored: Tensor
    transfers: tuple[Transfer, ...]
    transport: Transport
    number: int

    @property
    def num_bytes(self) -> int:
        """Of what it brings."""
        return sum(map(prod, self.transfers[-1].shapes)) * self.stored.itemsize

    @torch.no_grad()
    def now(self) -> Tensor:
        self.transport.doing = Doing(f"use of {self.name}")
        return execute_all(self.transfers, [self.stored.detach()], self.transport, dtype=self.stored.dtype)[0]

    @torch.no_grad()
    def start(self) -> Pending | None:
        """Begin, where the transport can do so in the background."""
        return start_all(self.transfers, [self.stored.detach()], self.transport)


Key = tuple[str, int]
"""What tells gathers of one module apart."""


def key_of(gather: Gather) -> Key:
    return gather.name, gather.number


class Asks(Protocol):
    """Whoever brings a gathered weight."""

    def get(self, gather: Gather) -> Tensor: ...
