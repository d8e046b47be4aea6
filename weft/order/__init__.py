"""Schedules of pipelines: made by pure functions, proven, timed, searched, drawn. Knows no model."""

from weft.order.check import check_schedule
from weft.order.draw import draw, table
from weft.order.names import NAMES, make_schedule
from weft.order.timing import Span, Timeline, peaks, simulate

__all__ = ["NAMES", "Span", "Timeline", "check_schedule", "draw", "make_schedule", "peaks", "simulate", "table"]
