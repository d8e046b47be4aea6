"""Profile: how long kernels take by what was measured, kept in a database.

In: a Device, a file. Out: seconds of a kernel: as measured; else by measured kernels of the same call at other sizes;
else by the roofline, as far off as it is for measured kernels of the same family.

Promised: a time is found only for what it was measured for: the device by name, the version of torch, the format of
keys, the number of processes that compute at once and their threads are all part of what it is kept under. The file may
be used by several processes at once; what others add is seen by `missing`, and by `seconds` after `refresh`, so that a
prediction does not change while it is made. A file that is none of these databases, or one of another layout, is
refused and left as it is.
"""

from __future__ import annotations

import math
import os
import sqlite3
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weft.cost.compute.device import Device
from weft.cost.compute.families import family_of
from weft.cost.compute.kernel import FORMAT, Kernel, structure
from weft.cost.compute.roofline import Roofline
from weft.errors import WeftError

APPLICATION, LAYOUT = 0x57454654, 1
"""What SQLite keeps in the head of the file: that it is Weft's, and which tables it has."""
HEAD = ("application_id", "user_version")
BUSY = 30.0
"""Seconds to wait while another process writes."""
TABLES = (
    "CREATE TABLE IF NOT EXISTS kernels (place TEXT, key TEXT, op TEXT, dtype TEXT, flops INTEGER, bytes INTEGER,"
    " elements INTEGER, seconds REAL, at REAL, PRIMARY KEY (place, key)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS numbers (place TEXT, name TEXT, value REAL, at REAL, PRIMARY KEY (place, name))"
    " WITHOUT ROWID",
)
ANEW = "move it away, and measure again: weft profile"


