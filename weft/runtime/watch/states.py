"""States: what each rank of a job was doing when it last told, and how ranks have failed.

In: the job's store. Out: who waits for whom in which call, in words; whether anybody can go on; failures, as they
travel to the others and to the launcher.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from weft.runtime.links.backend import Store
from weft.runtime.links.transport import CollectiveMismatch, Doing, PeerFailed, PeerLost, Stopped

MAIN = "main"
"""The lane of the calls that a rank makes itself."""
MESSAGES = " messages"
RAISED = " raised"
OPENING = " opening"


class Busy(NamedTuple):
    """What a rank does, in which step, of which module if it has several."""

    doing: Doing = Doing()
    step: int | None = None
    whose: str = ""

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.doing}{step}{self.whose and f' of {self.whose}'}"


@dataclass(frozen=True)
class Failure:
    """How a rank ended, if not well. `sort`: error | mismatch | lost (a peer went away) | stopped | died."""

    rank: int
    sort: str
    error: str
    message: str
    what: str = ""
    place: str = ""
    step: int | None = None
    trace: str = ""
    waits: Mapping[int, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Failure:
        found = json.loads(text)
        found["waits"] = {int(rank): what for rank, what in found["waits"].items()}
        return Failure(**found)


def state_key(rank: int) -> str:
    return f"state/{rank}"


def failure_key(rank: int) -> str:
    return f"failure/{rank}"


def read_states(store: Store, num_ranks: int, first: int = 0) -> dict[int, dict[str, Any]]:
    """The last published state of each rank, from the first, that has published one."""
    keys = {rank: state_key(rank) for rank in range(first, num_ranks)}
    return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}


def read_state(store: Store, rank: int) -> dict[str, Any]:
    """The last published state of a rank, if there is one."""
    return read_states(store, rank + 1, rank).get(rank, {})


def is_deadlock(states: Mapping[int, Mapping[str, Any]], num_ranks: int) -> bool:
    """True if every rank waits or has ended, and no call that one waits in has all of its members.

    >>> waiting = {"state": "blocked", "calls": [["main (0, 1)", 0, [0, 1], "barrier"]], "counts": {"main (0, 1)": 1}}
    >>> is_deadlock({0: waiting, 1: {"state": "ended", "calls": [], "counts": {}}}, 2), is_deadlock({0: waiting}, 2)
    (True, False)
    """
    if len(states) < num_ranks or any(state["state"] == "running" for state in states.values()):
        return False
    calls = [call for state in states.values() if state["state"] == "blocked" for call in state["calls"]]
    return bool(calls) and all(missing(states, call) for call in calls)


def missing(states: Mapping[int, Mapping[str, Any]], call: list[Any]) -> list[int]:
    key, number, group, _ = call
    return [rank for rank in group if rank not in states or states[rank]["counts"].get(key, 0) <= number]


def moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return any(before[key] != now[key] for key in ("state", "calls", "counts"))


def describe(states: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """For each rank, what it does and for whom it waits."""
    return {rank: _describe(states, state) for rank, state in states.items()}


def _describe(states: Mapping[int, Mapping[str, Any]], state: Mapping[str, Any]) -> str:
    if state["state"] == "ended":
        return "has ended"
    if not state["calls"]:
        return f"is running ({state['doing']})"
    call = state["calls"][0]
    absent = " and ".join(map(str, missing(states, call)))
    if call[0].endswith(RAISED):
        return f"raised {call[3]}"
    waiting = f", waiting for rank {absent}" if absent else ""
    return f"is in {call[3]}, call {call[1]} of group {tuple(call[2])}{waiting} ({state['doing']})"


def alone(states: Mapping[int, Mapping[str, Any]]) -> str:
    """Who raised an error that others did not raise, if somebody did."""
    found = {rank: call[3] for rank, state in states.items() for call in state["calls"] if call[0].endswith(RAISED)}
    return "; ".join(f"rank {rank} raised {what}, and other ranks did not" for rank, what in found.items())


SORTS = {CollectiveMismatch: "mismatch", Stopped: "stopped", PeerFailed: "stopped", PeerLost: "lost"}


def failure_of(rank: int, error: BaseException, busy: Busy) -> Failure:
    """What a rank raised, as it travels to the launcher."""
    sort, trace = SORTS.get(type(error), "error"), "".join(traceback.format_exception(error))
    # a mismatch lists below its first line who waits for what
    waits = error.waits if isinstance(error, CollectiveMismatch) else {}
    message = error.first if isinstance(error, CollectiveMismatch) else str(error)
    return Failure(
        rank, sort, type(error).__name__, message, busy.doing.what, busy.doing.place, busy.step, trace, waits
    )
