"""What watching costs: steps of the smallest example on two processes, watched and not, in turns.

    python bench/watching.py [--pairs 1000] [--out bench/results/watching.json]

Watching is what a step does besides the step so that nothing goes wrong in silence: arguments are brought into the form
of the example, modes of submodules, parameters, hooks, autocast and what forward reads are looked at, forwards and
updates are counted, and gradients are remembered. In every other block of steps both processes leave all of that out.
What a watched step has looked at of its parameters its program does not look at again (`leaf_aliases.py`); one that is
not watched does so itself, and that is part of its time. A block without watching runs as another class, made once:
attributes that come and go would let Python look all of them up again, also in the blocks that are watched.
Told are the medians, and the median of the ratios of blocks that follow each other, with the interval that holds the
true one with 95%. The thread that tells other processes what this one does runs in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "watching.json"
MODEL, PLAN = ROOT / "examples" / "mlp.py", "dp=2"
BLOCK = 20
"""Steps: few, so that what else the machine does falls on both blocks of a pair alike."""


def class_without(parallel: Any) -> type:
    """The class of a parallel module whose steps are not watched."""

    class Unwatched(type(parallel)):  # type: ignore[misc]
        modes = parallel.modes

        def refuse_surroundings(self, flow: Any = None) -> None:
            return None

        def begin_training(self, inputs: Any, *, compare: bool) -> None:
            return None

    return Unwatched


@contextmanager
def unwatched(parallel: Any, without: type) -> Iterator[None]:
    """Steps are made without being watched."""
    from weft.runtime.checks import guards  # noqa: PLC0415 - a rank's

    kept, kind = [], type(parallel)
    for hooks in (guards._global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        kept += [(hooks, key, hook) for key, hook in hooks.items() if hook in (guards.before_step, guards.after_step)]
    held = {name: parallel.__dict__[name] for name in ("_remember", "calling", "_looks")}
    parallel.__dict__.update(_remember=None, calling=None, _looks={})
    for hooks, key, _ in kept:
        del hooks[key]
    become(parallel, without)
    try:
        yield
    finally:
        become(parallel, kind)
        parallel.__dict__.update(held)
        for hooks, key, hook in kept:
            hooks[key] = hook


def become(parallel: Any, kind: type) -> None:
    """Its class in truth: `__class__` is what it shows."""
    object.__dict__["__class__"].__set__(parallel, kind)


def run_rank(transport: Any, order: tuple[Any, int]) -> list[tuple[float, float]]:
    """In each process: seconds of a step in each pair of blocks, watched and not."""
    from weft.compile.model_file import load_model_file  # noqa: PLC0415
    from weft.train.opened import open_rank  # noqa: PLC0415

    files, pairs = order
    subject = load_model_file(MODEL)
    parallel = open_rank(files, transport, subject.model, surface=surface(subject))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)

    def block() -> float:
        start = time.perf_counter()
        for _ in range(BLOCK):
            optimizer.zero_grad(set_to_none=True)
            parallel(**subject.example).backward()
            optimizer.step()
        return (time.perf_counter() - start) / BLOCK

    without = class_without(parallel)

    def other() -> float:
        with unwatched(parallel, without):
            return block()

    block(), other()
    found = []
    for pair in range(pairs):
        first, second = (block, other) if pair % 2 == 0 else (other, block)
        one, two = first(), second()
        found.append((one, two) if pair % 2 == 0 else (two, one))
    return found


def surface(subject: Any) -> Any:
    """What the original shows."""
    from weft.capture.example import split_example  # noqa: PLC0415
    from weft.runtime.program.surface import surface_of  # noqa: PLC0415

    return surface_of(subject.model, lambda: subject.model, split_example(subject.example))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    from bench.ab import ratio  # noqa: PLC0415 - loads torch: --help should not
    from bench.machine import machine  # noqa: PLC0415
    from weft.compile import compile_subject  # noqa: PLC0415
    from weft.compile.model_file import load_model_file  # noqa: PLC0415
    from weft.runtime.jobs.launch import Pool  # noqa: PLC0415

    files = dict(compile_subject(load_model_file(MODEL), PLAN).files)
    with Pool(2, preload=(__name__,)) as pool:
        ranks = pool.run(run_rank, (files, options.pairs))
    pairs = [tuple(map(max, zip(*each, strict=True))) for each in zip(*ranks, strict=True)]
    watched, bare = (statistics.median(one[at] for one in pairs) for at in (0, 1))
    found = ratio([one / two for one, two in pairs])
    print(f"a step: watched {watched * 1e6:.0f} us, not watched {bare * 1e6:.0f} us")
    print(f"ratio {found.median:.4f} ({found.low:.4f} to {found.high:.4f}), {len(pairs)} pairs of {BLOCK} steps")
    told = {"watched": watched, "not watched": bare, "ratio": vars(found), "pairs": pairs}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine(plan=PLAN), "found": told}, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from bench.watching import main as run  # the processes look for this module by its name

    run()
