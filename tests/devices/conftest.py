"""Fixture: whoever emulates ranks gets those of devices, over the backend in this process, and is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from tests.devices.in_process import Recorder, run_ranks
from tests.devices.stream_order import faults, never_waited_for
from weft.runtime.links.transport import Transport
from weft.verify import ranks

T = TypeVar("T")


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorder]]:
    """In this test `verify` runs on the transport of devices: its runs so far. What each rank has issued and waited for
    must be in order."""
    found = list[Recorder]()

    def run(num_ranks: int, body: Callable[[Transport], T]) -> list[T]:
        found.append(Recorder())
        return run_ranks(num_ranks, body, recorder=found[-1])

    monkeypatch.setattr(ranks, "run_ranks", run)
    yield found
    assert found, "nothing has run on devices"
    for one in found:
        assert not faults(one.histories, shared="collectives")
        assert not never_waited_for(one.histories)
