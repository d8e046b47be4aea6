"""Small steps whose times are computed by hand."""

from __future__ import annotations

import json
import time

import pytest

from tests.simulate.jobs import HERE, Plain, alike, hold, issue, job, post, run, take, wait
from weft.errors import WeftError
from weft.simulate.engine import simulate, what_if
from weft.simulate.machine import CHANGES
from weft.simulate.result import Simulation
from weft.simulate.trace import Event, Issue, Job, Trace

CPU = Plain(overlaps=False)


def spent(found: Simulation) -> list[tuple[float, ...]]:
    """Busy, exposed, bubble, host of every rank."""
    return [(one.busy, one.exposed, one.bubble, one.host) for one in found.ranks]


def streams(found: Simulation, rank: int, stream: str) -> list[tuple[float, float, str]]:
    return [(one.start, one.end, one.name) for one in found.intervals(rank) if one.stream == stream]


def test_one_rank() -> None:
    found = simulate(job([run(2, flops=30), run(3)], tokens=10, flops=25), Plain())
    assert found.seconds == 5
    assert spent(found) == [(5, 0, 0, 0)]
    assert found.tokens_per_second == 2
    assert found.mfu == 25 / (5 * 10)
    assert found.critical_path() == [("compute, net.py:1, forward", 5)]


def test_nothing_to_do() -> None:
    found = simulate(job([]), Plain())
    assert (found.seconds, found.mfu, found.exposed, found.critical_path()) == (0, None, 0, [])


@pytest.mark.smoke
def test_all_reduce_beside_compute() -> None:
    """Rank 1 issues at 3; the transfer of 4 ends at 7, while rank 0 computes until 6 and rank 1 until 8."""
    found = simulate(job([run(1), issue(0, 4), run(5), wait(0)], [run(3), issue(0, 4), run(5), wait(0)]), Plain())
    assert found.seconds == 8
    assert spent(found) == [(6, 1, 1, 0), (8, 0, 0, 0)]
    assert streams(found, 0, "communication") == [(3, 7, "all_reduce")]
    assert streams(found, 0, "idle") == [(6, 7, "all_reduce"), (7, 8, "bubble")]
    assert found.exposed == 1 / 16


def test_exposed_gather() -> None:
    found = simulate(job(*[[issue(0, 4, kind="all_gather"), wait(0), run(2)]] * 2), Plain())
    assert found.seconds == 6
    assert spent(found) == [(2, 4, 0, 0)] * 2
    assert found.critical_path() == [("all_gather, net.py:2, backward", 4), ("compute, net.py:1, forward", 2)]


def test_collectives_of_a_group_go_in_order() -> None:
    """The second begins when the first ends, though all have issued it; those of another group go beside."""
    found = simulate(job(*[[issue(0, 4), issue(1, 2), issue(2, 5, 1, 0), run(1), wait(1), run(1)]] * 2), Plain())
    assert streams(found, 0, "communication") == [(0, 4, "all_reduce"), (0, 5, "all_reduce"), (4, 6, "all_reduce")]
    assert found.seconds == 7
    assert sum(took for _, took in found.critical_path()) == 7


def test_what_nobody_waits_for_belongs_to_the_step() -> None:
    found = simulate(job(*[[run(1), issue(0, 4)]] * 2), Plain())
    assert found.seconds == 5
    assert spent(found) == [(1, 4, 0, 0)] * 2


def test_links_are_shared() -> None:
    """Two of 4 and 2 on one link: both at half the rate until the smaller ends at 4, then 2 are left of the larger."""
    step = job(*[[issue(0, 4), issue(1, 2, 1, 0), wait(0), wait(1)]] * 2)
    assert simulate(step, Plain()).seconds == 4
    found = simulate(step, Plain(links={(0, 1): "net", (1, 0): "net"}))
    assert streams(found, 0, "communication") == [(0, 6, "all_reduce"), (0, 4, "all_reduce")]
    assert simulate(step, Plain(links={(0, 1): "net", (1, 0): "nvlink"})).seconds == 4


