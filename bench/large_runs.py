"""Public numbers of large runs, and what Weft predicts of them.

    python -m bench.large_runs [--rows TEXT ...] [--out bench/results/large_runs.json]

For each row of `bench/large/rows.py`: the model is made without values, compiled for its plan, and a step is simulated
on its cluster. Told are seconds of a step by the source and by Weft, what the predicted step goes into on the rank that
computes most (by families of operators), exposed communication, waiting for stages and for the host, and how long
the prediction took. Nothing is judged here, and nothing is fitted.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.large.rows import NOT_YET, ROWS, Row
from bench.machine import machine
from weft.compile import compile_subject
from weft.compile.model_file import Subject, load_model_file
from weft.cost.cluster.names import cluster_of
from weft.cost.compute.families import family_of
from weft.simulate.engine import simulate
from weft.simulate.foresee import ClusterMachine, job_of
from weft.simulate.result import Simulation
from weft.simulate.timing import clocks_of
from weft.simulate.trace import Run

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "large_runs.json"


def subject_of(row: Row) -> Subject:
    """The model and batch of a row, without values."""
    subject = load_model_file(ROOT / "bench" / "large" / row.file, hollow=0)
    if not row.batch:
        return subject
    return replace(subject, example=tuple(one[:1].expand(row.batch, -1) for one in subject.example))


def predict(row: Row) -> dict[str, Any]:
    """One row of the result."""
    subject, cluster, begin = subject_of(row), cluster_of(row.cluster), time.perf_counter()
    compiled = compile_subject(subject, row.plan, cluster.size)
    made = time.perf_counter()
    job = job_of(compiled, subject, cluster)
    recorded = time.perf_counter()
    clock = ClusterMachine(cluster, clocks_of(cluster, compiled.devices))
    found = simulate(job, clock)
    played = time.perf_counter()
    capture = compiled.timings["capture"]
    return {
        **asdict(row),
        "predicted": found.seconds,
        "ratio": found.seconds / row.seconds,
        "tokens_per_second_and_device": found.tokens_per_second / compiled.devices,
        "mfu": found.mfu,
        "memory": found.memory,
        **goes_into(found, clock),
        "took": {
            "capture": capture,
            "compile": made - begin - capture,
            "record": recorded - made,
            "simulate": played - recorded,
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
    }


def goes_into(found: Simulation, clock: ClusterMachine) -> dict[str, Any]:
    """Of the rank that computes most: seconds by kind, and those of kernels by family."""
    rank = max(found.ranks, key=lambda one: one.busy)
    lane = found.lanes[found.ranks.index(rank)]
    known: dict[str, float] = {}
    families: dict[str, float] = {}
    for event in lane.events:
        if isinstance(event, Run):
            key = event.kernel.key
            if key not in known:
                known[key] = clock.seconds(rank.rank, event.kernel)
            family = family_of(event.kernel.op)
            families[family] = families.get(family, 0.0) + known[key]
    return {
        "compute": rank.busy,
        "exposed": rank.exposed,
        "bubble": rank.bubble,
        "host": rank.host,
        "families": dict(sorted(families.items(), key=lambda one: -one[1])),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table("run", "source says", "predicted", "ratio", "compute", "of it products", "exposed", "bubble", "host")
    for row in rows:
        parts = (row["compute"], row["families"].get("product", 0.0), row["exposed"], row["bubble"], row["host"])
        seconds = [f"{row['seconds']:.2f} s", f"{row['predicted']:.2f} s", f"{row['ratio']:.3f}"]
        shown.add_row(row["name"], *seconds, *(f"{part:.2f} s" for part in parts))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[""], help="those whose names contain one of these")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    before = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    known = {row["name"]: row for row in before}
    for row in ROWS:
        if any(part in row.name for part in options.rows):
            known[row.name] = predict(row)
            Console(width=160).print(table([known[row.name]]))
            rows = [known[one.name] for one in ROWS if one.name in known]
            told = {"machine": machine(), "rows": rows, "not_yet": [asdict(one) for one in NOT_YET]}
            options.out.write_text(json.dumps(told, indent=1) + "\n")
    Console(width=160).print(table([known[one.name] for one in ROWS if one.name in known]))


if __name__ == "__main__":
    main()
