"""Predicted against measured: step time and memory of plans on this machine.

    python bench/predict.py [--models gpt llama mlp resnet] [--ranks 1 2] [--out bench/results/predict.json]

For each model first the profile is taken, in this run: the kernels that its plans' steps need and nobody has measured
yet, and what communication costs. Then each plan is predicted, and trained on processes. Told are seconds of a step
(measured: the median of steps, of the slowest rank, over several runs in turns) and the most bytes of live tensors that
a rank holds; the errors' median and largest; and whether plans of one model come in the predicted order wherever they
differ by more than 8%. Nothing is judged here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.machine import machine
from weft.compile import Compiled, compile_subject
from weft.compile.model_file import Subject, load_model_file
from weft.cost.cluster.detect import cpu_cluster
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.processes import ProcessTransport
from weft.simulate.foresee import Forecast, foresee
from weft.simulate.timing import clocks_of, measure_here
from weft.train.loop import open_subject, optimizer_of
from weft.train.memory.measured import Measuring, measure

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "predict.json"
MODELS = ("gpt", "llama", "mlp", "resnet")
PLANS = {
    1: ("dp=1", "recompute", "coshard=2"),
    2: ("dp=2", "tp=2", "dp=2,zero=3", "pp=2,microbatches=4", "dp=2,recompute", "dp=2,coshard=2"),
    4: ("dp=4", "dp=2,tp=2", "tp=4", "dp=4,zero=3", "dp=2,pp=2,microbatches=4"),
}
WARM_UP, STEPS, ROUNDS = 4, 16, 3
CLOSE = 0.08
"""Plans whose measured times differ by less have no order."""


@dataclass(frozen=True)
class Row:
    """One plan of a model."""

    model: str
    plan: str
    ranks: int
    predicted: float
    measured: float
    predicted_memory: int
    measured_memory: int
    runs: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_memory / self.measured_memory - 1


def step_times(transport: ProcessTransport, order: Measuring) -> float:
    """The median step of this rank."""
    subject = load_model_file(order.origin, hollow=0)
    module = open_subject(order.files, transport, subject)
    optimizer = optimizer_of(subject, module)
    found = []
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        module.train_step(subject.example, optimizer)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[WARM_UP:])


def rows_of(name: str, ranks: int, profile: Path, bar: Any) -> list[Row]:
    """All plans of a model on so many ranks."""
    file = ROOT / "bench" / "predicted" / f"{name}.py"
    subject, cluster = load_model_file(file), cpu_cluster(ranks)
    made = {plan: compile_subject(subject, plan) for plan in PLANS[ranks]}
    for plan, compiled in made.items():
        bar(f"{name}, {plan}: profile")
        refused = measure_here(compiled, subject, cluster, profile)
        if refused:
            bar(f"{name}, {plan}: {len(refused)} kernels cannot be measured")
    clocks = clocks_of(cluster, ranks, profile)
    predicted = {plan: foresee(compiled, subject, cluster, clocks, name=plan) for plan, compiled in made.items()}
    measured = times_of(file, made, bar)
    return [_row(name, ranks, subject, made[plan], predicted[plan], measured[plan]) for plan in made]


def times_of(file: Path, made: dict[str, Compiled], bar: Any) -> dict[str, list[float]]:
    """Steps of all plans, in turns, each in processes of its own."""
    found: dict[str, list[float]] = {plan: [] for plan in made}
    for number in range(ROUNDS):
        for plan, compiled in made.items():
            bar(f"{file.stem}, {plan}: steps, {number + 1} of {ROUNDS}")
            with Pool(compiled.devices) as pool:
                found[plan].append(max(pool.run("bench.predict:step_times", Measuring(str(file), compiled.files))))
    return found


def _row(name: str, ranks: int, subject: Subject, compiled: Compiled, one: Forecast, runs: Sequence[float]) -> Row:
    held = max(each.peak for each in measure(subject.origin or str(subject.path), compiled.files))
    predicted = max(rank.memory.peak for rank in one.simulation.ranks)
    seconds = one.simulation.seconds
    return Row(name, one.plan, ranks, seconds, statistics.median(runs), predicted, held, tuple(runs))


def orders(rows: Sequence[Row]) -> tuple[int, int]:
    """Pairs of plans of one model on as many ranks that differ, and how many of them come in the predicted order."""
    pairs = [
        (a, b)
        for a, b in combinations(rows, 2)
        if (a.model, a.ranks) == (b.model, b.ranks) and abs(a.measured / b.measured - 1) > CLOSE
    ]
    return len(pairs), sum((a.measured < b.measured) == (a.predicted < b.predicted) for a, b in pairs)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    errors = [abs(row.error) for row in rows]
    pairs, right = orders(rows)
    memory = [abs(row.memory_error) for row in rows]
    return {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "pairs": pairs,
        "pairs_in_order": right,
        "worst_memory_error": max(memory),
    }


def table(rows: Sequence[Row]) -> Table:
    shown = Table("model", "ranks", "plan", "predicted", "measured", "error", "memory error")
    for row in rows:
        times = [f"{1e3 * one:.1f} ms" for one in (row.predicted, row.measured)]
        shown.add_row(row.model, str(row.ranks), row.plan, *times, f"{row.error:+.1%}", f"{row.memory_error:+.2%}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=tuple(PLANS), default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    about = machine()
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(options.models) * len(options.ranks))
        for ranks in options.ranks:
            for name in options.models:
                rows += rows_of(
                    name, ranks, Path(folder) / "profile.db", lambda text: progress.update(task, description=text)
                )
                progress.advance(task)
    found = {str(ranks): summary([row for row in rows if row.ranks == ranks]) for ranks in options.ranks}
    Console(width=120).print(table(rows))
    Console().print(found)
    told = [{**vars(row), "error": row.error, "memory_error": row.memory_error} for row in rows]
    options.out.write_text(json.dumps({"machine": about, "summary": found, "rows": told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