def test_a_collective_is_as_fast_as_its_slowest_member() -> None:
    """(0, 1) and (1, 2) meet on rank 1 from 1 to 5; (2, 3) meets (1, 2) on rank 2 and has half the rate too."""
    links = {(0, 1): "net", (1, 2): "net", (2, 3): "net"}
    step = job(
        [issue(0, 3, 0, 1)],
        [issue(0, 3, 0, 1), run(1), issue(1, 5, 1, 2)],
        [run(1), issue(0, 5, 1, 2), issue(1, 2, 2, 3)],
        [run(1), issue(0, 2, 2, 3)],
    )
    found = simulate(step, Plain(links=links))
    assert streams(found, 0, "communication") == [(0, 5, "all_reduce")]
    assert streams(found, 3, "communication") == [(1, 5, "all_reduce")]
    assert found.seconds == 8


def test_host_that_is_late() -> None:
    """Four kernels of 1 whose issue takes 2 each: the stream waits for the host before each."""
    found = simulate(job([run(1)] * 4), Plain(launch=2))
    assert found.seconds == 9
    assert spent(found) == [(4, 0, 0, 5)]
    assert found.critical_path() == [("host, net.py:1, forward", 8), ("compute, net.py:1, forward", 1)]


def test_host_runs_ahead() -> None:
    """While the first kernel runs, the host issues all others."""
    found = simulate(job([run(10), *[run(1)] * 4]), Plain(launch=2))
    assert (found.seconds, spent(found)) == (16, [(14, 0, 0, 2)])


def test_host_goes_on_while_the_stream_waits() -> None:
    found = simulate(job(*[[run(1), issue(0, 20), wait(0), run(1)]] * 2), Plain(launch=2))
    assert found.seconds == 4 + 20 + 1


def test_collectives_may_be_late_because_of_the_host() -> None:
    found = simulate(job(*[[run(1), issue(0, 4)]] * 2), Plain(launch=2))
    assert found.seconds == 8
    assert found.critical_path() == [
        ("all_reduce, net.py:2, backward", 4),
        ("host, net.py:1, forward", 2),
        ("host, net.py:2, backward", 2),
    ]


def test_cpu_has_overhead_per_kernel() -> None:
    found = simulate(job([run(2), run(3)]), Plain(overlaps=False, host=1, launch=100))
    assert (found.seconds, spent(found)) == (7, [(5, 0, 0, 2)])
    assert found.critical_path() == [("compute, net.py:1, forward", 5), ("host, net.py:1, forward", 2)]


def test_cpu_works_on_collectives() -> None:
    """The transfer takes 4 from the core while a kernel runs: no overlap, unless another core carries it."""
    step = job(*[[run(1), issue(0, 4), run(5), wait(0), run(1)]] * 2)
    found = simulate(step, CPU)
    assert (found.seconds, spent(found)) == (11, [(7, 4, 0, 0)] * 2)
    assert sum(took for _, took in found.critical_path()) == 11
    assert simulate(step, Plain(overlaps=False, core=False)).seconds == 7


def test_cpu_computes_until_the_others_are_there() -> None:
    """Rank 0 issues at 1 and computes until 4; the transfer is from 10 to 12, when rank 0 waits anyway."""
    found = simulate(job([run(1), issue(0, 2), run(3), wait(0), run(1)], [run(10), issue(0, 2), wait(0)]), CPU)
    assert spent(found) == [(5, 8, 0, 0), (10, 2, 1, 0)]
    assert found.seconds == 13


def test_cpu_goes_on_with_a_collective_after_another_wait() -> None:
    """Rank 0 waits for a message until 5; of the transfer from 2 to 8 three are left, and take its core."""
    step = job(
        [issue(0, 6, 0, 2), take(1, "x"), run(4), wait(0)],
        [run(5), post(0, "x")],
        [run(2), issue(0, 6, 0, 2), wait(0)],
    )
    found = simulate(step, CPU)
    assert spent(found)[0] == (4, 3, 5, 0)
    assert found.seconds == 12


