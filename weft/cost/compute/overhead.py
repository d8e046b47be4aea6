"""Overhead: what eager mode takes on the host beside the kernels.

In: nothing but this machine. Out: an Overhead: seconds for each kernel of forward that autograd records, for each node
of backward, and for each parameter of a fused optimizer. It is what a step of a small network of the usual operators
takes beyond its kernels, each as `measuring.py` times it. The network's weights fill more than the caches next to a
core: in a true step the host's code is not always found there either, and where it always is, autograd seems to take a
tenth of the time.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.cost.compute.kernel import kernel_of
from weft.cost.compute.measuring import crowding, run_job, time_call
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.transport import Transport

LAYERS, WIDTH, ROWS, ROUNDS = 60, 128, 16, 15
"""Of the network: 4 MB of weights, in kernels of a few microseconds; and how often its step is timed."""


@dataclass(frozen=True)
class Overhead:
    """What eager mode takes on the host beside the kernels.

    Args:
        forward: seconds for each kernel of forward that autograd records.
        backward: for each of backward's nodes.
        optimizer: for each parameter that an optimizer updates by fused kernels.
    """

    forward: float
    backward: float
    optimizer: float


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.gelu = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gelu(self.linear(self.norm(x)))  # type: ignore[no-any-return]


class _Keys(TorchDispatchMode):
    """Lists the keys of the kernels that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kernel = kernel_of(func, args, kwargs or {}, result)
        self.keys += [] if kernel is None else [kernel.key]
        return result


def measure_overhead(*, processes: int = 1, threads: int = 1, device: str | None = None) -> Overhead:
    """Time a step of the network on each of the processes; the slowest counts."""
    with Pool(processes, device=device, num_threads=threads) as pool:
        kind = str(pool.chosen[0].device.type)
        found = run_job(pool, time_autograd, kind)
    crowd = crowding(processes, threads) if kind == "cpu" else 1.0
    return Overhead(*(crowd * max(one) for one in zip(*found, strict=True)))


def time_autograd(transport: Transport, kind: str) -> tuple[float, ...]:
    """The seconds of an Overhead on this rank."""
    network = nn.Sequential(*(_Layer() for _ in range(LAYERS))).to(kind)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    x, gradient = torch.randn(2, ROWS, WIDTH, device=kind)
    network(x).backward(gradient)
    optimizer.step()
    values: list[Tensor] = []
    phases = (lambda: values.append(network(x)), lambda: values.pop().backward(gradient), optimizer.step)
    keys = []
    for place, phase in enumerate(phases):
        if place == 1:
            nodes = _count_nodes(values[0])
        with _Keys() as mode:
            phase()
        keys.append(mode.keys)
    transport.barrier(tuple(range(transport.num_ranks)))
    bare = {key: time_call(key, kind) for key in {key for some in keys for key in some}}
    clock = time.thread_time if kind == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    found: list[list[float]] = [[], [], []]
    for _ in range(ROUNDS):
        network.zero_grad(set_to_none=True)
        for phase, times in zip(phases, found, strict=True):
            begin = clock()
            phase()
            times.append(clock() - begin)
    # where the device has a queue of its own, the host only fills it, and does not wait
    host = kind == "cpu"
    counts = (len(keys[0]), nodes, len(list(network.parameters())))
    return tuple(
        max(0.0, statistics.median(times) - host * sum(bare[key] for key in some)) / count
        for times, some, count in zip(found, keys, counts, strict=True)
    )


def _count_nodes(value: Tensor) -> int:
    seen: set[Any] = set()
    left: list[Any] = [value.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [after for after, _ in node.next_functions]
    return len(seen)
