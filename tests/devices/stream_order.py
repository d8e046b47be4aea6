"""Order of streams: could what ranks have issued and waited for hang on devices?

In: for each rank its events, in the order in which its host made them. Out: what is wrong with them, in words. The
rules are those of NCCL and its like under torch:

- a rank has one stream on which it computes; whichever of its threads issues a call, this is its current stream;
- each communicator has a stream of its own on each rank, on which its calls run in the order of issue;
- a call begins on a rank after all that the current stream was given before the call was issued;
- it runs when it has begun on all members, the n-th of one being the n-th of the others;
- `wait` makes the current stream wait for the end of the call; the host goes on.

What comes after what is a graph; a cycle in it is a deadlock. In messages the sender is taken to wait for the taker.

`shared` is stricter: as if all collectives of a rank, or all of its calls, ran on one stream, whatever their
communicators. Devices may run a few at the same time and no more, so NCCL asks for one order over communicators too.
Messages keep none by design: two ranks may send each other something before either receives.

>>> issue = lambda call: Event("issue", (call, 0), "all_reduce")
>>> wait = lambda call: Event("wait", (call, 0), "all_reduce")
>>> faults([[issue("a"), wait("a"), issue("b")], [issue("b"), wait("b"), issue("a")]])
['a cycle: rank 0 waits for all_reduce 0 of a; rank 0 issues all_reduce 0 of b; all_reduce 0 of b; \
rank 1 waits for all_reduce 0 of b; rank 1 issues all_reduce 0 of a; all_reduce 0 of a']
>>> faults([[issue("a"), issue("b"), wait("a")], [issue("b"), issue("a"), wait("b")]])
[]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Call = tuple[str, int]
"""A communicator, and how many calls of it this rank has issued before."""
Node = tuple[str, int] | tuple[int, int]
"""A call, or the so many-th event of a rank."""


@dataclass(frozen=True)
class Event:
    """What one rank does.

    Args:
        what: "issue" or "wait".
        products: how much the rank has computed before.
    """

    what: str
    call: Call
    kind: str
    products: int = 0

    def __str__(self) -> str:
        return f"{'issues' if self.what == 'issue' else 'waits for'} {_told(self.kind, self.call)}"


History = Sequence[Sequence[Event]]
"""By rank."""


def faults(history: History, *, shared: str = "") -> list[str]:
    """What would hang or clash; nothing if all is well.

    Args:
        shared: what shares one stream on each rank: nothing, "collectives", or "all" calls.
    """
    return [*_clashes(history), *_lonely(history), *_cycles(history, shared=shared)]


def never_waited_for(history: History) -> list[str]:
    """Calls that a rank issues and never waits for: whoever reads the result reads what was there before. What is sent
    needs no wait."""
    found = []
    for rank, events in enumerate(history):
        waits = {event.call for event in events if event.what == "wait"}
        issues = [event for event in events if event.what == "issue" and event.kind != "message"]
        found += [f"rank {rank} {event}" for event in issues if event.call not in waits]
    return found


def work_between(events: Sequence[Event]) -> dict[Call, tuple[str, int]]:
    """For each call of a rank its kind, and how much the rank computes between issue and wait."""
    issued = {event.call: event.products for event in events if event.what == "issue"}
    return {
        event.call: (event.kind, event.products - issued[event.call])
        for event in events
        if event.what == "wait" and event.call in issued
    }


def _clashes(history: History) -> list[str]:
    """Calls that are of different kinds on different ranks."""
    kinds: dict[Call, dict[str, int]] = {}
    for rank, events in enumerate(history):
        for event in events:
            kinds.setdefault(event.call, {})[event.kind] = rank
    return [
        f"call {call[1]} of {call[0]} is {' and '.join(f'{kind} on rank {rank}' for kind, rank in found.items())}"
        for call, found in kinds.items()
        if len(found) > 1
    ]


def _lonely(history: History) -> list[str]:
    """Calls that some who use the communicator do not issue."""
    members: dict[str, set[int]] = {}
    issued: dict[Call, set[int]] = {}
    kinds: dict[Call, str] = {}
    for rank, events in enumerate(history):
        for event in events:
            if event.what == "issue":
                members.setdefault(event.call[0], set()).add(rank)
                issued.setdefault(event.call, set()).add(rank)
                kinds[event.call] = event.kind
    return [
        f"{_told(kinds[call], call)} is not issued by ranks {sorted(members[call[0]] - ranks)}"
        for call, ranks in issued.items()
        if ranks != members[call[0]] or len(ranks) == 1
    ]


def _cycles(history: History, *, shared: str) -> list[str]:
    """One of the cycles, if there are any."""
    after = _after(history, shared=shared)
    left = {node: len(before) for node, before in after.items()}
    followers: dict[Node, list[Node]] = {node: [] for node in after}
    for node, before in after.items():
        for one in before:
            followers[one].append(node)
    free = [node for node, count in left.items() if not count]
    while free:
        node = free.pop()
        del left[node]
        for one in followers[node]:
            left[one] -= 1
            if not left[one]:
                free.append(one)
    return [f"a cycle: {'; '.join(_names(history, _walked(after, left)))}"] if left else []


def _walked(after: Mapping[Node, set[Node]], left: Mapping[Node, int]) -> list[Node]:
    """From any node that never becomes free, back along what it comes after, until one comes again."""
    path = [min(left, key=str)]
    while True:
        node = min((one for one in after[path[-1]] if one in left), key=str)
        if node in path:
            return path[path.index(node) :][::-1]
        path.append(node)


def _after(history: History, *, shared: str) -> dict[Node, set[Node]]:
    """For each event and call what it comes after."""
    found: dict[Node, set[Node]] = {}
    for rank, events in enumerate(history):
        before: Call | None = None
        issued = {event.call for event in events if event.what == "issue"}
        for at, event in enumerate(events):
            mine = found.setdefault((rank, at), {(rank, at - 1)} if at else set())
            if event.what == "wait":
                # in a part of a history it may have been issued before
                mine |= {event.call} & issued
                continue
            call = found.setdefault(event.call, set())
            call.add((rank, at))
            earlier = (event.call[0], event.call[1] - 1)
            call |= {earlier} & issued
            if shared == "all" or (shared and event.kind != "message"):
                call |= {before} if before is not None else set()
                before = event.call
    return found


def _names(history: History, nodes: Sequence[Node]) -> Iterator[str]:
    kinds = {event.call: event.kind for events in history for event in events}
    for one, number in nodes:
        if isinstance(one, int):
            yield f"rank {one} {history[one][number]}"
        else:
            yield _told(kinds[one, number], (one, number))


def _told(kind: str, call: Call) -> str:
    return f"{kind} {call[1]} of {call[0]}"
