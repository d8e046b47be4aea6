"""Rarer random numbers, as pure functions of the same stream: Cauchy, log-normal, geometric, Poisson, multinomial,
gamma and Dirichlet.

In: parameters of the distribution, the part of a draw. Out: the part's numbers, the same however the whole is cut.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.random import Device, Draw, Stream, as_exponential, as_gaussian, gaussian, uniform, unmoved


def cauchy(
    median: float = 0.0,
    sigma: float = 1.0,
    *,
    draw: Draw,
    stream: Stream,
    dtype: torch.dtype,
    device: Device = None,
) -> Tensor:
    """Cauchy, by its inverse distribution function."""
    return (torch.tan(math.pi * (uniform(stream, draw, device=device) - 0.5)) * sigma + median).to(dtype)


def log_normal(
    mean: float = 1.0,
    std: float = 2.0,
    *,
    draw: Draw,
    stream: Stream,
    dtype: torch.dtype,
    device: Device = None,
) -> Tensor:
    """Numbers whose logarithm is normal."""
    return (gaussian(stream, draw, device=device) * std + mean).exp().to(dtype)


def geometric(p: float, *, draw: Draw, stream: Stream, dtype: torch.dtype, device: Device = None) -> Tensor:
    """How many trials until the first success."""
    if p == 1:
        return torch.ones_like(uniform(stream, draw, device=device), dtype=dtype)
    return (torch.log1p(-uniform(stream, draw, device=device)) / math.log1p(-p)).floor_().add_(1).to(dtype)


def poisson(rate: Tensor, *, draw: Draw, stream: Stream, dtype: torch.dtype, device: Device = None) -> Tensor:
    """How many events in a time of length `rate`, their distances exponential; the rate's gradient is zero."""
    left = rate.detach().double().clone()
    count = torch.zeros_like(left)
    lane = 0
    while True:
        left += torch.log1p(-uniform(stream, draw, lane=lane, device=device))
        running = left > 0
        if not bool(running.any()):
            return unmoved(count.to(dtype), rate)
        count += running
        lane += 1


def multinomial(p: Tensor, num_samples: int, replacement: bool, *, draw: Draw, stream: Stream) -> Tensor:
    """Indices drawn from the weights of each row."""
    keys = uniform(stream, draw, device=p.device)
    weights = p.detach().double()
    if not replacement:
        # the first of exponential clocks that run at these rates to ring
        clocks = as_exponential(keys, weights)
        return clocks.topk(num_samples, dim=-1, largest=False, sorted=True).indices
    ends = weights.cumsum(-1)
    found = torch.searchsorted(ends, keys * ends[..., -1:], right=True)
    return found.clamp_max_(p.shape[-1] - 1)


@torch.no_grad()
def _gammas(concentration: Tensor, stream: Stream, draw: Draw) -> Tensor:
    """Float64 gamma numbers of rate 1, by Marsaglia and Tsang: each element tries until a number of its own lanes is
    accepted, a concentration below 1 by way of one that is larger by 1."""
    wanted = concentration.detach().double()
    is_small = wanted < 1
    d = torch.where(is_small, wanted + 1, wanted) - 1 / 3
    scale = 1 / (9 * d).sqrt()
    found, trying, lane = wanted.clone(), (wanted > 0) & wanted.isfinite(), 1
    while bool(trying.any()):
        first, second, chance = (uniform(stream, draw, lane=lane + i, device=wanted.device) for i in range(3))
        x = as_gaussian(first, second)
        v = (1 + scale * x) ** 3
        accepted = trying & (v > 0) & (chance.log() < 0.5 * x * x + d - d * v + d * v.log())
        found, trying, lane = torch.where(accepted, d * v, found), trying & ~accepted, lane + 3
    shrunk = found * (1 - uniform(stream, draw, device=wanted.device)) ** (1 / wanted)
    return torch.where(is_small & (wanted > 0), shrunk, found)


class _Moved(torch.autograd.Function):
    """Numbers that move with the concentration they were drawn for, as torch's do."""

    @staticmethod
    def forward(ctx: Any, concentration: Tensor, found: Tensor, normed: bool) -> Tensor:
        ctx.save_for_backward(concentration, found)
        ctx.normed = normed
        return found.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        concentration, found = ctx.saved_tensors
        if not ctx.normed:
            return grad * torch._standard_gamma_grad(concentration, found), None, None
        total = concentration.sum(-1, True).expand_as(concentration)
        rate = torch._dirichlet_grad(found, concentration, total)
        return rate * (grad - (found * grad).sum(-1, True)), None, None


def gamma(concentration: Tensor, *, draw: Draw, stream: Stream, dtype: torch.dtype, device: Device = None) -> Tensor:
    """Gamma of rate 1."""
    found = _gammas(concentration, stream, draw).to(dtype).clamp_min_(torch.finfo(dtype).tiny)
    return _Moved.apply(concentration, found, False)  # type: ignore[no-any-return]


def dirichlet(concentration: Tensor, *, draw: Draw, stream: Stream) -> Tensor:
    """Rows that add up to 1: gamma numbers, normed."""
    numbers = _gammas(concentration, stream, draw).clamp_min_(torch.finfo(torch.float64).tiny)
    limits = torch.finfo(concentration.dtype)
    found = (numbers / numbers.sum(-1, True)).to(concentration.dtype).clamp_(limits.tiny, 1 - limits.eps / 2)
    return _Moved.apply(concentration, found, True)  # type: ignore[no-any-return]
