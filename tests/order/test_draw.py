"""Time tables as text."""

from __future__ import annotations

from tests.order.shapes import chain, interlaced_chain
from weft.order import Span, draw, make_schedule, simulate, table

EXPECTED = """\
0  F0 F1  .  . B0--- F2 B1---  . B2---
1   . F0 B0--- F1 B1--- F2 B2---  .  .
makespan 12, idle 25.0%, live 2 1"""


def test_table_of_1f1b() -> None:
    pipeline = chain(2, 3)
    assert table(pipeline, simulate(pipeline, make_schedule("1f1b", pipeline))) == EXPECTED


def test_wide_tables_are_cut() -> None:
    pipeline = chain(4, 64)
    text = table(pipeline, simulate(pipeline, make_schedule("gpipe", pipeline)), width=80)
    rows = text.splitlines()
    assert all(line.endswith("...") and len(line) <= 84 for line in rows[:4])
    assert rows[4].startswith("makespan 201")


def test_segments_of_one_device_have_letters() -> None:
    pipeline = interlaced_chain(2, 1)
    text = table(pipeline, simulate(pipeline, make_schedule("gpipe", pipeline)))
    assert text.splitlines()[0].startswith("0  Fa0 Fb0   . Fd0 Bd0")
    assert text.splitlines()[-1] == "a = embed, b = s0, c = s1, d = head"


def test_rows_end_together_and_colours_follow_micro_batches() -> None:
    pipeline = chain(3, 4)
    spans = {"s0": Span(0.5, 1, 0), "s1": Span(1, 1.5, 0), "s2": Span(0.5, 0.5, 0)}
    drawn = draw(pipeline, simulate(pipeline, make_schedule("1f1b", pipeline), spans), width=300)
    rows = drawn.plain.splitlines()[:3]
    assert len({len(line) for line in rows}) == 1
    styles = {drawn.plain[span.start : span.end].strip(" -"): str(span.style) for span in drawn.spans}
    assert styles["B1"].split()[-1] == styles["F1"].split()[-1] != styles["F2"].split()[-1]
