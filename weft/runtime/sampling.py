"""Rarer random numbers, as pure functions of the same stream: Cauchy, log-normal, geometric, Poisson, multinomial.

In: parameters of the distribution, the part of a draw. Out: the part's numbers, the same however the whole is cut.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.runtime.random import Device, Draw, Stream, as_exponential, gaussian, uniform, unmoved


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
