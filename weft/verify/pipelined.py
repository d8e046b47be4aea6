"""A pipeline against one device, and what its files tell of it.

In: a plan in pieces (pieces.py), compiled, or what `pipeline.json` says. Out: the verdict; the Pipeline and Schedule
that the files run, to be proven again, since a person may have edited them; numbers about both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from weft.cache import write_files
from weft.ir.graph import Graph
from weft.ir.schedule import Event, Pipeline, Schedule, Segment, row
from weft.ops.coverage import coverage, unruled_warnings
from weft.order import Span, check_schedule, simulate
from weft.runtime.launch import Pool
from weft.runtime.pipeline_files import cut_in_pieces, read_pipeline
from weft.verify.compare import Result
from weft.verify.judged import Say, judge_code
from weft.verify.model_file import Subject
from weft.verify.optimizer import check_on_parts
from weft.verify.pieces import InPieces


def judge_pieces(
    made: InPieces, subject: Subject, *, seed: int, tolerance: float, say: Say, pool: Pool | None = None
) -> Result:
    """Run both sides and compare them; on the processes of `pool` if there is one."""
    with written(made.files()) as directory:
        # one without backward may be made, and is none to train by
        check_schedule(*order_of(read_pipeline(directory)))
        check_on_parts(subject, cut_in_pieces(directory))
        result = judge_code(directory, made.whole, subject, seed=seed, tolerance=tolerance, say=say, pool=pool)
        return replace(result, summary=summarize_pieces(read_pipeline(directory), made.whole))


@contextmanager
def written(files: Mapping[str, bytes]) -> Iterator[Path]:
    """A directory with the pipeline's files, while it is needed."""
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        write_files(Path(folder), files)
        yield Path(folder)


def order_of(told: Mapping[str, Any]) -> tuple[Pipeline, Schedule]:
    """The Pipeline and the Schedule of what is written about a program in pieces."""
    segments = []
    for one in told["sizes"][0]["pieces"]:
        devices, reads = tuple(one["devices"]), tuple(one["reads"])
        segments.append(Segment(one["name"], devices, reads, trains=one["trains"], splits=one["splits"]))
    events = {
        int(device): tuple(Event(phase, piece, int(micro)) for phase, piece, micro in row)
        for device, row in told["events"].items()
    }
    return Pipeline(tuple(segments), len(told["size_of"])), Schedule(events)


def spans_in(told: Mapping[str, Any]) -> dict[str, Span]:
    """How long the phases of each piece take, as was estimated when it was made."""
    return {name: Span(*times) for name, times in told["spans"].items()}


def summarize_pieces(told: Mapping[str, Any], graph: Graph) -> dict[str, Any]:
    """Numbers about a pipeline."""
    pipeline, schedule = order_of(told)
    return {
        "operators": len(graph.ops),
        "axes": {},
        "whole": [],
        "warnings": unruled_warnings(coverage(graph).kinds) if told["devices"] > 1 else [],
        "pieces": [asdict(segment) for segment in pipeline.segments],
        "microbatches": pipeline.microbatches,
        "schedule": {str(device): row(events) for device, events in sorted(schedule.events.items())},
        "idle": simulate(pipeline, schedule).idle,
        "idle_estimated": simulate(pipeline, schedule, spans_in(told)).idle,
    }