def default_path() -> Path:
    """In the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # what is not absolute is to be ignored, says the standard
    base = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "weft" / "profile.db"


@dataclass(frozen=True)
class _Line:
    """Measured kernels of one call at several sizes: work and seconds, by work."""

    work: tuple[float, ...]
    seconds: tuple[float, ...]
    kernels: tuple[Kernel, ...]


@dataclass
class _Known:
    """What was read."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    lines: Mapping[str, _Line] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    """By family, how many times longer than the roofline says."""


class Profile:
    """Times by what was measured.

    Args:
        device: on which; of what was not measured its roofline speaks.
        path: of the database, in the user's cache if not given.
        processes: that compute at the same time on that device's host. threads: of each.
        torch_version: with which the times were, or will be, measured.
    """

    def __init__(
        self,
        device: Device,
        path: Path | None = None,
        *,
        processes: int = 1,
        threads: int = 1,
        torch_version: str = torch.__version__,
    ) -> None:
        self.device, self.roofline = device, Roofline(device)
        self.processes, self.threads = processes, threads
        self.path = default_path() if path is None else path
        self.place = f"{device.name}|torch {torch_version}|format {FORMAT}|processes {processes}|threads {threads}"
        """What times are kept under, beside the key."""
        with self._opened():
            pass
        self.refresh()

    def seconds(self, kernel: Kernel) -> float:
        """Of one call: measured, between measured ones, or by the roofline, in this order."""
        found = self._known.seconds.get(kernel.key)
        if found is not None:
            return found
        line = self._known.lines.get(structure(kernel.key))
        if line is not None:
            return self._along(line, kernel)
        family = family_of(kernel.op)
        factor = self._known.factors.get(family, self._known.factors.get("", 1.0))
        return self.roofline.seconds(kernel) * factor

    def how(self, kernel: Kernel) -> str:
        """Where the time of a kernel is from: `measured`, `interpolated` or `roofline`."""
        if kernel.key in self._known.seconds:
            return "measured"
        return "interpolated" if structure(kernel.key) in self._known.lines else "roofline"

    def missing(self, kernels: Iterable[Kernel]) -> list[Kernel]:
        """The distinct kernels that nobody has measured yet."""
        self.refresh()
        return [one for key, one in {one.key: one for one in kernels}.items() if key not in self._known.seconds]

    def add(self, kernels: Iterable[Kernel], seconds: Mapping[str, float]) -> None:
        """Keep what was measured, by key; of a kernel that was measured before only the new time is kept."""
        now = time.time()
        rows = [
            (self.place, one.key, one.op, one.dtype, one.flops, one.bytes, one.elements, seconds[one.key], now)
            for one in {one.key: one for one in kernels}.values()
            if one.key in seconds
        ]
        assert all(math.isfinite(row[-2]) and row[-2] > 0 for row in rows), "a time is a number above 0"
        with self._opened() as base:
            base.executemany("INSERT OR REPLACE INTO kernels VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self.refresh()

    def number(self, name: str) -> float | None:
        """Another number that was measured at this place, such as `overhead forward`."""
        with self._opened() as base:
            row = base.execute("SELECT value FROM numbers WHERE place = ? AND name = ?", (self.place, name)).fetchone()
        return None if row is None else float(row[0])

    def set_number(self, name: str, value: float) -> None:
        """Keep such a number."""
        with self._opened() as base:
            base.execute("INSERT OR REPLACE INTO numbers VALUES (?, ?, ?, ?)", (self.place, name, value, time.time()))

    def refresh(self) -> None:
        """Read what is there by now."""
        query = "SELECT op, key, dtype, flops, bytes, elements, seconds FROM kernels WHERE place = ? ORDER BY key"
        with self._opened() as base:
            rows = base.execute(query, (self.place,)).fetchall()
        measured = [(Kernel(*row[:-1]), float(row[-1])) for row in rows]
        lines: dict[str, list[tuple[Kernel, float]]] = {}
        factors: dict[str, list[float]] = {}
        for kernel, seconds in measured:
            lines.setdefault(structure(kernel.key), []).append((kernel, seconds))
            for name in (family_of(kernel.op), ""):
                factors.setdefault(name, []).append(math.log(seconds / self.roofline.seconds(kernel)))
        self._known = _Known(
            {kernel.key: seconds for kernel, seconds in measured},
            {name: _line(found) for name, found in lines.items()},
            {name: math.exp(statistics.median(found)) for name, found in factors.items()},
        )

    def _along(self, line: _Line, kernel: Kernel) -> float:
        """Between the neighbours on the line; beyond its ends as the roofline grows from the last one."""
        work, end = work_of(kernel), len(line.work) - 1
        after = bisect_left(line.work, work)
        if 0 < after <= end:
            left, right = math.log(line.work[after - 1]), math.log(line.work[after])
            share = (math.log(work) - left) / (right - left)
            low, high = math.log(line.seconds[after - 1]), math.log(line.seconds[after])
            return math.exp(low + share * (high - low))
        nearest = min(after, end)
        if line.work[nearest] == work:
            return line.seconds[nearest]
        return line.seconds[nearest] * self.roofline.seconds(kernel) / self.roofline.seconds(line.kernels[nearest])

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """The database, made if it is not there; what is done is kept if all of it succeeds."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            base = sqlite3.connect(self.path, timeout=BUSY)
        except (OSError, sqlite3.Error) as error:
            raise self._refused(f"cannot be opened: {error}", "another file, or access to this one") from error
        try:
            self._check(base)
            with base:
                yield base
        except sqlite3.OperationalError as error:
            raise self._refused(f"cannot be used: {error}", "another file, or access to this one") from error
        except sqlite3.DatabaseError as error:
            raise self._refused(f"is no database, or a damaged one: {error}", ANEW) from error
        finally:
            base.close()

    def _check(self, base: sqlite3.Connection) -> None:
        """Whether the file is what it should be; a new one is made so, by one process while others wait."""
        if _head(base) != (APPLICATION, LAYOUT):
            with base:
                # no other process makes it between the look and the making
                base.execute("BEGIN IMMEDIATE")
                self._make(base)
        if base.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            # readers go on while one writes; the file keeps it. Another process that is at it does so too
            with suppress(sqlite3.OperationalError):
                base.execute("PRAGMA journal_mode = WAL")
        # what is lost if the power fails is measured again
        base.execute("PRAGMA synchronous = NORMAL")

    def _make(self, base: sqlite3.Connection) -> None:
        """The tables, if the file holds nothing yet; refuses one that holds anything but this layout."""
        application, layout = _head(base)
        if not application and not base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for command in (*TABLES, f"PRAGMA application_id = {APPLICATION}", f"PRAGMA user_version = {LAYOUT}"):
                base.execute(command)
        elif application != APPLICATION:
            raise self._refused("is the database of another program", "another file")
        elif layout != LAYOUT:
            raise self._refused(f"has layout {layout}, and this weft reads layout {LAYOUT}", ANEW)

    def _refused(self, why: str, remedy: str) -> WeftError:
        return WeftError(f"the profile {self.path} {why}", place=str(self.path), remedy=remedy)


def work_of(kernel: Kernel) -> float:
    """What the time of a kernel grows with."""
    return float(max(kernel.flops, kernel.bytes, 1))


def _head(base: sqlite3.Connection) -> tuple[int, ...]:
    return tuple(int(base.execute(f"PRAGMA {name}").fetchone()[0]) for name in HEAD)


def _line(found: list[tuple[Kernel, float]]) -> _Line:
    """Kernels of as much work count as one with their median time."""
    by_work: dict[float, list[tuple[Kernel, float]]] = {}
    for kernel, seconds in found:
        by_work.setdefault(work_of(kernel), []).append((kernel, seconds))
    work = tuple(sorted(by_work))
    medians = tuple(statistics.median(seconds for _, seconds in by_work[one]) for one in work)
    return _Line(work, medians, tuple(by_work[one][0][0] for one in work))
