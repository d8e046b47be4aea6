"""Ledger: bytes of a rank by kind, counted from tensors that are alive.

    Bytes := parameters, kept weights, gradients, optimizer state, saved activations, messages, buffers; peak of all

In: a module, its optimizer, and a step that runs under the Ledger. Out: Bytes. Every storage counts once and whole,
whatever number of tensors lie in it: a part that is a view of a kept whole counts as the whole.

Saved activations are storages that operators made inside a forward of a ParallelModule and that are still alive at its
end, the most at the end of any forward of the step, those of earlier micro-batches among them: what autograd keeps,
whoever keeps it, and what goes on to other ranks. Peak: the most that operators had made and that was alive at once,
in forward, backward or update, with all that was there before.
Promised: real and fake tensors are counted alike. What operators do not make (memory shared with other processes) is
told by the transport.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from weft.runtime.program.module import ParallelModule

KINDS = ("parameters", "kept", "gradients", "optimizer", "activations", "messages", "buffers")


@dataclass(frozen=True)
class Bytes:
    """What one rank holds.

    Args:
        parameters: as they are stored.
        kept: weights as they are used, beside their stored parts, from step to step.
        optimizer: its state.
        activations: kept between forward and backward, at most.
        messages: memory of the transport in which collectives lay what they send.
        buffers: the model's, and constants of the program.
        peak: the most of all together at any moment of a step.
    """

    parameters: int = 0
    kept: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    messages: int = 0
    buffers: int = 0
    peak: int = 0

    @property
    def state(self) -> int:
        """What lives from step to step."""
        return self.parameters + self.kept + self.gradients + self.optimizer + self.buffers

    def as_json(self) -> dict[str, int]:
        return asdict(self)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the distinct storages of tensors."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return found


def state_tensors(optimizer: Any) -> Iterator[Tensor]:
    """All tensors that an optimizer keeps."""
    for state in optimizer.state.values():
        yield from (one for one in pytree.tree_leaves(dict(state)) if isinstance(one, Tensor))


@dataclass(frozen=True)
class RankMemory:
    """Whose memory is counted: one rank's.

    Args:
        programs: that hold what the module stores.
        messages: gives the memory in which the transport lays what it sends; gradients may lie in it too.
    """

    module: nn.Module
    optimizer: Any
    programs: Sequence[ParallelModule]
    messages: Callable[[], Iterable[Tensor]] = tuple

    def held(self) -> dict[str, dict[int, int]]:
        """Storages that are alive now, by kind; each under the first kind that it is of."""
        parameters = list(self.module.parameters())
        constants = [one for program in self.programs for one in program.constants.values()]
        found = {
            "parameters": storages(parameters),
            "kept": storages(
                one for program in self.programs for one in (*program.parameters(), *program.full_weights.memory())
            ),
            "gradients": storages(one.grad for one in parameters if one.grad is not None),
            "optimizer": storages(state_tensors(self.optimizer)),
            "buffers": storages((*self.module.buffers(), *constants)),
        }
        seen: set[int] = set()
        for kind, each in found.items():
            found[kind] = {key: size for key, size in each.items() if key not in seen}
            seen.update(each)
        return found

    def lasting(self) -> dict[int, int]:
        """Storages that are there before a step begins."""
        return {key: size for kind, each in self.held().items() if kind != "gradients" for key, size in each.items()}


class Ledger(TorchDispatchMode):
    """Counts storages that operators make while it is on.

    Args:
        known: gives the storages that count as something else than activations.
    """

    def __init__(self, known: Callable[[], Collection[int]]) -> None:
        super().__init__()
        self.now = self.peak = self.activations = 0
        self._known, self._depth, self._hooks = known, 0, ExitStack()
        self._live: dict[int, tuple[weakref.ref[Any], int, bool]] = {}
        """By storage: what tells of its end, its bytes, and whether a forward made it."""
        # storages may end in the thread of another lane, or while a lock is held here
        self._lock = threading.RLock()

    def __enter__(self) -> Ledger:
        for hook in (
            register_module_forward_pre_hook(self._begin_forward),
            register_module_forward_hook(self._end_forward),
        ):
            self._hooks.callback(hook.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count(result, args, kwargs)
        return result

    def _count(self, result: Any, args: Any, kwargs: Any) -> None:
        """What a call made."""
        made = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
        if made:
            given = storages(_strided(pytree.tree_leaves((args, kwargs))))
            for tensor in _strided(made):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._live:
                    self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            self._live[key] = weakref.ref(storage, lambda _: self._forget(key)), size, self._depth > 0
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        with self._lock:
            found = self._live.pop(key, None)
            self.now -= 0 if found is None else found[1]

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        self._depth += isinstance(module, ParallelModule)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, ParallelModule):
            self._depth -= 1
            known = self._known()
            with self._lock:
                kept = sum(size for key, (_, size, made) in self._live.items() if made and key not in known)
            self.activations = max(self.activations, kept)


def _strided(leaves: Iterable[Any]) -> Iterator[Tensor]:
    return (one for one in leaves if isinstance(one, Tensor) and one.layout is torch.strided)


def counted_step(memory: RankMemory, step: Callable[[], Any]) -> Bytes:
    """Run a step, forward to update, and count; it leaves gradients where they are."""

    def known() -> set[int]:
        return {key for each in (storages(memory.messages()), *memory.held().values()) for key in each}

    before = sum(memory.lasting().values())
    with Ledger(known) as ledger:
        step()
    held, lasting = memory.held(), memory.lasting()
    carried = {key: size for key, size in storages(memory.messages()).items() if key not in lasting}
    return Bytes(
        **{kind: sum(each.values()) for kind, each in held.items()},
        activations=ledger.activations,
        messages=sum(size for key, size in carried.items() if key not in held["gradients"]),
        peak=before + ledger.peak + sum(carried.values()),
    )
