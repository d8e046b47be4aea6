"""Turns: sides that run in processes of their own and take steps one after the other, while all others sleep.

In: for each side a pool, and what its processes make a step from. Out: medians, in turn in the same run, and their
ratio. The first step of a turn does not count: what the system has taken from a process that slept comes back in it, as
never in a run of training. Every side's processes are as that side has them: how the C library keeps memory is a
setting of the process, and what suits one side may slow down the other.
"""

from __future__ import annotations

import math
import os
import resource
import select
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.runtime.jobs.launch import Pool
from weft.runtime.links.processes import ProcessTransport

TIMEOUT = 300.0
"""Seconds that a step may take."""
SETTLE = 0.5
"""Seconds in which the threads of torch's process group let go of their last tensors."""
COUNTED = 2
"""Steps of a turn that count."""
TURN, END = b"t", b"e"

Step = Callable[[], float]
Taken = dict[str, list[float]]
"""Of one process, step by step: `wall` and `busy` seconds, `losses`, `memory`: the most that was resident, in bytes."""


@dataclass
class Side:
    """A side: its pool, and the function of a module that its processes run (it calls `take_turns`) with a payload.

    `same`: it trains to the losses of the others."""

    pool: Pool
    entry: str
    payload: dict[str, Any]
    same: bool = True


@contextmanager
def torch_group(transport: ProcessTransport, meeting: str) -> Iterator[None]:
    """torch's own process group, beside ours."""
    torch.set_num_threads(1)
    ranks = {"rank": transport.rank, "world_size": transport.num_ranks}
    dist.init_process_group("gloo", init_method=Path(meeting).as_uri(), **ranks)
    yield
    # torch joins the backend's threads while it holds the interpreter's lock: one that still wants it would hang
    time.sleep(SETTLE)
    dist.destroy_process_group()


def take_turns(rank: int, payload: dict[str, Any], step: Step) -> Taken:
    """In a process: some steps whenever it is this side's turn."""
    taken: Taken = {"wall": [], "busy": [], "losses": [], "memory": []}
    with (
        _fifo(payload["turns"], rank, "go").open("rb", 0) as go,
        _fifo(payload["turns"], rank, "done").open("wb", 0) as done,
    ):
        while go.read(1) == TURN:
            taken["losses"].append(step())
            for _ in range(COUNTED):
                dist.barrier()
                start, busy = time.perf_counter(), time.process_time()
                taken["losses"].append(step())
                taken["wall"].append(time.perf_counter() - start)
                taken["busy"].append(time.process_time() - busy)
            taken["memory"].append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            done.write(TURN)
    return taken


def in_turn(ours: Side, theirs: Side, repeats: int, **others: Side) -> dict[str, float]:
    """Seconds of a step of all sides, and how ours is to theirs and to the others; losses must stay together."""
    sides = {"ours": ours, "theirs": theirs, **others}
    with ExitStack() as stack:
        runs = [_Run(side, stack) for side in sides.values()]
        # before the first turn, one that does not count
        for turn in range(1 + math.ceil(repeats / COUNTED)):
            for run in runs if turn % 2 else reversed(runs):
                run.turn()
        taken = dict(zip(sides, (run.end() for run in runs), strict=True))
    losses = [taken[name][0]["losses"] for name, side in sides.items() if side.same]
    apart = max(abs(a - b) for other in losses for a, b in zip(losses[0], other, strict=True))
    assert apart < 0.05, apart
    found = {name: _medians(side) for name, side in taken.items()}
    told = {name: one["wall"] for name, one in found.items()}
    told |= {f"peak_memory_of_{name}": one["memory"] for name, one in found.items()}
    for name, one in found.items():
        if name != "ours":
            to = "" if name == "theirs" else f"_to_{name}"
            told[f"ratio{to}"] = found["ours"]["wall"] / one["wall"]
            told[f"ratio_of_minima{to}"] = found["ours"]["least"] / one["least"]
            told[f"ratio_of_cpu_time{to}"] = found["ours"]["busy"] / one["busy"]
    return told


def _medians(side: Sequence[Taken]) -> dict[str, float]:
    """Of a side: seconds of a step, of its slowest process; of the fastest step; of the processor; bytes at most."""
    return {
        "wall": max(statistics.median(one["wall"][COUNTED:]) for one in side),
        "least": max(min(one["wall"]) for one in side),
        "busy": statistics.fmean(statistics.median(one["busy"]) for one in side),
        "memory": max(one["memory"][-1] for one in side),
    }


def over_rounds(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians over rounds, each with processes of its own, and the ratios of each."""
    ratios = {key: [one[key] for one in rounds] for key in rounds[0] if key.startswith("ratio") and "_of_" not in key}
    return {
        **{key: statistics.median(one[key] for one in rounds) for key in rounds[0]},
        **{f"{key} by round": found for key, found in ratios.items()},
    }


class _Run:
    """A side's processes at work."""

    def __init__(self, side: Side, stack: ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ranks = range(side.pool.num_ranks)
        for rank in ranks:
            for word in ("go", "done"):
                os.mkfifo(_fifo(folder, rank, word))
        # open for both: opening must not wait for a process that may never come
        self._go, self._done = (
            [os.open(_fifo(folder, rank, word), os.O_RDWR) for rank in ranks] for word in ("go", "done")
        )
        for number in (*self._go, *self._done):
            stack.callback(os.close, number)
        stack.enter_context(side.pool)
        thread = stack.enter_context(ThreadPoolExecutor(1))
        payload = {**side.payload, "turns": folder, "meeting": f"{folder}/meeting"}
        self._taken: Future[list[Taken]] = thread.submit(side.pool.run, side.entry, payload, timeout=TIMEOUT)

    def turn(self) -> None:
        """All of the side's processes take their steps."""
        for number in self._go:
            os.write(number, TURN)
        waiting = list(self._done)
        while waiting:
            ready, _, _ = select.select(waiting, [], [], 1.0)
            for number in ready:
                os.read(number, 1)
                waiting.remove(number)
            if self._taken.done():
                self._taken.result()
                raise AssertionError("a side ended before its last turn")

    def end(self) -> list[Taken]:
        for number in self._go:
            os.write(number, END)
        return self._taken.result()


def _fifo(folder: str, rank: int, word: str) -> Path:
    return Path(folder) / f"{word}{rank}"