def test_messages_queue_up() -> None:
    """Both are ready at 1; the second leaves when the first has arrived."""
    found = simulate(job([run(1), post(1, "a", 3), post(1, "b", 2)], [take(0, "b"), run(1), take(0, "a")]), Plain())
    assert found.seconds == 7
    assert spent(found)[1] == (1, 5, 1, 0), "until 1 nothing is posted"
    assert found.critical_path() == [
        ("message, net.py:1, forward", 5),
        ("compute, net.py:1, forward", 2),
    ]


@pytest.mark.parametrize("machine", [Plain(), CPU, Plain(launch=0.25)])
def test_the_same_tag_again(machine: Plain) -> None:
    step = job([post(1, "x"), run(4), post(1, "x")], [take(0, "x"), run(1), take(0, "x"), run(1)])
    assert simulate(step, machine).seconds == 5 + (0.5 if machine.launch else 0)


def test_alike_ranks_are_played_once() -> None:
    """dp=2, pp=2: ranks 0 and 1 do the same, and so do 2 and 3."""
    first, last = (0, 1), (2, 3)
    step = alike(
        (first, [run(1), post(2, "x", 1), take(2, "y"), run(2), issue(0, 3, 0, 1), wait(0)]),
        (last, [take(0, "x"), run(1), run(2), post(0, "y", 1), issue(0, 3, 2, 3), wait(0)]),
    )
    found = simulate(step, Plain())
    assert found.seconds == 1 + 1 + 3 + 1 + 2 + 3
    assert [one.alike for one in found.ranks] == [2, 2]
    assert found.bubble == (2 * 4 + 2 * 4) / (11 * 4)


def test_peers_of_ranks_that_are_not_played() -> None:
    """Rank 2 is played and takes from 1, which does as 0 does; the group (1, 2) is to 2 what (0, 3) is to 0."""
    step = alike(
        ((0, 1), [run(2), post(3, "x", 1), issue(0, 3, 0, 3), wait(0)]),
        ((2, 3), [take(1, "x"), issue(0, 3, 1, 2), wait(0), run(1)]),
    )
    assert simulate(step, Plain()).seconds == 7


def test_one_rank_and_several_alike() -> None:
    """0 meets 1 and 2 in turn; they do the same, and the second one's collective is the second of 0's."""
    step = alike(
        ((0,), [post(1, "x", 1), post(2, "x", 1), issue(0, 2, 0, 1), issue(1, 2, 0, 2), wait(0), wait(1)]),
        ((1, 2), [take(0, "x"), run(3), issue(0, 2, 0, 1), wait(0), run(1)]),
    )
    assert simulate(step, Plain()).seconds == 1 + 3 + 2 + 1


def test_deadlocks() -> None:
    with pytest.raises(
        WeftError, match=r"rank 1 takes 'y' from rank 0, which it never posts\n  at: backward b0, net.py:2"
    ):
        simulate(job([post(1, "x")], [take(0, "y")]), Plain())
    with pytest.raises(
        WeftError, match="rank 0 waits for all_reduce number 0 of ranks 0, 1, which rank 1 never issues"
    ):
        simulate(job([issue(0, 1), wait(0)], [run(1)]), CPU)
    with pytest.raises(WeftError, match="rank 0 issues all_reduce number 1 of ranks 0, 1, which rank 1 never issues"):
        simulate(job([issue(0, 1), issue(1, 1)], [issue(0, 1)]), Plain())
    circle = job([take(1, "x"), post(1, "y")], [take(0, "y"), post(0, "x")])
    with pytest.raises(WeftError, match="rank 0 takes 'x' from rank 1, which it has not come to; rank 1 takes 'y'"):
        simulate(circle, CPU)
    crossed = job(
        [issue(0, 1), wait(0), issue(1, 1, 1, 0), wait(1)], [issue(0, 1, 1, 0), wait(0), issue(1, 1), wait(1)]
    )
    with pytest.raises(
        WeftError, match=r"rank 0 waits for .* of ranks 0, 1, which rank 1 has not come to; rank 1 waits"
    ):
        simulate(crossed, Plain())


