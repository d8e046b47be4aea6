"""`weft doctor`: what a new machine has, what Weft would choose there, and whether ranks can communicate.

In: the options. Out: two tables, what is there and what was run; a line each, ok, a warning or a failure with what to
do; with `--json` one JSON object as the last line. Exit code 0 if nothing failed, 1 if something did, 2 if what is
asked for cannot be had. Promised: a collective that does not end is ended, and named.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import nn

from weft.commands.console import fitted, wide_console
from weft.commands.machine import Line, choice_line, environment_lines, facts, look_around
from weft.commands.trials import TRIALS, Tiny, trial
from weft.errors import RunError, UsageError, WeftError
from weft.runtime.jobs.connect import is_launched
from weft.runtime.jobs.devices import Seen, look
from weft.runtime.jobs.launch import LAST_WORDS, Entry, Pool
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.processes import TIMEOUT
from weft.runtime.links.transport import RankFailed
from weft.verify import verify
from weft.verify.judged import Say

WIDTH = 80
"""Columns at most: tables are pasted into reports."""
STYLES = {"ok": "", "warning": "yellow", "failed": "red"}
STARTING = 120.0
"""Seconds in which processes start, or a program is compiled, beside what collectives take."""
ON_A_CPU = 2
"""Processes, where there is no accelerator."""
LATE = "did not end within"
REPORT = "docs/gpus.md says what to send in a report"
REMEDIES = {
    "gloo": "see whether this system lets processes connect at 127.0.0.1, and whether it ended one for want of memory",
    "nccl": "run it again with NCCL_DEBUG=INFO, which prints what NCCL does; if NCCL_P2P_DISABLE=1 or "
    "NCCL_SHM_DISABLE=1 helps, the links between the devices or /dev/shm are at fault",
}
"""By backend, for a collective that fails."""


def run(options: argparse.Namespace) -> int:
    """The command."""
    if is_launched(os.environ):
        raise UsageError(
            f"weft doctor starts processes of its own, and RANK={os.environ.get('RANK')} says that a launcher has "
            "started this one",
            remedy="run it without torchrun, once on each host; if nothing launched it, unset RANK and WORLD_SIZE",
        )
    seen = look(options.device, options.backend)
    ranks, machine = options.ranks or default_ranks(seen), look_around(seen)
    there = [*facts(machine, ranks), *environment_lines(machine, ranks)]
    show("what is there", there)
    wanted = {"device": options.device, "backend": options.backend, "timeout": options.timeout or TIMEOUT}
    pool = Pool(ranks, **wanted, preload=("weft.verify.generated",))
    ran = [choice_line(pool.chosen[0], seen)]
    if not options.no_run:
        with Console(stderr=True).status("starting processes") as status, pool:
            ran += run_all(pool, wanted, status.update)
    show("what ranks do", ran)
    return end([*there, *ran], options.json)


def default_ranks(seen: Seen) -> int:
    """A rank for each accelerator that may be used, or two on a CPU."""
    kind, _, index = (seen.asked or seen.kind).partition(":")
    if kind != seen.kind or not kind or seen.over == "gloo":
        return ON_A_CPU
    return 1 if index else seen.count


def show(title: str, lines: Sequence[Line]) -> None:
    """Print lines as a table."""
    console = Console(highlight=False, markup=False, width=min(wide_console().width, WIDTH))
    rows = [(one.name, one.state, f"{one.text}\ntry: {one.remedy}" if one.remedy else one.text) for one in lines]
    console.print(fitted(console, (title, "", " "), rows, styles=[STYLES[one.state] for one in lines]), "")


def end(lines: Sequence[Line], as_json: bool) -> int:
    """Say how it is, in one line; the exit code."""
    count = Counter(one.state for one in lines)
    print(
        f"{count['failed']} failed, {count['warning']} warning{'s' * (count['warning'] != 1)}"
        f"{f': {REPORT}' * ('failed' in count)}"
    )
    if as_json:
        print(
            json.dumps({"ok": "failed" not in count, "lines": [{**asdict(one), "state": one.state} for one in lines]})
        )
    return int("failed" in count)


def run_all(pool: Pool, wanted: Mapping[str, Any], say: Say, entry: Entry = trial) -> Iterator[Line]:
    """Start the processes, run each collective by itself, verify a tiny model. What does not end is the last."""
    timeout, remedy = wanted["timeout"], REMEDIES.get(pool.chosen[0].backend, REPORT)
    for name in TRIALS:
        say(f"{name}, {pool.num_ranks} ranks")
        limit = timeout + STARTING * (len(pool.process_ids) < pool.num_ranks)
        line = attempt(name, limit, partial(tried, pool, name, entry), remedy)
        yield line
        if line.text.startswith(LATE):
            return
    for plan in (f"dp={pool.num_ranks}", f"tp={pool.num_ranks}"):
        yield attempt(f"verify {plan}", timeout + STARTING, partial(verified, pool.num_ranks, plan, say, **wanted))


def attempt(name: str, limit: float, work: Callable[[], str], remedy: str = REPORT) -> Line:
    """What a piece of work says, or how it failed. Processes that do not end are ended; their launcher then raises.

    Transports keep time for calls, and say which one was late; this is for processes that hang elsewhere."""
    timer, begin = threading.Timer(limit + LAST_WORDS, _end_processes), time.monotonic()
    timer.start()
    try:
        return Line(name, work())
    except (WeftError, RankFailed) as error:
        stop = f"the processes were ended{'' if 'verify' in name else ', and nothing more is run'}"
        late = f"{LATE} {limit:g} s: {stop}\n" if time.monotonic() - begin >= limit else ""
        return Line(name, f"{late}{getattr(error, 'message', error)}", remedy, failed=True)
    finally:
        timer.cancel()


def _end_processes() -> None:
    for one in multiprocessing.active_children():
        one.kill()


def tried(pool: Pool, name: str, entry: Entry) -> str:
    """One collective: its result is that of emulated ranks."""
    right, begin = run_ranks(pool.num_ranks, lambda transport: trial(transport, name)), time.monotonic()
    found = pool.run(entry, name, check=False)
    if name == TRIALS[0]:
        return f"{pool.num_ranks} on {pool.chosen[0].device.type}, started in {time.monotonic() - begin:.1f} s"
    if wrong := [rank for rank, one in enumerate(found) if not one[0].equal(right[rank][0])]:
        raise RunError(f"rank {wrong[0]} has a wrong result")
    return f"{'1 MiB of each rank in ' * (name != 'barrier')}{max(one for _, one in found) * 1e3:.1f} ms"


def verified(ranks: int, plan: str, say: Say, **wanted: Any) -> str:
    """A tiny model, of which any number of parts can be made, under a plan."""
    torch.manual_seed(0)
    model = Tiny(nn.Linear(8, 8 * ranks), nn.GELU(), nn.Linear(8 * ranks, 8))
    result = verify(model, (torch.randn(2 * ranks, 8),), plan=plan, processes=True, say=say, **wanted)
    if not result.equal:
        raise RunError(f"different from one device: largest difference {result.largest_difference:.1e}")
    return f"equal to one device: largest difference {result.largest_difference:.1e}"
