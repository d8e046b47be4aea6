"""Crew: the ranks of an emulated module, a thread each, that live as long as the module.

In: a function that makes a rank's module on its transport. Out: work done on every rank under the caller's settings,
the results in rank order. When a rank fails, all end, and the error names it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from weft.errors import RunError, WeftError
from weft.runtime.links.transport import Transport
from weft.runtime.program.context import Ambient, TorchModes
from weft.runtime.training.parallel import Parallel
from weft.verify.ranks import emulate

GOODBYE = 2.0
"""Seconds that ranks get to end."""

Make = Callable[[Transport], Parallel]
Work = Callable[..., Any]


class Crew:
    """Threads that each keep one rank's module and do what they are told with it."""

    modules: Sequence[Parallel]

    def __init__(self, num_ranks: int, make: Make) -> None:
        self._told: list[queue.SimpleQueue[Work | None]] = [queue.SimpleQueue() for _ in range(num_ranks)]
        self._heard: queue.SimpleQueue[tuple[int, Any] | WeftError] = queue.SimpleQueue()
        told, heard = self._told, self._heard

        def body(transport: Transport) -> None:
            try:
                module = make(transport)
                heard.put((transport.rank, module))
                while (work := told[transport.rank].get()) is not None:
                    heard.put((transport.rank, work(module)))
            finally:
                # one rank that ends, for whatever reason, ends all
                for other in told:
                    other.put(None)

        def run() -> None:
            try:
                emulate(num_ranks, body)
            except WeftError as error:
                heard.put(error)

        thread = threading.Thread(target=run, name="ranks", daemon=True)
        thread.start()
        weakref.finalize(self, _dismiss, told, thread)
        self.modules = self._answers()

    def each(self, work: Work, *given: Sequence[Any]) -> list[Any]:
        """Do something on every rank, with its own of each of the values given; the results in rank order."""
        ambient, modes = Ambient.here(), TorchModes.here()

        def as_here(mine: Sequence[Any], module: Parallel) -> Any:
            with ambient.entered(), modes.entered():
                return work(module, *mine)

        for told, *mine in zip(self._told, *given, strict=True):
            told.put(partial(as_here, mine))
        return self._answers()

    def _answers(self) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < len(self._told):
            answer = self._heard.get()
            if isinstance(answer, WeftError):
                # the ranks are gone: the next call must hear of it too
                self._heard.put(answer)
                raise RunError(answer.message, place=answer.place, remedy=answer.remedy) from answer
            found[answer[0]] = answer[1]
        return [found[rank] for rank in sorted(found)]


def _dismiss(told: Sequence[queue.SimpleQueue[Work | None]], thread: threading.Thread) -> None:
    for one in told:
        one.put(None)
    if threading.current_thread() is threading.main_thread():
        # threads of torch that are still running when the interpreter ends abort the process
        thread.join(GOODBYE)
