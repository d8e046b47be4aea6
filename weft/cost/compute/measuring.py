"""Measuring kernels: how long operators take on this machine.

In: kernels. Out: seconds for each distinct one, and for those that could not be measured why. Processes are started as
those that train are (`Pool`): with the same threads and the same way to get memory. With several processes all measure
the same kernel at once, since cores share the way to memory; the time is that of the slowest.

In a training step operands are rarely where the last operator left them near the core, nor is the memory that results
get. So a kernel goes round several copies of its operands, and a result is kept until the next one is made in its
place. A time is a median of calls, and of passes that lie apart. On the host it is what the processor spent on the
call, if one thread does all of it, so that other programs do not disturb, and as many times that as there are more
processes than cores; the host's work for the call is part of it. On accelerators it is the device's own time, with
calls queued behind others.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.cost.compute.kernel import Kernel
from weft.cost.compute.remake import Call, CannotRemake, remake
from weft.errors import RunError
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.transport import CollectiveMismatch, RankFailed, Transport

COLD, COPIES = 64 << 20, 64
"""Bytes of all copies of operands and results, more than caches hold; and how many copies there are at most: small
operands do stay near. Against operators timed within steps of a GPT and an MLP, 8 copies made those that only move
memory 2 times too fast, 64 did not."""
REPEATS, ENOUGH, LONG = 5, 0.02, 0.05
"""A kernel is called so often, and for so many seconds; but not for longer unless it has not been called twice."""
TICK, MANY = 1e-4, 100
"""Calls that are shorter than so many seconds are timed together, so many at most: the clock itself takes time."""
AT_ONCE, PASSES = 16, 3
"""Kernels of one job, after which it is told how far things are; and how often they are timed, of which the median
counts: other programs come in bursts."""

Done = Callable[[int, int], None]
"""Is told how many of how many are measured."""


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Args:
        seconds: by the kernels' keys. refused: why a kernel could not be measured, by key.
    """

    seconds: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)


def measure(
    kernels: Iterable[Kernel],
    *,
    processes: int = 1,
    threads: int = 1,
    device: str | None = None,
    done: Done = lambda count, total: None,
    keep: Callable[[Mapping[str, float]], None] = lambda seconds: None,
) -> Measured:
    """Time every distinct kernel.

    Args:
        processes: that compute at the same time. threads: of each of them.
        device: as of `Pool`: what this machine has if not given.
        keep: gets what was measured, a part at a time.
    """
    keys = list(dict.fromkeys(kernel.key for kernel in kernels))
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    with Pool(processes, device=device, num_threads=threads) as pool:
        crowd = crowding(processes, threads) if pool.chosen[0].device.type == "cpu" else 1.0
        for start in range(0, len(keys), AT_ONCE):
            done(start, len(keys))
            some = keys[start : start + AT_ONCE]
            asked = (some, str(pool.chosen[0].device.type))
            passes = [[*zip(*run_job(pool, time_keys, asked), strict=True)] for _ in range(PASSES)]
            for key, *times in zip(some, *passes, strict=True):
                reasons = [one for ranks in times for one in ranks if isinstance(one, str)]
                if reasons:
                    refused[key] = reasons[0]
                else:
                    seconds[key] = statistics.median(map(max, times)) * crowd
            keep({key: seconds[key] for key in some if key in seconds})
    done(len(keys), len(keys))
    return Measured(seconds, refused)


def crowding(processes: int, threads: int) -> float:
    """How many times longer a computation takes because its threads have to share cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # clocks of several threads see that they wait for each other
    return max(1.0, processes / cores) if threads == 1 else 1.0


def run_job(pool: Pool, entry: Any, payload: Any) -> list[Any]:
    """What each process found."""
    try:
        return pool.run(entry, payload)
    except (RankFailed, CollectiveMismatch) as error:
        raise RunError(f"a process failed while kernels were measured: {error}") from error


def time_keys(transport: Transport, asked: tuple[Sequence[str], str]) -> list[float | str]:
    """The median time of each kernel on this rank, or why there is none."""
    keys, kind = asked
    device = torch.device(kind)
    everyone = tuple(range(transport.num_ranks))
    found: list[float | str] = []
    for key in keys:
        ready: Callable[[], float] | str
        try:
            ready = _ready(remake(key, device), device)
        except (CannotRemake, RuntimeError, ValueError, TypeError, IndexError) as error:
            ready = _reason(error)
        transport.barrier(everyone)
        found.append(ready if isinstance(ready, str) else ready())
    return found


def time_call(key: str, device: torch.device | str = "cpu") -> float:
    """The median time of a kernel in this process. Raises CannotRemake."""
    device = torch.device(device)
    return _ready(remake(key, device), device)()


def _reason(error: Exception) -> str:
    if isinstance(error, CannotRemake):
        return str(error)
    return f"the operator refuses the call: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _ready(call: Call, device: torch.device) -> Callable[[], float]:
    """Make the operands, and call once or more, which pays for what is made only once; then only times are missing."""
    first = call.make()
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        result = call.func(*first[0], **first[1])
        made = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
        held = call.num_bytes + sum(one.numel() * one.itemsize for one in made)
        copies = max(1, min(COPIES, COLD // max(held, 1)))
        operands = [first, *(pytree.tree_map_only(Tensor, _copy, first) for _ in range(copies - 1))]
        results, begin = [result] * copies, time.perf_counter()
        for place, (args, kwargs) in enumerate(operands):
            if time.perf_counter() - begin < LONG:
                results[place] = call.func(*args, **kwargs)
    times = _host_times if device.type == "cpu" else _device_times
    return lambda: statistics.median(times(call.func, operands, results))


def _copy(tensor: Tensor) -> Tensor:
    """Another tensor with the same values and strides, those of 0 among them."""
    span = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _host_times(func: Any, operands: Sequence[Any], results: list[Any]) -> list[float]:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found: list[float] = []
    turns = itertools.cycle(enumerate(operands))
    calls, begin = 1, clock()
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        while True:
            start = clock()
            for place, (args, kwargs) in itertools.islice(turns, calls):
                # what the last round made here goes, as in a step, and that takes time too
                results[place] = func(*args, **kwargs)
            stop = clock()
            found.append((stop - start) / calls)
            if (len(found) >= REPEATS and stop - begin >= ENOUGH) or (len(found) >= 2 and stop - begin >= LONG):
                return found
            calls = max(calls, min(MANY, int(TICK / max(found[-1], 1e-7))))


def _device_times(func: Any, operands: Sequence[Any], results: list[Any]) -> list[float]:
    """Of an accelerator: between events in its queue, which is kept full, so that the host is not waited for."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    rounds = max(1, REPEATS // len(operands) + 1)
    blocker = torch.empty(1 << 26, device=device)
    found: list[float] = []
    begin = time.perf_counter()
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        while not found or time.perf_counter() - begin < ENOUGH:
            for _ in range(10):
                blocker.fill_(0.0)
            pairs = []
            for _ in range(rounds):
                for place, (args, kwargs) in enumerate(operands):
                    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
                    first.record()
                    results[place] = func(*args, **kwargs)
                    last.record()
                    pairs.append((first, last))
            torch.accelerator.synchronize()
            found += [first.elapsed_time(last) / 1000 for first, last in pairs]
    return found
