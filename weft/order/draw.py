"""Time tables in the terminal: a row for each device, or for devices that run the same events, coloured by
micro-batch, with the idle share.

In: a Pipeline and a Timeline of it. Out: text, plain (`table`) or for rich (`draw`). Promised: the same between runs; a
cell is the shortest event (what is 20 times shorter than the longest is left out); what does not fit in the width is
cut off and said so. Where a device holds several segments their letters stand behind the phase (`Fb3`), and a last line
names them.

    0  F0 F1 F2 F3  .  .  . B0-- F4 ...
    1   . F0 F1 F2  . B0-- F3 B1-- ...
    makespan 33, idle 27.3%, live 4 3 2 1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import ascii_lowercase

from rich.text import Text

from weft.ir.schedule import Event, Pipeline
from weft.order.timing import Timeline, peaks

COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green", "bright_yellow")
TINY = 20
BOLD_PHASE = {"f": "", "b": "bold ", "w": "dim "}


def table(pipeline: Pipeline, timeline: Timeline, *, width: int = 120) -> str:
    """The time table as plain text."""
    return draw(pipeline, timeline, width=width).plain


def draw(pipeline: Pipeline, timeline: Timeline, *, width: int = 120) -> Text:
    """The time table with colours, for `rich.console.Console.print`."""
    letters = _letters(pipeline)
    labels = {event: _label(event, letters) for event in timeline.starts}
    cell = max(map(len, labels.values())) + 1
    rows = _rows(timeline)
    head = max(map(len, rows.values())) + 1
    unit = _unit(timeline)
    columns = max((width - head) // cell, 1)
    text = Text(no_wrap=True)
    for device, devices in rows.items():
        text.append(f"{devices:<{head}}", style="bold")
        for piece, style in _row(timeline, device, labels, (unit, cell, columns)):
            text.append(piece, style=style)
        text.append("\n")
    text.append(_foot(pipeline, timeline, rows))
    if letters:
        text.append("\n" + ", ".join(f"{letter} = {name}" for name, letter in letters.items()))
    return text


def window(rows: Mapping[int, Sequence[Event]], marked: Sequence[Event], *, around: int = 3) -> str:
    """The devices' sequences near some events, which stand in brackets: where a schedule is wrong."""
    lines = []
    for device, row in sorted(rows.items()):
        places = [number for number, event in enumerate(row) if event in marked]
        if not places:
            continue
        first, last = max(places[0] - around, 0), min(places[-1] + around + 1, len(row))
        shown = [f"[{event}]" if event in marked else str(event) for event in row[first:last]]
        if len(shown) > 4 * around + 2:
            shown = [*shown[: 2 * around + 1], "...", *shown[-2 * around - 1 :]]
        left, right = "... " if first else "", " ..." if last < len(row) else ""
        lines.append(f"  device {device}: {left}{' '.join(shown)}{right}")
    return "\n".join(lines)


def _row(
    timeline: Timeline, device: int, labels: Mapping[Event, str], scale: tuple[float, int, int]
) -> Iterator[tuple[str, str]]:
    unit, cell, columns = scale
    now = 0
    for event in timeline.schedule.events[device]:
        start, end = max(round(timeline.starts[event] / unit), now), round(timeline.ends[event] / unit)
        if start >= columns:
            yield f"{'.':>{cell}}" * (columns - now) + " ...", "dim"
            return
        yield f"{'.':>{cell}}" * (start - now), "dim"
        length = max(min(end, columns) - start, 0)
        yield " " + f"{labels[event]:-<{length * cell - 1}}" if length else "", _style(event)
        now = max(end, now)
        if now > columns:
            yield " ...", "dim"
            return
    last = min(round(timeline.makespan / unit), columns)
    yield f"{'.':>{cell}}" * (last - now), "dim"


def _style(event: Event) -> str:
    return BOLD_PHASE[event.phase] + COLORS[event.number % len(COLORS)]


def _unit(timeline: Timeline) -> float:
    """The shortest event that is not tiny; times are drawn in whole ones."""
    spans = [timeline.ends[event] - start for event, start in timeline.starts.items()]
    most = max(spans)
    return min((span for span in spans if span * TINY >= most > 0), default=1)


def letters_of(names: Iterable[str]) -> dict[str, str]:
    """A letter (or two) for each name."""
    codes = [*ascii_lowercase, *(a + b for a in ascii_lowercase for b in ascii_lowercase)]
    return dict(zip(names, codes, strict=False))


def _letters(pipeline: Pipeline) -> dict[str, str]:
    """A letter (or two) per segment; none where each device has one segment."""
    if all(len(pipeline.on(device)) == 1 for device in pipeline.devices):
        return {}
    return letters_of(segment.name for segment in pipeline.segments)


def _label(event: Event, letters: Mapping[str, str]) -> str:
    return f"{event.phase.upper()}{letters.get(event.segment, '')}{event.micro}"


def _rows(timeline: Timeline) -> dict[int, str]:
    """The first device of each row, and the row's name: `0`, `0-1`, `0,2` where several devices run the same events."""
    same: dict[tuple[Event, ...], list[int]] = {}
    for device, events in sorted(timeline.schedule.events.items()):
        same.setdefault(tuple(events), []).append(device)
    return {devices[0]: _named(devices) for devices in same.values()}


def _named(devices: Sequence[int]) -> str:
    follow = len(devices) > 1 and list(devices) == list(range(devices[0], devices[-1] + 1))
    return f"{devices[0]}-{devices[-1]}" if follow else ",".join(map(str, devices))


def _foot(pipeline: Pipeline, timeline: Timeline, rows: Mapping[int, str]) -> str:
    found = peaks(pipeline, timeline.schedule)
    live = " ".join(f"{found[device]:g}" for device in rows)
    return f"makespan {timeline.makespan:g}, idle {timeline.idle:.1%}, live {live}"
