"""Time of each pass of the compiler, and of one emulated step, on the small GPT of the examples.

    python bench/passes.py [RECIPE ...]

Prints a table; the numbers are of this machine and this moment. Nothing is judged.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from weft.codegen import generate
from weft.compile.subject import capture_subject, make_plan, make_subject
from weft.lower import lower
from weft.lower.check import check
from weft.verify.generated import run_generated
from weft.verify.reference import run_reference

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"


def timed(times: dict[str, float], name: str, function: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = function()
    times[name] = time.perf_counter() - start
    return result


def measure(recipe: str) -> dict[str, float]:
    """Seconds by pass."""
    times: dict[str, float] = {}
    subject = make_subject(EXAMPLE, None)
    graph = timed(times, "capture", lambda: capture_subject(subject))
    plan = timed(times, "plan", lambda: make_plan(recipe, graph, subject, None))
    program = timed(times, "lower", lambda: lower(plan))
    timed(times, "check", lambda: check(program))
    files = timed(times, "emit", lambda: generate(program))
    timed(times, "two steps, one device", lambda: run_reference(subject, seed=0, wide=True))
    emulated = f"two steps, {plan.devices} emulated"
    timed(times, emulated, lambda: run_generated(files, graph, subject, seed=0, wide=True))
    return times


def main() -> None:
    torch.set_num_threads(1)
    capture_subject(make_subject(EXAMPLE, None))  # the first capture pays for torch's own imports
    for recipe in sys.argv[1:] or ["dp=2", "tp=2", "dp=2,tp=2"]:
        table = Table("pass", "seconds", title=recipe, box=None)
        for name, seconds in measure(recipe).items():
            table.add_row(name, f"{seconds:.3f}")
        Console().print(table)


if __name__ == "__main__":
    main()
