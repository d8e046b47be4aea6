"""True processes for verification, and how they compare with the emulator.

In: two Samples of one program. Out: the processes (they capture and plan nothing), and whether the two Samples are
equal bit for bit.

On gloo sums are added in group order, as in the emulator, and every bit is the same if operators run with as many
threads. NCCL adds in an order of its own: there the results agree to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from weft.errors import RunError
from weft.runtime.jobs.devices import Device
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.backend import BACKENDS
from weft.verify.compare import Processes, Sample, compare
from weft.verify.ranks import same_bits


def make_pool(
    num_ranks: int, *, processes: bool, device: Device | None, backend: str | None, timeout: float | None
) -> AbstractContextManager[Pool | None]:
    """Processes for verification, starting; none if ranks are emulated."""
    if not processes:
        if (device, backend, timeout) != (None, None, None):
            raise RunError(
                "a device, a backend or a timeout is asked for, and devices are emulated", remedy="add --processes"
            )
        return nullcontext()
    pool = Pool(num_ranks, device=device, backend=backend, timeout=timeout, preload=("weft.verify.generated",))
    pool.start()
    return pool


@contextmanager
def one_thread() -> Iterator[None]:
    """Run operators as the processes do: with how many threads one adds is part of the result."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare_with_emulator(processes: Sample, emulated: Sample, backend: str) -> Processes:
    """Are two runs of one Program equal bit for bit?"""
    worst = max(compare(processes, emulated), key=lambda found: found.value)
    if _same_samples(processes, emulated):
        return Processes(backend, equal_bits=True)
    why = "the operators' own arithmetic differs between a process and a thread; sums are added in the same order"
    if not BACKENDS[backend].host_waits:
        why = f"{backend} adds in an order of its own"
    return Processes(backend, False, worst.value, worst.tensor, why)


def _same_samples(a: Sample, b: Sample) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(same_bits(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(a.by_kind(), b.by_kind(), strict=True)
    )
