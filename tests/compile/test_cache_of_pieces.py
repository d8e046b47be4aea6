"""Programs in pieces in the cache: found again by content, edits kept and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.compile import compile_subject
from weft.compile.model_file import load_model_file
from weft.ir.graph import Graph
from weft.ir.schedule import Pipeline, Schedule
from weft.order import make_schedule
from weft.plan.plan import Plan
from weft.plan.select import select
from weft.runtime.program.files import PROGRAM

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlp.py"
PLAN = "pp=2,microbatches=5"
"""Twelve rows in five: micro-batches of two sizes."""


def test_a_second_one_is_found(tmp_path: Path) -> None:
    subject = load_model_file(EXAMPLE)
    first = compile_subject(subject, PLAN, folder=tmp_path)
    second = compile_subject(load_model_file(EXAMPLE), PLAN, folder=tmp_path)
    assert first.pieces is not None and second.pieces is None and "from the cache" in str(second)
    assert first.directory == second.directory and not second.edited
    assert second.files == first.files and "piece0-size1/program.py" in second.files and PROGRAM in second.files


@pytest.mark.parametrize("plan", ["pp=2,microbatches=4", "pp=2,microbatches=5,schedule=gpipe", "microbatches=5"])
def test_other_plans_are_others(tmp_path: Path, plan: str) -> None:
    subject = load_model_file(EXAMPLE)
    first = compile_subject(subject, PLAN, folder=tmp_path)
    other = compile_subject(subject, plan, folder=tmp_path)
    assert other.directory != first.directory and other.pieces is not None


def test_what_only_micro_batches_do_counts(tmp_path: Path) -> None:
    """The graph of the whole batch is the same, that of a micro-batch is not."""
    text = EXAMPLE.read_text()
    found = []
    for number, times in enumerate((2, 3)):
        path = tmp_path / f"{number}" / "mlp.py"
        path.parent.mkdir()
        path.write_text(text.replace(".square().mean()", f".square().mean() * (1 if len(x) > 6 else {times})"))
        found.append(compile_subject(load_model_file(path), PLAN, folder=tmp_path / "cache"))
    assert found[0].directory != found[1].directory


def test_an_edited_piece_is_kept_and_told(tmp_path: Path) -> None:
    subject = load_model_file(EXAMPLE)
    first = compile_subject(subject, PLAN, folder=tmp_path)
    assert first.directory is not None
    path = first.directory / "piece0" / "program.py"
    path.write_text(path.read_text() + "# mine\n")
    second = compile_subject(subject, PLAN, folder=tmp_path)
    assert second.edited and second.files["piece0/program.py"].endswith(b"# mine\n")


def test_the_order_of_a_function_is_content(tmp_path: Path) -> None:
    subject = load_model_file(EXAMPLE)

    def ordered(name: str) -> Path | None:
        def order(pipeline: Pipeline) -> Schedule:
            return make_schedule(name, pipeline)

        def plan(graph: Graph) -> Plan:
            first, last = ([op.name for op in graph.ops[:2]], [op.name for op in graph.ops[2:]])
            staged = Plan(graph, 2).cut_batch(4).stage("a", select(graph, first), [0])
            return staged.stage("b", select(graph, last), [1]).order(order)

        return compile_subject(subject, plan, folder=tmp_path).directory

    first = ordered("gpipe")
    assert first is not None and ordered("gpipe") == first and ordered("1f1b") != first
