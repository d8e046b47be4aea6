"""Schedule search: what the solver finds, against the named schedules, and its time with and without relations.

    PYTHONPATH=. python bench/schedules.py [--seconds 60] [--workers 1] [--out bench/results/schedules.json]

Nothing is begun from a named schedule here: the solver finds every schedule by itself. "1F1B" are the relations of
one forward, one backward; "3F1B" those of three passes. The bound is the least that any schedule takes. Times are of
this machine and this moment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.order.shapes import chain, interlaced_chain, nf1b_relations, one_f_one_b_relations, recycled
from weft.errors import PlanError
from weft.ir.schedule import Before, Pipeline
from weft.order import Span, make_schedule, simulate
from weft.order.search import Found, complete
from weft.order.task import kinds, lower_bound
from weft.order.timing import Spans


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    title: str
    pipeline: Pipeline
    spans: Spans
    named: str
    relations: tuple[Before, ...]


def cases() -> list[Case]:
    """1F1B on 4 and 8 stages, few and many micro-batches; three passes; the interlaced pipeline."""
    found = []
    for stages in (4, 8):
        for count in (16, 128):
            pipeline = chain(stages, count)
            found.append(Case("1F1B", pipeline, {}, "1f1b", one_f_one_b_relations(pipeline)))
    for stages, count in ((3, 6), (4, 8), (4, 128), (8, 128)):
        pipeline = recycled(stages, count)
        distance = 1 if stages < 8 else 2
        spans = {one.name: Span(1, 3, 0) for one in pipeline.segments}
        found.append(Case("3F1B", pipeline, spans, "nf1b", nf1b_relations(pipeline, distance=distance)))
    pipeline = interlaced_chain(4, 256)
    spans = {one.name: Span(1, 3, 0) if one.name.startswith("s") else Span(1, 1, 0) for one in pipeline.segments}
    return [*found, Case("interlaced", pipeline, spans, "interlaced", ())]


def search(case: Case, relations: Sequence[Before], options: argparse.Namespace) -> Found | None:
    try:
        return complete(
            case.pipeline,
            relations,
            spans=case.spans,
            seconds=options.seconds,
            workers=options.workers,
            named=False,
        )
    except PlanError:
        return None  # nothing in the time: the table says so


def measure(case: Case, options: argparse.Namespace) -> dict[str, object]:
    """One line: the named schedule, and both searches."""
    named = make_schedule(case.named, case.pipeline, spans=case.spans)
    row: dict[str, object] = {
        "schedule": case.title,
        "devices": len(case.pipeline.devices),
        "micro-batches": case.pipeline.microbatches,
        "bound": lower_bound(case.pipeline, kinds(case.pipeline, case.spans)),
        "named": simulate(case.pipeline, named, case.spans).makespan,
    }
    for column, relations in (("with", case.relations), ("free", ())):
        found = search(case, relations, options) if relations or column == "free" else None
        row[column] = found and found.makespan
        row[f"{column} s"] = found and round(found.seconds, 2)
        row[f"{column} by"] = found and found.method + ("" if not found.proven else ", shortest")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [measure(case, options) for case in cases()]
    table = Table(*rows[0], title="makespans, and seconds with relations and free", box=None)
    for row in rows:
        table.add_row(
            *(
                "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
                for value in row.values()
            )
        )
    Console(width=160).print(table)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
