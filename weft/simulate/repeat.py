"""Repeats: of a pipeline with many micro-batches, some are run, and the events of the others are copies.

In: the pipeline of a rank whose step is recorded. Out: the same events as if all micro-batches had run. Run are the
first micro-batches, which make gradients and what these are added up in, the third, to which the others are alike, and
those whose backward is the last of a piece, which begin what travels at the end of a step. Micro-batches of other sizes
are all run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.runtime.training.pipeline import B, F, Rank
from weft.runtime.training.pipeline import Event as Phase
from weft.simulate.trace import Event, Post, Take

FIRST = 3
"""Micro-batches that are run; the last of them is what the others are like."""
MICRO = re.compile(r"micro-batch \d+$")


def repeat(rank: Rank, events: list[Event]) -> None:
    """From now on the rank runs some micro-batches only.

    Args:
        events: to which what is run is noted, and what is not is copied.
    """
    real = micros_to_run(rank.events)
    if real is None or len(rank.sizes) > 1:
        return
    run, model = rank.run_event, real[FIRST - 1]
    known: dict[tuple[str, str], list[Event]] = {}
    expected = False

    def run_event(event: Phase, share: Any, piece: Any, *rest: Any) -> None:
        nonlocal expected
        if not expected:
            expected = True
            for name, one in share.pieces.items():
                count = len({each.micro for each in rank.events if each.piece == name and each.phase == B} & set(real))
                one.module.grad_sync.expect(count)
        if event.micro not in real:
            events.extend(for_micro(known[event.phase, event.piece], event.micro))
            if event.phase == F and model in rank._losses:
                rank._losses.setdefault(event.micro, rank._losses[model])
            return
        start = len(events)
        run(event, share, piece, *rest)
        if event.micro == model:
            known[event.phase, event.piece] = events[start:]

    vars(rank)["run_event"] = run_event


def micros_to_run(events: Sequence[Phase]) -> tuple[int, ...] | None:
    """The micro-batches to run, the first ones in front; None: all."""
    order = list(dict.fromkeys(one.micro for one in events if one.phase == F))
    last = {one.piece: one.micro for one in events if one.phase == B}
    first = order[:FIRST]
    real = (*first, *sorted({*last.values()} - {*first}))
    if len(real) >= len(order):
        return None
    seen: set[tuple[str, str]] = set()
    for one in events:
        if one.micro == first[-1]:
            seen.add((one.phase, one.piece))
        elif one.micro not in real and (one.phase, one.piece) not in seen:
            # it comes before the one that it is alike to
            return None
    return real


def for_micro(events: Sequence[Event], micro: int) -> list[Event]:
    """The same, of another micro-batch."""
    words = f"micro-batch {micro}"
    return [replace(one, tag=MICRO.sub(words, one.tag)) if isinstance(one, Post | Take) else one for one in events]
