"""Signature: what a rank means by a collective call, in words, so that two ranks can find out that they differ.

In: kind, tensors sent, tensors expected. Out: three numbers for each peer (what the call is, what is sent to the peer,
what is expected of it), which fit the peer's own three if and only if the calls fit; and the text that says how two
signatures differ. Only the numbers travel with every call; the words travel when something is wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from weft.runtime.links.transport import Expected, Expects, Sends

NUMBERS = 3
"""Numbers per peer."""
NOTHING = "nothing"
EMPTY: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Words:
    """One rank's side of a collective, as text.

    Args:
        kind: with the operation of a sum; and the tensor, where all members must have the same.
        sends, expects: by peer, what goes there and comes from there.
    """

    kind: str
    group: tuple[int, ...]
    number: int
    sends: Mapping[int, str]
    expects: Mapping[int, str]

    @property
    def where(self) -> str:
        return f"call {self.number} of group {self.group}"

    def numbers(self, peer: int) -> tuple[int, int, int]:
        """What the peer must know."""
        sent, wanted = self.sends.get(peer, NOTHING), self.expects.get(peer, NOTHING)
        return _number(f"{self.kind} {self.where}"), _number(sent), _number(wanted)

    def fits(self, peer: int, theirs: Sequence[int]) -> bool:
        """True if these are the numbers of a peer that makes the same call."""
        what, sent, wanted = self.numbers(peer)
        return tuple(theirs) == (what, wanted, sent)

    def __str__(self) -> str:
        sent = ", ".join(f"{text} to {peer}" for peer, text in self.sends.items())
        wanted = ", ".join(f"{text} from {peer}" for peer, text in self.expects.items())
        return self.kind + (f" sending {sent}" if sent else "") + (f" expecting {wanted}" if wanted else "")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Words:
        found = json.loads(text)
        sends, expects = ({int(peer): words for peer, words in found[key].items()} for key in ("sends", "expects"))
        return Words(found["kind"], tuple(found["group"]), found["number"], sends, expects)


Tensors = Sequence[Tensor] | Sequence[Expected]


class Signature:
    """The same, put into words only when somebody asks: most calls end well and nobody does.

    Args:
        kind: with the operation of a sum.
        alike: the tensor, where all members must have the same.
        sends, expects: by peer; empty sequences are nothing.
    """

    def __init__(
        self,
        kind: str,
        group: tuple[int, ...],
        number: int,
        *,
        alike: Tensor | None = None,
        sends: Sends = EMPTY,
        expects: Expects = EMPTY,
    ) -> None:
        outside = (sends.keys() | expects.keys()) - set(group)
        assert not outside, f"an exchange with ranks {sorted(outside)} outside the group {group}"
        self.kind, self.group, self.number = kind, group, number
        self.alike, self.sends, self.expects = alike, sends, expects

    @cached_property
    def words(self) -> Words:
        kind = self.kind if self.alike is None else f"{self.kind} of {text_of([self.alike])}"
        sends, expects = (
            {peer: text_of(tensors) for peer, tensors in one.items() if tensors} for one in (self.sends, self.expects)
        )
        return Words(kind, self.group, self.number, sends, expects)

    def __str__(self) -> str:
        return str(self.words)


def difference(rank: int, mine: Words, other: int, theirs: Words) -> str:
    """Why the calls of two ranks do not fit; "" if they do."""
    if (mine.kind, mine.group, mine.number) != (theirs.kind, theirs.group, theirs.number):
        where = mine.where if mine.where == theirs.where else f"{mine.where}, there {theirs.where}"
        return f"rank {rank} entered {mine} where rank {other} entered {theirs}, in {where}"
    for sender, sent, taker, taken in ((rank, mine, other, theirs), (other, theirs, rank, mine)):
        given, wanted = sent.sends.get(taker, NOTHING), taken.expects.get(sender, NOTHING)
        if given != wanted:
            return f"rank {sender} sent {given} to rank {taker}, which expects {wanted}, in {mine.kind}, {mine.where}"
    return ""


def text_of(tensors: Tensors) -> str:
    """`float64[2 3]` for each, `nothing` if there are none."""
    words = [_word(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else _word(tuple(x[0]), x[1]) for x in tensors]
    return " and ".join(words) or NOTHING


@lru_cache(maxsize=4096)
def _word(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{' '.join(map(str, shape))}]"


@lru_cache(maxsize=4096)
def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
