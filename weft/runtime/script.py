"""Script: one rank's share of a Program, with nothing left to decide.

    Script      := Instruction ..., what the rank stores
    Instruction := Load | Run | Take | Give | Reshard | Loop | Region | Sync | Free
    Transfer    := kind, peers, what to send to whom, what to receive from whom

Keys name values; a value holds one tensor per slot of the rank (one, unless the rank stands in several cells of a
grid). Indices are positions in the local tensor: for each dim a list of intervals, taken in that order and laid end
to end. The interpreter needs nothing else: no layouts, no rules, no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Index = tuple[tuple[tuple[int, int], ...], ...]
"""For each dim the intervals taken, in order."""


@dataclass(frozen=True)
class Local:
    """In a Run's arguments: the tensor of a value on this rank, in this slot."""

    key: str
    slot: int = 0


@dataclass(frozen=True)
class Peers:
    """In a Run's arguments: the communicator of these ranks (ascending position along the cut axes)."""

    ranks: tuple[int, ...]


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
    """

    kind: str
    group: tuple[int, ...]
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    shapes: tuple[tuple[int, ...], ...]
    add: bool = False


@dataclass(frozen=True)
class Load:
    """Make a value from a stored parameter, buffer, input or constant. `leaf`: it collects a gradient."""

    key: str
    tensor: str
    transfers: tuple[Transfer, ...]
    leaf: bool
    place: str = ""


@dataclass(frozen=True)
class Run:
    """Call an operator on local tensors. `target`: an ATen overload, or `weft.NAME` of `runtime/calls.py`."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[Local, ...]
    op: str
    """Name of the op, for messages and traces."""
    place: str
    """The user's source line."""
    grad: bool = True
    autocast: tuple[str, torch.dtype, bool] | None = None
    function: Callable[..., Any] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Take:
    """Cut a part out of a value that the rank holds whole; zeros of `shape` if `index` is None. By autograd."""

    source: str
    target: Local
    index: Index | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Give:
    """Add the part to the target (`index` None), or keep it to be placed at `index` when the loop ends.

    `shape` is that of the whole target. All Gives of one target in a loop are of the same sort."""

    source: Local
    target: str
    index: Index | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Reshard:
    """Differentiable change of layout. `backward` is None where no gradient flows."""

    source: str
    target: str
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...] | None
    source_shapes: tuple[tuple[int, ...], ...]
    """Shapes of this rank's source slots (none if it holds nothing)."""
    target_shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    place: str = ""


@dataclass(frozen=True)
class Loop:
    """Run one body after the other (chunks). Values made in a body die with it, except Give targets.

    `recompute`: each body keeps only its inputs and runs again in backward."""

    bodies: tuple[tuple[Instruction, ...], ...]
    recompute: bool
    gives: tuple[str, ...]
    """Keys of the values the loop leaves behind."""


@dataclass(frozen=True)
class Region:
    """Run the body without keeping what is inside it; run it again in backward. `outputs` leave it."""

    body: tuple[Instruction, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Sync:
    """Bring the gradients of a parameter's leaves to the stored layout and add them. Runs after backward."""

    parameter: str
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[tuple[int, ...], ...], ...]
    transfers: tuple[tuple[Transfer, ...], ...]
    shape: tuple[int, ...] | None
    """Of the stored part; None if the rank stores nothing of it."""
    dtype: torch.dtype


@dataclass(frozen=True)
class Free:
    """Forget these values."""

    keys: tuple[str, ...]


Instruction = Load | Run | Take | Give | Reshard | Loop | Region | Sync | Free


@dataclass(frozen=True)
class Script:
    """All that one rank needs to know.

    Args:
        stored: for each parameter, buffer, input and constant tensor held here, the global intervals per dim.
        loss: key of the value that backward starts from; None on ranks that do not hold it.
        outputs: output tensor -> key. updates: buffer tensor -> key of its new content.
    """

    rank: int
    num_ranks: int
    instructions: tuple[Instruction, ...]
    syncs: tuple[Sync, ...]
    stored: Mapping[str, Index]
    loss: str | None
    outputs: Mapping[str, str] = field(default_factory=dict)
    updates: Mapping[str, str] = field(default_factory=dict)
