"""Random steps: bounds, scaling, sums, and ranks that are alike against all ranks played one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.jobs import HERE, Plain, hold, issue, run, wait
from weft.simulate.engine import simulate
from weft.simulate.machine import Scaled
from weft.simulate.trace import Event, Issue, Job, Post, Run, Take, Trace

SEEDS = st.integers(0, 10**6)


def rows(draw: random.Random, ranks: int, copies: int = 1) -> list[list[list[Event]]]:
    """What every rank of every copy does: in one order of all, so the step ends.

    Copies do the same among themselves, and collectives with each other; `groups` of equal members differ by order.
    """
    found: list[list[list[Event]]] = [[[] for _ in range(ranks)] for _ in range(copies)]
    open_calls: list[list[int]] = [[] for _ in range(ranks)]
    for number in range(draw.randint(1, 30)):
        kind = draw.choice(["run", "run", "group", "copies", "message", "wait", "hold"])
        one, other = draw.randrange(ranks), draw.randrange(ranks)
        size = draw.randint(0, 6)
        members = draw.sample(range(ranks), draw.randint(1, ranks))
        for copy, row in enumerate(found):
            at = copy * ranks
            if kind == "run":
                row[one].append(run(size / 2))
            elif kind == "hold":
                row[one].append(hold(size))
            elif kind == "group":
                for member in members:
                    row[member].append(issue(number, size, *(at + each for each in members)))
            elif kind == "copies":
                row[one].append(issue(number, size, *(one + each * ranks for each in range(copies))))
            elif kind == "message" and one != other:
                row[one].append(Post(at + other, f"{number}", size, HERE))
                row[other].append(Take(at + one, f"{number}", size, HERE))
            elif kind == "wait" and open_calls[one]:
                row[one].append(wait(open_calls[one][size % len(open_calls[one])]))
        for member in members if kind == "group" else [one] if kind == "copies" else []:
            open_calls[member].append(number)
    return found


def machine_of(draw: random.Random, ranks: int = 1, copies: int = 1) -> Plain:
    """Any machine; what shares a link in one copy does in all."""
    names = {}
    for size in range(1, ranks + 1):
        for members in product(range(ranks), repeat=size):
            name = draw.choice([None, "a", "b"])
            names.update({tuple(at * ranks + one for one in members): name for at in range(copies)} if name else {})
    overlaps = draw.random() < 0.5
    return Plain(
        overlaps,
        launch=draw.choice([0, 0.25, 1]),
        host=draw.choice([0, 0.5]),
        latency=draw.choice([0, 0.5]),
        core=draw.random() < 0.7,
        links=names if draw.random() < 0.6 else None,
    )


def step(draw: random.Random) -> tuple[Job, Plain]:
    ranks = draw.randint(1, 4)
    traces = [Trace(rank, (rank,), events, {"parameters": rank}) for rank, events in enumerate(rows(draw, ranks)[0])]
    return Job(ranks, traces), machine_of(draw, ranks)


def everything(job: Job, machine: Plain) -> float:
    """All kernels, all that travels, all that hosts do, one after the other."""
    total = 0.0
    for trace in job.traces:
        for event in trace.events:
            match event:
                case Run():
                    total += machine.seconds(0, event.kernel) + machine.overhead("")
                case Issue():
                    # the core of each member works on it, while it travels
                    total += 2 * machine.collective("", (), event.bytes)
                case Post():
                    total += machine.message(0, 0, event.bytes)
            total += machine.launch
    return total


@given(SEEDS)
def test_bounds_and_sums(seed: int) -> None:
    job, machine = step(random.Random(seed))
    found = simulate(job, machine)
    assert max(one.busy for one in found.ranks) <= found.seconds <= everything(job, machine) + 1e-9
    for one, trace in zip(found.ranks, job.traces, strict=True):
        kernels = sum(machine.seconds(0, event.kernel) for event in trace.events if isinstance(event, Run))
        assert one.busy == pytest.approx(kernels)
        assert one.busy + one.exposed + one.bubble + one.host == pytest.approx(found.seconds)
        line = [each for each in found.intervals(one.rank) if each.stream != "communication"]
        assert [each.start for each in line] == [0, *(each.end for each in line)][: len(line)]
        assert sum(each.end - each.start for each in line) == pytest.approx(found.seconds)


@given(SEEDS)
def test_the_critical_path_has_no_gap(seed: int) -> None:
    job, machine = step(random.Random(seed))
    found = simulate(job, machine)
    ends = [0.0, *(piece.end for piece in found.path)]
    assert [piece.start for piece in found.path] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(found.seconds)
    assert sum(took for _, took in found.critical_path()) == pytest.approx(found.seconds)


@given(SEEDS, st.sampled_from([0.5, 3.0, 1e-6]))
def test_costs_scale_the_step(seed: int, factor: float) -> None:
    job, machine = step(random.Random(seed))
    found = simulate(job, machine).seconds
    assert simulate(job, replace(machine, slow=factor)).seconds == pytest.approx(found * factor)
    faster = Scaled(machine, **dict.fromkeys(("compute", "links", "latency", "host"), 1 / factor))
    assert simulate(job, faster).seconds == pytest.approx(found * factor)


@given(SEEDS)
def test_the_same_again(seed: int) -> None:
    job, machine = step(random.Random(seed))
    assert simulate(job, machine).to_json() == simulate(job, machine).to_json()


@given(SEEDS)
def test_alike_ranks_may_be_left_out(seed: int) -> None:
    """The rank that is played may be of another copy in each class."""
    draw = random.Random(seed)
    ranks, copies = draw.randint(1, 3), draw.randint(2, 3)
    found, machine = rows(draw, ranks, copies), machine_of(draw, ranks, copies)
    every = [
        Trace(at * ranks + one, (at * ranks + one,), row, {})
        for at in range(copies)
        for one, row in enumerate(found[at])
    ]
    played = [draw.randrange(copies) for _ in range(ranks)]
    few = [
        Trace(at * ranks + one, tuple(range(one, ranks * copies, ranks)), found[at][one], {})
        for one, at in enumerate(played)
    ]
    whole, short = simulate(Job(len(every), every), machine), simulate(Job(len(every), few), machine)
    assert short.seconds == pytest.approx(whole.seconds)
    assert (short.exposed, short.bubble, short.host) == pytest.approx((whole.exposed, whole.bubble, whole.host))
    for one in short.ranks:
        assert one.busy == pytest.approx(whole.ranks[one.rank].busy)
        assert one.bubble == pytest.approx(whole.ranks[one.rank].bubble)
