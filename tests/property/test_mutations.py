"""The static check and its oracle against seeded faults: every wrong Program is refused by both.

Truth is a run on emulated ranks compared with one device. The check must end in a CheckError or a Report, whatever it
is given; it may accept only what the oracle accepts, with the same counts. The oracle refuses hardly any right Program;
the check compares what is declared, and so refuses some mutants that would run well.
"""

from __future__ import annotations

import contextlib
import random
import traceback
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.oracle.prove import follow
from tests.property.harness import differences, run_program
from tests.property.mutate import mutant
from tests.property.samples import Sample, samples
from weft.errors import CheckError
from weft.ir.program import Program
from weft.lower.check import check
from weft.lower.proof.moves import FaultError

QUICK, FULL, SHARDS = 400, 8_000, 8

DECLARATIONS = ("regroup op", "re-share op", "cut op otherwise", "misdeclare value", "other op or operands")
"""Kinds that change what is declared of an op or value. Where no call depends on it (a linear layer does not know which
rows it has, a product not which factor came first) the numbers stay right; the oracle refuses what is not true."""
UNSAID = ("double step", "swap steps", "sync to another parameter", "store elsewhere")
"""Kinds that generated code may not notice: a tensor that is used as it is stored needs no statement, so where its Use
stands says nothing, and a gradient that nothing brings needs none either."""
MOST_FALSE_ALARMS = 0.01
"""Of the oracle, of the other kinds: now and then a part in another place or order is as good by chance (a mean does
not ask for the order of its rows), but the op is declared to have another one."""


@dataclass
class Tally:
    """What became of the mutants."""

    counts: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = "  ".join(f"{name}: {number}" for name, number in sorted(self.counts.items()))
        return f"{kinds}\nmissed {len(self.missed)}, false alarms {len(self.false_alarms)}, broken {len(self.broken)}"


def runs_well(sample: Sample, program: Program) -> str:
    """Why the program is wrong, by running it; "" if it is right."""
    try:
        found = run_program(program, sample.case.state, sample.case.inputs, timeout=5, exact=False)
    except Exception as error:  # noqa: BLE001  a program that fails in any way is wrong
        return f"{type(error).__name__}: {str(error)[:200]}"
    wrong = differences(found, sample.expected)
    return f"differs: {wrong}" if wrong else ""


def judge(sample: Sample, kind: str, program: Program, told: str, tally: Tally) -> None:
    """Compare the verdicts with the truth, and with each other."""
    proven, followed, refused = None, None, ""
    try:
        with contextlib.suppress(CheckError):
            proven = check(program, sample.book)
        followed = follow(program, sample.book)
    except FaultError as fault:
        refused = str(fault)
    except Exception:  # noqa: BLE001  neither may end otherwise
        tally.broken.append(f"{told}\n{traceback.format_exc(limit=-4)}")
        return
    if proven is not None and refused:
        tally.missed.append(f"{told}\n    accepted by the check, by the oracle not: {refused}")
    elif proven is not None and proven != followed:
        tally.broken.append(f"{told}\n    by the check {proven}, by the oracle {followed}")
    truth = runs_well(sample, program)
    tally.counts[f"{kind} ({'wrong' if truth else 'right'})"] += 1
    if truth and (proven is not None or not refused):
        tally.missed.append(f"{told}\n    {truth}")
    if refused and not truth:
        tally.false_alarms.append(f"{told}\n    {refused}")


def run_mutants(seeds: range, num_random: int) -> Tally:
    pool, tally, done = samples(num_random), Tally(), 0
    for sample in pool:
        check(sample.program, sample.book)
        assert not runs_well(sample, sample.program), sample.name
    seed = seeds.start
    while done < len(seeds):
        seed += 1
        rng = random.Random(seed)
        sample = pool[rng.randrange(len(pool))]
        made = mutant(sample.program, rng)
        if made is not None:
            judge(sample, made[0], made[1], f"{made[0]} of {sample.name}, seed {seed}", tally)
            done += 1
    return tally


def expect_clean(tally: Tally, *, is_draw: bool = False) -> None:
    """No mutant is missed, and few that are right are refused.

    Args:
        is_draw: these are one of several draws, which may have three standard deviations more false alarms each.
    """
    others = [told for told in tally.false_alarms if not told.startswith((*DECLARATIONS, *UNSAID))]
    print(f"\n{tally}, of which {len(others)} not of a declaration")
    for told in (*tally.broken[:5], *tally.missed[:10], *others[:20]):
        print(told)
    assert sum(name.endswith("(wrong)") for name in tally.counts) >= 20
    assert not tally.broken
    assert not tally.missed
    expected = MOST_FALSE_ALARMS * sum(tally.counts.values())
    assert len(others) <= expected + (3 * expected**0.5 if is_draw else 0)


# a mutant may make torch warn; it is wrong then all the same
pytestmark = pytest.mark.filterwarnings("ignore")


def test_mutants() -> None:
    expect_clean(run_mutants(range(QUICK), 12))


@pytest.mark.full
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_mutants(shard: int) -> None:
    """In shards, which workers share. Not every seed gives a mutant: the next shard begins far behind."""
    first = 10**6 * (shard + 1)
    expect_clean(run_mutants(range(first, first + FULL // SHARDS), 60), is_draw=True)
