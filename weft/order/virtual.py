"""Schedules over virtual stages: interleaved 1F1B, and the V-shaped zero-bubble schedule.

In: a Pipeline whose devices each hold several segments of one line: in rounds (0 1 2 3 0 1 2 3) for `interleaved`, down
and up (0 1 2 3 3 2 1 0) for `zb_v`. Out: a Schedule. Promised: any number of micro-batches. Both are made for the next
number that fills the rounds; what is too much is left out, which keeps every order valid.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import PlanError
from weft.ir.schedule import Event, Pipeline, Schedule, Segment


def interleaved(pipeline: Pipeline) -> Schedule:
    """Interleaved 1F1B: micro-batches in groups as large as there are stages pass all rounds, one group at a time.

    Narayanan et al., 2021: idle time (p - 1)(f + b) of a segment, v times less than 1F1B with the same stages.
    """
    rounds = _rounds(pipeline)
    stages, turns = len(rounds[0]), len(rounds)
    total = -(-pipeline.microbatches // stages) * stages
    rows: dict[int, tuple[Event, ...]] = {}
    for stage in range(stages):
        ahead = [
            (group + micro, turn)
            for group in range(0, total, stages)
            for turn in range(turns)
            for micro in range(stages)
        ]
        forward = [Event("f", rounds[turn][stage].name, micro) for micro, turn in ahead]
        backward = [Event("b", rounds[turns - 1 - turn][stage].name, micro) for micro, turn in ahead]
        # With one round this is 1F1B; further rounds run ahead by a group each, and twice per hop.
        warm = stages - stage - 1 if turns == 1 else (stages - stage - 1) * 2 + (turns - 1) * stages
        row = _kept(_alternate(forward, backward, min(warm, len(forward))), pipeline.microbatches)
        rows |= dict.fromkeys(rounds[0][stage].devices, row)
    return Schedule(rows)


def zb_v(pipeline: Pipeline) -> Schedule:
    """The V-shaped zero-bubble schedule: with f = b = w no device waits between its first and its last event.

    Qi et al., 2024 ("Pipeline parallelism with controllable memory" for the memory, "Zero bubble" for the order): as
    many live micro-batches as 1F1B keeps on its first stage, on every device.
    """
    down, up = _arms(pipeline)
    stages = len(down)
    total = max(2 * stages - 1, pipeline.microbatches)
    rows: dict[int, tuple[Event, ...]] = {}
    for stage in range(stages):
        row = _kept(_v_row(stage, stages, total, (down[stage].name, up[stage].name)), pipeline.microbatches)
        rows |= dict.fromkeys(down[stage].devices, row)
    return Schedule(rows)


def _alternate(forward: Sequence[Event], backward: Sequence[Event], warm: int) -> list[Event]:
    row = list(forward[:warm])
    for one, other in zip(forward[warm:], backward, strict=False):
        row += (one, other)
    return row + list(backward[len(forward) - warm :])


def _kept(row: Sequence[Event], microbatches: int) -> tuple[Event, ...]:
    return tuple(event for event in row if event.number < microbatches)


def _v_row(stage: int, stages: int, total: int, names: tuple[str, str]) -> list[Event]:
    """One device's events: warm up along the first arm, then both arms in turn, weight gradients last."""
    row: list[Event] = []
    count = {(phase, arm): 0 for phase in "fbw" for arm in (0, 1)}

    def run(*parts: tuple[str, int]) -> None:
        for phase, arm in parts:
            row.append(Event(phase, names[arm], count[phase, arm]))
            count[phase, arm] += 1

    for _ in range(2 * (stages - stage) - 1):
        run(("f", 0))
    for _ in range(stage):
        run(("f", 1), ("f", 0))
    for _ in range(stages - stage):
        run(("f", 1), ("b", 1), ("w", 1))
    while count["f", 1] < count["f", 0] or count["f", 0] < total:
        if count["f", 0] < total:
            run(("f", 0))
        run(("b", 0), ("w", 0), ("f", 1), ("b", 1), ("w", 1))
    for _ in range(stage):
        run(("b", 0), ("b", 1))
    for _ in range(stages - stage):
        run(("b", 0), ("w", 0))
    for arm in (1, 0):
        while count["w", arm] < count["b", arm]:
            run(("w", arm))
    return row


def _rounds(pipeline: Pipeline) -> list[tuple[Segment, ...]]:
    """The segments in rounds over the same device sets."""
    segments = _line(pipeline, "interleaved")
    first = segments[0].devices
    stages = next((i for i, one in enumerate(segments) if i and one.devices == first), len(segments))
    rounds = [segments[start : start + stages] for start in range(0, len(segments), stages)]
    same = all(
        len(one) == stages and all(a.devices == b.devices for a, b in zip(one, rounds[0], strict=True))
        for one in rounds
    )
    if not same or not _disjoint(rounds[0]):
        raise PlanError(
            f"interleaved needs rounds over the same stages, not segments on {_places(pipeline)}",
            remedy="place segment j of v * p on stage j % p, as virtual=v does",
        )
    return rounds


def _arms(pipeline: Pipeline) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The way down and, from the first device on, the way up."""
    segments = _line(pipeline, "zb-v")
    half = len(segments) // 2
    down, up = segments[:half], tuple(reversed(segments[half:]))
    fits = len(segments) % 2 == 0 and all(a.devices == b.devices for a, b in zip(down, up, strict=True))
    if not fits or not _disjoint(down):
        raise PlanError(
            f"zb-v needs a V: down the stages and up again, not segments on {_places(pipeline)}",
            remedy="place segment j and segment 2p - 1 - j of 2p on the same stage",
        )
    lacking = [one.name for one in segments if not one.splits]
    if lacking:
        raise PlanError(
            f"zb-v puts off weight gradients, and the backward of {lacking[0]!r} cannot be divided",
            remedy="use schedule=1f1b, or operators whose weight gradients can be put off (linear, embedding)",
        )
    return down, up


def _line(pipeline: Pipeline, name: str) -> tuple[Segment, ...]:
    frozen = [segment.name for segment in pipeline.segments if not segment.trains]
    if frozen:
        raise PlanError(
            f"{name} gives every segment a backward, and {frozen[0]!r} has no gradient",
            remedy="use schedule=1f1b, which takes any segments",
        )
    return pipeline.segments


def _disjoint(segments: Sequence[Segment]) -> bool:
    devices = [device for segment in segments for device in segment.devices]
    return len(set(devices)) == len(devices)


def _places(pipeline: Pipeline) -> str:
    return " ".join(",".join(map(str, one.devices)) for one in pipeline.segments)
