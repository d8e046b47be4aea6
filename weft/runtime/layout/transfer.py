"""Transfers as data: one collective as each rank sees it.

    Transfer := kind, peers, what to send to whom, what to receive from whom

Indices are positions in the local tensor: for each dim a list of intervals, taken in that order and laid end to end.
"""

from __future__ import annotations

from dataclasses import dataclass

Index = tuple[tuple[tuple[int, int], ...], ...]
"""For each dim the intervals taken, in order."""


@dataclass(frozen=True)
class Piece:
    """A box of a local tensor that goes to, or comes from, a peer (which may be the rank itself)."""

    peer: int
    slot: int
    index: Index


@dataclass(frozen=True)
class Transfer:
    """One collective as this rank sees it.

    The result has a tensor per entry of `shapes`, first zeros (or empty, where pieces cover it), then every received
    piece put in place, or added if `add`. The i-th piece sent to a peer is the i-th it receives from here. Peers
    enter their transfers in the same order. `all_reduce` sums the one local tensor over `group` and has no pieces.
    `even`: a gather in which all of each member's tensor goes to every other, of one shape; all members know that.
    """

    kind: str
    group: tuple[int, ...]
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    shapes: tuple[tuple[int, ...], ...]
    add: bool = False
    even: bool = False
