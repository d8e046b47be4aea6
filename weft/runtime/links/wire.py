"""Wire: tensors for several peers as one run of bytes, and back.

In: for each member of a group, in order, the tensors that go to it. Out: one flat byte tensor and the bytes per member,
as an uneven all_to_all wants them. Promised: any dtype; no copy where one contiguous tensor is all there is; what is
unpacked belongs to the receiver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.runtime.links.transport import Expected

LARGE = 64 << 10
"""Bytes from which on a message between processes of one host lies in shared memory. A pipe of Linux holds as many."""

NOTHING = torch.empty(0, dtype=torch.uint8)
"""What goes to a member that nothing goes to."""


def as_it_lies(tensor: Tensor) -> Tensor:
    """The tensor, or one of the same bytes, whose memory is its content in order."""
    return as_bytes(tensor) if tensor.is_complex() or tensor.is_neg() else tensor.contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's content, in order; a view if it lies so in memory."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.numel() == 1:
        # one element counts as contiguous whatever its stride
        flat = flat.as_strided((1,), (1,))
    if flat.is_complex():
        # conjugates and negatives of complex numbers are views that have not been worked out
        flat = flat.resolve_conj().resolve_neg()
    return flat.view(torch.uint8)


def pack(
    members: Sequence[Sequence[Tensor]], device: torch.device, scratch: Callable[[str, int], Tensor]
) -> tuple[Tensor, list[int]]:
    """One flat byte tensor with everything for all members (a copy lies in `scratch`), and the bytes for each."""
    pieces = [[as_bytes(tensor) for tensor in tensors] for tensors in members]
    sizes = [sum(piece.numel() for piece in one) for one in pieces]
    flat = [piece for one in pieces for piece in one if piece.numel()]
    if len(flat) == 1:
        return flat[0], sizes
    if not flat:
        return torch.empty(0, dtype=torch.uint8, device=device), sizes
    return torch.cat(flat, out=scratch("packed", sum(sizes))), sizes


def num_bytes(wanted: Sequence[Expected]) -> int:
    """Bytes of tensors to come."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in wanted)


def unpack(flat: Tensor, members: Sequence[Sequence[Expected]]) -> list[list[Tensor]]:
    """The tensors in a flat byte tensor, per member: views of it if all are of one dtype, else copies."""
    if sum(map(len, members)) == 1:
        return [[flat.view(dtype).view(shape) for shape, dtype in wanted] for wanted in members]
    mixed = len({dtype for wanted in members for _, dtype in wanted}) > 1
    at, found = 0, []
    for wanted in members:
        tensors = []
        for shape, dtype in wanted:
            length = math.prod(shape) * dtype.itemsize
            piece = flat[at : at + length]
            # one memory seen as two dtypes: saving it fails, and a piece may lie where its dtype cannot
            tensors.append((piece.clone() if mixed else piece).view(dtype).view(shape))
            at += length
        found.append(tensors)
    assert at == flat.numel(), f"{flat.numel()} bytes came, {at} were expected"
    return found