def test_the_cause_of_a_deadlock_is_told_first() -> None:
    rows = [[take(rank + 1, "x"), post(rank - 1, "x")] for rank in range(1, 8)]
    with pytest.raises(
        WeftError, match=r"never ends: rank 7 takes 'x' from rank 8, which it never posts; .*; and 4 more"
    ):
        simulate(job([take(1, "x")], *rows, [run(1)]), Plain())


def test_members_that_issue_different_kinds() -> None:
    with pytest.raises(WeftError, match="issue all_reduce and all_gather where they are to meet"):
        simulate(job([issue(0, 1)], [issue(0, 1, kind="all_gather")]), Plain())


def test_memory() -> None:
    events = [
        *(hold(30), run(1), hold(20, "temporary"), run(2), hold(-20, "temporary"), hold(10, line="net.py:7"), run(3)),
        *(hold(40, "gradients"), run(1), hold(-30), hold(-10, line="net.py:7"), run(1)),
    ]
    state = {"parameters": 100, "optimizer": 200}
    found = simulate(Job(1, [Trace(0, (0,), events, state)]), Plain()).ranks[0].memory
    assert (found.peak, found.when) == (380, 6)
    assert found.kinds == {"optimizer": 200, "parameters": 100, "activations": 40, "gradients": 40}
    assert found.causes == (
        ("optimizer", "", 200),
        ("parameters", "", 100),
        ("gradients", "net.py:1", 40),
        ("activations", "net.py:1", 30),
        ("activations", "net.py:7", 10),
    )
    curve = [(0, 300), (0, 330), (1, 350), (3, 330), (3, 340), (6, 380), (7, 350), (7, 340)]
    assert list(found.curve) == curve


def test_many_devices_are_quick() -> None:
    """16,384 devices in 4 stages, 100,000 events: half a second here. A group has 4,096 ranks."""
    classes = []
    for stage in range(4):
        ranks = tuple(range(stage * 4096, (stage + 1) * 4096))
        events: list[Event] = []
        for micro in range(250):
            events += [take(ranks[0] - 4096, f"f{micro}")] if stage else []
            for layer in range(10):
                gather = Issue(layer, "all_gather", ranks, 2, HERE)
                events += [gather, hold(8), *[run(1)] * 4, wait(layer), *[run(0.5)] * 2, hold(-8)]
            events += [post(ranks[0] + 4096, f"f{micro}", 1)] if stage < 3 else []
        classes.append((ranks, events))
    step = alike(*classes)
    began = time.perf_counter()
    found = simulate(step, Plain(launch=0.001))
    assert time.perf_counter() - began < 10
    assert found.seconds == pytest.approx(0.002 + (250 + 3) * 50 + 3, abs=0.1)


def test_what_if() -> None:
    step = job(*[[run(4), issue(0, 8), wait(0)]] * 2)
    machine = Plain(latency=2)
    changed = [what_if(step, machine, change).seconds for change in CHANGES.values()]
    assert simulate(step, machine).seconds == 14
    assert changed == [10, 13, 12, 14]
    assert what_if(job([run(4)]), Plain(launch=2), {"host": 2}).seconds == 5


def test_data_for_commands() -> None:
    found = simulate(job([run(1, flops=5), hold(7), post(1, "x", 1)], [take(0, "x"), run(1)], tokens=6), Plain())
    (row, _), (rank, _) = found.table(), found.ranks
    assert row == {"rank": 0, "alike": 1, "busy": 1, "exposed": 0, "bubble": 2, "host": 0, "memory": rank.memory.peak}
    told = json.loads(found.to_json())
    assert (told["seconds"], told["tokens_per_second"], told["memory"]) == (3, 2, 7)
    assert told["critical_path"][0] == ["compute, net.py:1, forward", 2]
    events = found.chrome_trace()
    json.dumps(events)
    boxes = [(one["pid"], one["name"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"]
    assert (0, "mm", 0, 1e6) in boxes
    assert (0, "message", 1e6, 1e6) in boxes
    assert (1, "bubble", 0, 1e6) in boxes
    assert found.intervals(0)[0].place == HERE
