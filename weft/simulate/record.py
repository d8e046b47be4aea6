"""Recording: the Trace of a rank, from its own code on tensors without content.

In: the files of a program, a model, a rank. Out: its Trace of one step: every kernel that its device runs in forward,
backward and update, every collective and message, and every storage that is made and let go, each with the place in
the user's code. So what is simulated is the program that runs: its fused products, its buckets and prefetches, what it
runs twice. Nothing is computed.

Of a pipeline with many micro-batches a few are run, and the events of the others are copies (`repeat.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.compile import Compiled
from weft.compile.model_file import Subject
from weft.cost.compute.kernel import Kernel, kernel_of
from weft.errors import RunError
from weft.runtime.checks.ledger import Ledger, RankMemory, storages
from weft.runtime.program.files import files_of
from weft.runtime.program.lines import place_here
from weft.simulate.recorded import RecordedTransport
from weft.simulate.repeat import repeat
from weft.simulate.trace import BACKWARD, FORWARD, UPDATE, Event, Hold, Place, Run, Trace
from weft.train.memory.expected import Unforeseen, alike_ranks, foreseen_step

ROUNDING = 512
"""Bytes of which devices' allocators give multiples."""
sequence_number = torch._C._autograd._get_sequence_nr
current_node = torch._C._current_autograd_node
ASKED = torch.ops.prim.device.default


class Recorder(Ledger):
    """Notes what operators do while it is on.

    Args:
        events: where to. rounding: memory is taken in multiples of so many bytes.
    """

    def __init__(self, events: list[Event], rounding: int = 1) -> None:
        super().__init__(set)
        self.events, self._rounding = events, rounding
        self._taken: dict[int, Hold] = {}
        self.transport: RecordedTransport | None = None
        self.is_update = False
        self._lines: dict[int, str] = {}
        """The user's line of each node of the graph, by its number."""
        self._places: dict[Place, Place] = {}
        self._kernels: dict[str, Kernel] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing here is compiled, and what keeps torch.compile away takes a tenth of the time
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKED and isinstance(args[0], FakeTensor):
            # of four calls three ask for a device
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        self._count(result, args, kwargs)
        if self.transport is not None and not self.transport.is_carrying:
            kernel = kernel_of(func, args, kwargs or {}, result)
            if kernel is not None:
                self.events.append(Run(self._kernels.setdefault(kernel.key, kernel), self.place()))
        return result

    def place(self) -> Place:
        """Where the rank is."""
        if self.is_update:
            return self._place(UPDATE, "", "")
        doing = "" if self.transport is None else self.transport.doing.what
        node = current_node()
        if node is not None:
            return self._place(BACKWARD, self._lines.get(node._sequence_nr(), ""), doing)
        # without the line of the program, which is not at hand
        line = place_here().partition(" (")[0]
        if self._depth:
            self._lines[sequence_number() - 1] = line
        return self._place(FORWARD if self._depth else BACKWARD, line, doing)

    def _place(self, phase: str, line: str, what: str) -> Place:
        found = Place(phase, line, what)
        return self._places.setdefault(found, found)

    def _add(self, storage: torch.UntypedStorage) -> None:
        super()._add(storage)
        found = Hold(self._allocated(storage.nbytes()), self._kind(), self.place())
        self._taken[storage._cdata] = found
        self.events.append(found)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        found = self._taken.pop(key, None)
        if found is not None:
            self.events.append(replace(found, bytes=-found.bytes))

    def _kind(self) -> str:
        if self.is_update:
            return "update"
        return "activations" if self._depth else "gradients"

    def _allocated(self, num_bytes: int) -> int:
        """Bytes of memory that are taken for so many."""
        return -(-num_bytes // self._rounding) * self._rounding


def record_rank(files: Any, subject: Subject, rank: int, *, by_block: bool) -> tuple[list[Event], dict[str, int]]:
    """The events of one rank's step, and the bytes that it holds from step to step."""
    events: list[Event] = []
    recorder = Recorder(events, ROUNDING if by_block else 1)
    transport = RecordedTransport(rank, files_of(files).devices, [], recorder.place, by_block=by_block)
    with foreseen_step(files, subject, transport) as one:
        memory = RankMemory(one.module, one.optimizer, one.module.program.modules, transport.memory)
        state = {kind: sum(each.values()) for kind, each in memory.held().items() if kind != "gradients"}
        hooks = (
            one.optimizer.register_step_pre_hook(lambda *_: setattr(recorder, "is_update", True)),
            one.optimizer.register_step_post_hook(lambda *_: setattr(recorder, "is_update", False)),
        )
        transport.events, recorder.transport = events, transport
        repeat(one.module.pipeline, events)
        with recorder:
            one.run()
            recorder.transport = None
        for hook in hooks:
            hook.remove()
        lent = storages(memory.messages())
        messages = transport.num_bytes + sum(lent[key] for key in lent.keys() - memory.lasting().keys())
    return events, {**state, "messages": messages}


def record(
    compiled: Compiled, subject: Subject, *, by_block: bool, kind: Callable[[int], object] = lambda rank: ""
) -> Sequence[Trace]:
    """The Traces of all ranks, one of each kind of ranks.

    Args:
        kind: of a rank's device: ranks on devices of several kinds are not alike.
    """
    found = []
    for same in alike_ranks(compiled):
        for alike in _by_kind(same, kind):
            try:
                events, state = record_rank(compiled.files, subject, alike[0], by_block=by_block)
            except Unforeseen as error:
                raise RunError(
                    f"what a step does cannot be told without running it: {error.__cause__ or error.message}",
                    place=error.place,
                    remedy="run it: weft train FILE --plan P; what does as much for any values can be told",
                ) from error
            found.append(Trace(alike[0], alike, tuple(events), state))
    return found


def _by_kind(ranks: Sequence[int], kind: Callable[[int], object]) -> list[tuple[int, ...]]:
    found: dict[object, list[int]] = {}
    for rank in ranks:
        found.setdefault(kind(rank), []).append(rank)
    return [tuple(one) for one in found.values()]
