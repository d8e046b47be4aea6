"""A/B: this commit against another one, workload by workload, in fresh processes that take turns.

    python bench/ab.py --against REV [--pairs 20] [--aa] [--only "dp=2" "zero=3"] [--out bench/results/ab.json]

Both commits are checked out into a temporary folder. A pair is a run of each, one after the other, in the other order
in the next pair; a run has processes of its own, which differ in PYTHONPATH and the working directory and in nothing
else: the same Python, the same packages, the same workloads (`ab_side.py`), which use public names alone. Told are, for
each workload, the median of the ratios of pairs, this commit's seconds to the other's (below 1: this one is faster),
the interval that holds the true median with 95% (between two of the ordered ratios, whatever their distribution), and
the same of peak memory, of the process that needs most. With `--aa` every pair has a third run, of this commit once
more: what its ratio shows is noise.

Steps are medians over those of a run, of the slowest rank. What is not committed is not measured. Nothing is judged
here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "ab.json"
SHARED = {"ab_side.py": "bench/ab_side.py", "gpt.py": "bench/gpt.py", "gpt2.py": "examples/models/gpt.py"}
"""What both sides run, by its name in their folder: the files of this checkout."""
RANKS = {"one device": 1, "dp=2": 2, "tp=2": 2, "zero=3": 2, "zero=1": 2, "pp=2": 2}
"""Processes of the workloads that train; the others have one, and no launcher."""
WORKLOADS = (*RANKS, "verify gpt-2", "compile 32 layers")
LIMIT = 300.0
"""Seconds that a run may take."""
THIS, OTHER, AGAIN = "this", "against", "again"


class BadRunError(Exception):
    """A run ended badly."""


@dataclass(frozen=True)
class Run:
    """What a run measured: seconds of the workload, and bytes that its largest process had resident at most."""

    seconds: float
    memory: float


@dataclass(frozen=True)
class Ratio:
    """The median of ratios and the interval that holds the true one with 95%."""

    median: float
    low: float
    high: float


def compare(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, Ratio]:
    """Of pairs: seconds and memory of the first to those of the second."""
    return {
        kind: ratio([getattr(a, kind) / getattr(b, kind) for a, b in zip(runs, others, strict=True)])
        for kind in ("seconds", "memory")
    }


def ratio(values: Sequence[float]) -> Ratio:
    """The median, between the k-th smallest and the k-th largest: how often the true one lies outside is binomial.

    With fewer than six values no interval reaches 95%: the smallest and the largest are told.
    """
    ordered = sorted(values)
    outside = 0
    while outside + 1 <= (len(ordered) - 1) // 2 and _below(outside + 1, len(ordered)) <= 0.025:
        outside += 1
    return Ratio(statistics.median(ordered), ordered[outside], ordered[-1 - outside])


def _below(count: int, number: int) -> float:
    """How likely at most `count` of `number` values lie below the true median."""
    return sum(math.comb(number, one) for one in range(count + 1)) / 2**number


@contextmanager
def sides(against: str, *, again: bool) -> Iterator[tuple[Path, dict[str, Path]]]:
    """A folder with what both run, and a checkout for each side. All are gone afterwards."""
    revisions = {THIS: "HEAD", OTHER: against, **({AGAIN: "HEAD"} if again else {})}
    with tempfile.TemporaryDirectory(prefix="weft-ab-") as folder:
        shared = Path(folder) / "run"
        shared.mkdir()
        for name, path in SHARED.items():
            shutil.copy(ROOT / path, shared / name)
        found = {name: Path(folder) / name for name in revisions}
        try:
            for name, revision in revisions.items():
                git("worktree", "add", "--detach", "--force", str(found[name]), commit(revision))
                # neither side compiles its modules while it is measured
                subprocess.run([sys.executable, "-m", "compileall", "-q", str(found[name] / "weft")], check=True)
            yield shared, found
        finally:
            for path in found.values():
                if path.exists():
                    git("worktree", "remove", "--force", str(path))


def git(*args: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {args[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def commit(revision: str) -> str:
    return git("rev-parse", "--verify", f"{revision}^{{commit}}")


def run(workload: str, side: Path, shared: Path) -> Run:
    """One run of a side."""
    ranks = RANKS.get(workload)
    with tempfile.TemporaryDirectory(prefix="weft-ab-run-") as folder:
        outs = [Path(folder) / f"rank{rank}" for rank in range(ranks or 1)]
        places = _places(ranks) if ranks is not None and ranks > 1 else [{}]
        found = _wait(
            [_start(workload, side, shared, out, place) for out, place in zip(outs, places, strict=True)],
            [out.with_suffix(".err") for out in outs],
        )
        told = [json.loads(out.read_text()) for out in outs]
    assert {one["weft"] for one in told} == {str(side)}, f"{workload} of {side} ran the Weft of {told}"
    return Run(max(one["seconds"] for one in told), max(found))


def _start(workload: str, side: Path, shared: Path, out: Path, place: Mapping[str, str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **place, "PYTHONPATH": str(side), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(shared / "ab_side.py"), workload, str(out)]
    with out.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(command, cwd=side, env=environment, stdout=errors, stderr=errors)


def _places(ranks: int) -> list[dict[str, str]]:
    """What a launcher tells each process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _wait(processes: Sequence[subprocess.Popen[bytes]], errors: Sequence[Path]) -> list[int]:
    """Wait for all, and tell the bytes that each had resident at most. If one fails all are ended."""
    until = time.monotonic() + LIMIT
    left, memory = dict(zip(processes, errors, strict=True)), []
    try:
        while left:
            for process in list(left):
                # not Popen.wait(): that one does not say what the process used
                number, status, used = os.wait4(process.pid, os.WNOHANG)
                if number == 0:
                    continue
                process.returncode = os.waitstatus_to_exitcode(status)
                if process.returncode:
                    raise BadRunError(left[process].read_text(errors="replace")[-4000:])
                memory.append(used.ru_maxrss * 1024)
                del left[process]
            if time.monotonic() > until:
                raise BadRunError(f"it took more than {LIMIT:.0f} s")
            time.sleep(0.01)
    finally:
        for process in left:
            if process.returncode is None:
                process.kill()
                process.wait()
    return memory


