"""True processes for verification, and how they compare with the emulator.

In: two Samples of one program. Out: the processes (they capture and plan nothing), and whether the two Samples are
equal bit for bit.

On gloo sums are added in group order, as in the emulator, and every bit is the same if operators run with as many
threads. NCCL adds in an order of its own: there the results agree to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weft.runtime.jobs.launch import Pool
from weft.runtime.links.backend import choose_backend
from weft.verify.compare import Processes, Sample, compare
from weft.verify.ranks import same_bits


def make_pool(num_ranks: int) -> Pool:
    """Processes for verification, starting."""
    pool = Pool(num_ranks, preload=("weft.verify.generated",))
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


def compare_with_emulator(processes: Sample, emulated: Sample, num_ranks: int) -> Processes:
    """Are two runs of one Program equal bit for bit?"""
    backend = choose_backend(num_ranks)
    worst = max(compare(processes, emulated), key=lambda found: found.value)
    if _same_samples(processes, emulated):
        return Processes(backend.name, equal_bits=True)
    why = "the operators' own arithmetic differs between a process and a thread; sums are added in the same order"
    if backend.native_sums:
        why = f"{backend.name} adds in an order of its own"
    return Processes(backend.name, False, worst.value, worst.tensor, why)


def _same_samples(a: Sample, b: Sample) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(same_bits(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(a.by_kind(), b.by_kind(), strict=True)
    )
