"""What rank 0 refuses is refused on every rank alike."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from weft.errors import CheckError, PlanError, WeftError
from weft.runtime.jobs.connect import Job
from weft.runtime.links.transport import Stopped
from weft.train.memory.expected import Unforeseen
from weft.train.together import read, shared, written


def on_two(*makes: Any) -> list[list[Any]]:
    """What each of two ranks gets, or what is raised there, one after the other: only rank 0 makes it."""
    store = HashStore()

    def body(rank: int) -> list[Any]:
        transport: Any = SimpleNamespace(rank=rank)
        job, found = Job(transport, store), list[Any]()
        for make in makes:
            try:
                found.append(shared(job, make if rank == 0 else pytest.fail))
            except (WeftError, Stopped, ZeroDivisionError) as error:
                found.append(error)
        return found

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(body, range(2)))


def test_all_ranks_raise_what_rank_0_raises_and_go_on() -> None:
    def refuse() -> Any:
        raise CheckError("wrong", place="model.py:3", remedy="mend it")

    first, second = on_two(refuse, lambda: {"program.py": b"text"}, lambda: {"x": b"%d" % (1 // 0)})
    for error in (first[0], second[0]):
        assert type(error) is CheckError and str(error) == "wrong\n  at: model.py:3\n  try: mend it"
    assert first[1] == second[1] == {"program.py": b"text"}
    # our own faults are told once
    assert isinstance(first[2], ZeroDivisionError) and isinstance(second[2].__cause__, Stopped)


def test_errors_of_all_kinds_travel() -> None:
    for kind in (WeftError, *WeftError.__subclasses__()):
        found = read(written(kind("what", place="where", remedy="how")))
        assert (type(found), found.message, found.place, found.remedy) == (kind, "what", "where", "how")
    assert type(read(written(Unforeseen("what")))).__name__ == "RunError"
    assert read(written(PlanError("only this"))).remedy == ""
