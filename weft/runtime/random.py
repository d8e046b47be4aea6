"""Random numbers as a pure function of (seed, step, call, micro-batch, draw, element): no generator, no order.

In: a Stream (one micro-batch of one step) and a Draw (which draw of the forward, and which elements of the whole
tensor are wanted). Out: the numbers of those elements. Promised: the same numbers for every partition of a tensor and
every dtype, on every device, however often and in whatever order they are asked for. Element i of a draw is
splitmix64 at position i of a sequence that starts at a hash of everything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.layout.indices import Intervals, indices, linear_index

Device = torch.device | str | Tensor | None
"""Where numbers are made: a device, or a tensor that lies there."""

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Stream:
    """The random numbers of one micro-batch of one training step, or of a call in evaluation.

    Args:
        call: how many evaluations there were between the training step before this `step` and it, with this one; 0 in
            training.
    """

    seed: int
    step: int
    microbatch: int
    call: int = 0


@dataclass(frozen=True)
class Draw:
    """One draw of a forward: how many came before it, the whole shape, and the intervals per dim wanted here."""

    number: int
    shape: tuple[int, ...]
    at: tuple[Intervals, ...]


def whole_draw(number: int, shape: tuple[int, ...]) -> Draw:
    """The draw of a whole tensor."""
    return Draw(number, tuple(shape), tuple(((0, size),) for size in shape))


def _mix(value: int) -> int:
    """The finaliser of splitmix64 on a Python number; `_mix_all` is the same on tensors."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fold(value: Tensor, shift: int) -> Tensor:
    # int64 shifts keep the sign; the mask makes them logical
    return value.bitwise_xor_((value >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _mix_all(value: Tensor) -> Tensor:
    value = _fold(value, 30).mul_(_signed(_FIRST))
    value = _fold(value, 27).mul_(_signed(_SECOND))
    return _fold(value, 31)


def _start(stream: Stream, number: int, lane: int) -> int:
    state = _mix(stream.call)  # 0 of 0: what training draws never changes
    for field in (stream.seed, stream.step, stream.microbatch, number, lane):
        state = _mix((state ^ (field & _MASK)) + _STEP)
    return state


@torch.no_grad()
def uniform(stream: Stream, draw: Draw, *, lane: int = 0, device: Device = None) -> Tensor:
    """Float64 numbers in [0, 1) in the part's shape. Lanes of one draw are independent."""
    index = linear_index(draw.shape, draw.at, device.device if isinstance(device, Tensor) else device)
    return uniform_at(stream, draw.number, index, lane=lane)


@torch.no_grad()
def uniform_at(stream: Stream, number: int, index: Tensor, *, lane: int = 0) -> Tensor:
    """Float64 numbers in [0, 1) of the elements of these row-major indices, which are overwritten."""
    bits = _mix_all(index.mul_(_signed(_STEP)).add_(_signed(_start(stream, number, lane))))
    return (bits >> 11).bitwise_and_((1 << 53) - 1).double().mul_(2.0**-53)


def gaussian(stream: Stream, draw: Draw, *, device: Device = None) -> Tensor:
    """Float64 standard normal numbers."""
    return as_gaussian(uniform(stream, draw, device=device), uniform(stream, draw, lane=1, device=device))


# From uniform numbers, which are overwritten, to others.


@torch.no_grad()
def as_gaussian(first: Tensor, second: Tensor) -> Tensor:
    """By Box and Muller, from two lanes."""
    return first.neg_().log1p_().mul_(-2).sqrt_().mul_(second.mul_(2 * math.pi).cos_())


@torch.no_grad()
def as_coarse(numbers: Tensor) -> Tensor:
    """In 24 bits, so that float32 and float64 hold the same numbers and never reach 1."""
    return numbers.mul_(2.0**24).floor_().mul_(2.0**-24)


@torch.no_grad()
def as_exponential(numbers: Tensor, rate: float | Tensor) -> Tensor:
    """Never zero: its logarithm is taken for Gumbel noise."""
    return -torch.log1p(-numbers.clamp_min_(2.0**-54)) / rate


class _Unmoved(torch.autograd.Function):
    """Numbers that do not move with the tensors they were made from, and yet belong to the graph."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return out.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


def unmoved(out: Tensor, *sources: float | Tensor) -> Tensor:
    """Numbers whose sources get a gradient of zeros, as in torch."""
    tensors = [source for source in sources if isinstance(source, Tensor) and source.requires_grad]
    return _Unmoved.apply(out, *tensors) if tensors else out


def _fixed(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value


def rand(
    low: float = 0.0,
    high: float = 1.0,
    *,
    draw: Draw,
    stream: Stream,
    dtype: torch.dtype,
    device: Device = None,
) -> Tensor:
    """Uniform in [low, high)."""
    return (as_coarse(uniform(stream, draw, device=device)) * (high - low) + low).to(dtype)


def randn(
    mean: float | Tensor = 0.0,
    std: float | Tensor = 1.0,
    *,
    draw: Draw,
    stream: Stream,
    dtype: torch.dtype,
    device: Device = None,
) -> Tensor:
    """Normal; mean and deviation may be the local parts of tensors, whose gradient is zero, as in torch."""
    return unmoved((gaussian(stream, draw, device=device) * _fixed(std) + _fixed(mean)).to(dtype), mean, std)


def randint(
    low: int,
    high: int,
    *,
    draw: Draw,
    stream: Stream,
    dtype: torch.dtype,
    device: Device = None,
) -> Tensor:
    """Integers in [low, high)."""
    return ((uniform(stream, draw, device=device) * (high - low)).floor_().to(torch.int64) + low).to(dtype)


def randperm(*, draw: Draw, stream: Stream, dtype: torch.dtype, device: Device = None) -> Tensor:
    """The part of a permutation of the whole dim."""
    keys = uniform(stream, whole_draw(draw.number, draw.shape), device=device)
    return keys.argsort(stable=True)[indices(draw.at[0], keys.device)].to(dtype)


def exponential(
    rate: float = 1.0,
    *,
    draw: Draw,
    stream: Stream,
    dtype: torch.dtype,
    device: Device = None,
) -> Tensor:
    """Exponential."""
    return as_exponential(uniform(stream, draw, device=device), rate).to(dtype)


def bernoulli(
    p: float | Tensor,
    *,
    draw: Draw,
    stream: Stream,
    dtype: torch.dtype,
    device: Device = None,
) -> Tensor:
    """One with probability p, else zero; p may be the local part of a tensor, whose gradient is zero."""
    return unmoved((uniform(stream, draw, device=device) < _fixed(p)).to(dtype), p)


def _undrawn(x: Tensor, p: float, train: bool) -> Tensor | None:
    """What dropout gives where all elements stay, or none; None if numbers must be drawn."""
    if p == 0 or not train or x.numel() == 0:
        return x
    return x * torch.zeros((), dtype=x.dtype, device=x.device) if p == 1 else None


def dropout(x: Tensor, p: float, train: bool, *, draw: Draw, stream: Stream) -> Tensor:
    """Zero elements with probability p and scale the others. A draw of one number per channel broadcasts."""
    if (found := _undrawn(x, p, train)) is not None:
        return found
    keep = bernoulli(1 - p, draw=draw, stream=stream, dtype=x.dtype, device=x.device)
    return x * keep.div_(1 - p)


def native_dropout(x: Tensor, p: float, train: bool | None, *, draw: Draw, stream: Stream) -> tuple[Tensor, Tensor]:
    """Dropout and its mask."""
    if train is False or x.numel() == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = uniform(stream, draw, device=x.device) < 1 - p
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def alpha_dropout(x: Tensor, p: float, train: bool, *, draw: Draw, stream: Stream) -> Tensor:
    """Dropout that keeps mean and variance of a self-normalising network (dropped elements saturate)."""
    if (found := _undrawn(x, p, train)) is not None:
        return found
    alpha = 1.7580993408473766
    scale = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    keep = bernoulli(1 - p, draw=draw, stream=stream, dtype=x.dtype, device=x.device)
    shift = (keep - 1) * (alpha * scale) + alpha * scale * p
    return x * (keep * scale) + shift


def rrelu(x: Tensor, lower: float, upper: float, training: bool, *, draw: Draw, stream: Stream) -> Tensor:
    """Leaky rectifier with a random slope."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slope = (uniform(stream, draw, device=x.device) * (upper - lower) + lower).to(x.dtype)
    return torch.where(x <= 0, x * slope, x)
