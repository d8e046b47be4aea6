"""One run of one side of `bench/ab.py`: a fresh process that measures a workload with the Weft that it finds.

    python ab_side.py WORKLOAD OUT

In: PYTHONPATH says which revision's Weft this is. Out: a JSON file with the seconds of the workload. Every revision
must be able to run this file, so it uses public names alone, and lies beside `gpt.py` in a folder of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt import Sizes, example, model

import weft

SIZES = Sizes(layers=4, width=192, heads=4, length=64, vocabulary=2048, batch=4)
DEEP = Sizes(layers=32, width=64, heads=4, length=32, vocabulary=256, batch=4)
WARM_UP, STEPS = 4, 24
STEP_PLANS = {
    "one device": "dp=1",
    "dp=2": "dp=2",
    "tp=2": "tp=2",
    "zero=3": "dp=2,zero=3",
    "zero=1": "dp=2,zero=1",
    "pp=2": "pp=2,microbatches=4",
}
VERIFY, COMPILE = "verify gpt-2", "compile 32 layers"
WORKLOADS = (*STEP_PLANS, VERIFY, COMPILE)


def steps(plan: str) -> float:
    """The median step of training, of this rank."""
    batch = example(sizes=SIZES)
    parallel: Any = weft.parallelize(model(SIZES), batch, plan, cache=None)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        if plan.startswith("pp"):
            parallel.train_step(batch, optimizer)
            return
        optimizer.zero_grad(set_to_none=True)
        parallel(*batch).backward()
        optimizer.step()

    return statistics.median([timed(step) for _ in range(WARM_UP + STEPS)][WARM_UP:])


def verify() -> float:
    """`weft verify` of GPT-2, in this process: what it says is not shown, and it must say that all is equal."""
    import transformers  # noqa: F401, PLC0415 - not part of what is measured

    from weft.cli import main  # noqa: PLC0415 - only this workload needs it

    file = str(Path(__file__).with_name("gpt2.py"))
    said = io.StringIO()

    def run() -> None:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(["verify", file, "--plan", "dp=2,tp=2"])
        assert code == 0, said.getvalue()

    return timed(run)


def compiling() -> float:
    """Seconds from a module to the files of its program."""
    from weft.compile import compile_program  # noqa: PLC0415 - only this workload needs it

    module, batch = model(DEEP), example(sizes=DEEP)
    return timed(lambda: compile_program(module, batch, "dp=2,tp=2"))


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    workload, out = sys.argv[1:]
    torch.set_num_threads(1)
    if workload in STEP_PLANS:
        seconds = steps(STEP_PLANS[workload])
    else:
        seconds = {VERIFY: verify, COMPILE: compiling}[workload]()
    Path(out).write_text(json.dumps({"seconds": seconds, "weft": str(Path(weft.__file__).parents[1])}))


if __name__ == "__main__":
    main()