def measure(workloads: Sequence[str], pairs: int, shared: Path, found: Mapping[str, Path]) -> dict[str, Any]:
    """Pairs of all workloads, with a bar. Workloads take turns too: what slows the machine down slows all of them."""
    taken: dict[str, dict[str, list[Run]]] = {one: {name: [] for name in found} for one in workloads}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=pairs * len(workloads) * len(found))
        for pair in range(pairs):
            for workload in workloads:
                for name in list(found) if pair % 2 == 0 else reversed(found):
                    bar.update(task, description=f"{workload}, {name}")
                    try:
                        taken[workload][name].append(run(workload, found[name], shared))
                    except BadRunError as error:
                        raise SystemExit(f"{workload} failed on the side {name}:\n{error}") from None
                    bar.advance(task)
    return {workload: summary(runs) for workload, runs in taken.items()}


def summary(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Of a workload."""
    medians = {
        name: {kind: statistics.median(getattr(one, kind) for one in side) for kind in ("seconds", "memory")}
        for name, side in runs.items()
    }
    ratios = {
        name: {kind: vars(one) for kind, one in compare(runs[THIS], side).items()}
        for name, side in runs.items()
        if name != THIS
    }
    every = {name: [vars(one) for one in side] for name, side in runs.items()}
    return {"medians": medians, "ratios": ratios, "runs": every}


def table(found: Mapping[str, Any], *, again: bool) -> Table:
    shown = Table(
        "workload", "this", "against", "ratio", "95%", "memory", *(["this to itself", "95%"] if again else [])
    )
    for workload, one in found.items():
        seconds = [f"{one['medians'][name]['seconds']:.3f} s" for name in (THIS, OTHER)]
        cells = _cells(one["ratios"][OTHER]["seconds"])
        memory = f"{one['ratios'][OTHER]['memory']['median']:.3f}"
        more = _cells(one["ratios"][AGAIN]["seconds"]) if again else []
        shown.add_row(workload, *seconds, *cells, memory, *more)
    return shown


def _cells(one: Mapping[str, float]) -> list[str]:
    return [f"{one['median']:.3f}", f"{one['low']:.3f} to {one['high']:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, metavar="REV", help="the other commit")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--aa", action="store_true", help="run this commit once more in every pair")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    from bench.machine import machine  # noqa: PLC0415 - loads torch: --help should not

    commits = {THIS: commit("HEAD"), OTHER: commit(options.against)}
    if git("status", "--porcelain", "--untracked-files=no", "weft"):
        print("weft/ has changes that are not committed: they are not measured", file=sys.stderr)
    about = machine(commits=commits, pairs=options.pairs)
    with sides(options.against, again=options.aa) as (shared, found):
        measured = measure(options.only, options.pairs, shared, found)
    Console().print(table(measured, again=options.aa))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": about, "workloads": measured}, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
