"""A training step of one rank on fake CUDA tensors, over torch's fake process group: a script of its own process.

In: the library that `fake_cuda.cpp` makes, a plan. Out: as JSON, the calls of the backend in the second step by kind,
those of other threads than the caller's and autograd's, and where parameters and gradients lie. Nothing is computed and
nothing is sent: what is seen is which calls are made, with which shapes, and that no operator mixes devices.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALLS = ("allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "send", "recv")


def load(library: str) -> None:
    """Before torch is imported, and after its own library: hooks are registered once."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


class Counted:
    """A group whose calls are counted."""

    def __init__(self, group: Any, calls: Counter[str], threads: set[str]) -> None:
        self._group, self._calls, self._threads = group, calls, threads

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name not in CALLS:
            return found

        def call(*args: Any) -> Any:
            self._calls[name] += 1
            self._threads.add(threading.current_thread().name)
            return found(*args)

        return call


def main(library: str, plan: str) -> None:
    load(library)
    import torch
    from torch._C._distributed_c10d import FakeProcessGroup, HashStore
    from torch._subclasses import FakeTensorMode

    from tests.models import GPT, GPTConfig
    from weft.compile import compile_program
    from weft.runtime.links.backend import Backend
    from weft.runtime.links.device import DeviceTransport
    from weft.runtime.links.groups import Groups
    from weft.runtime.links.replicas import Replica
    from weft.runtime.program.files import files_of
    from weft.runtime.training.flow import open_trained

    calls, threads = Counter[str](), set[str]()

    @dataclass(frozen=True)
    class Fake(Backend):
        def make_group(self, store: Any, position: int, size: int, links: Any, **settings: Any) -> Any:
            return Counted(FakeProcessGroup._create_internal(position, size), calls, threads)

    # fake tensors have no pinned memory
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign, assignment]
    ids = torch.zeros(4, 8, dtype=torch.int64)
    files = files_of(compile_program(GPT(GPTConfig(dropout=0.0, tied=False)), (ids, ids), plan).files)
    backend = Fake("fake", "cuda", host_waits=False)
    groups = Groups(HashStore(), 0, backend, local=True)
    transport = DeviceTransport(HashStore(), groups, files.devices, device=torch.device("cuda:0"))
    steps = list[dict[str, int]]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        flow, pieces, _ = open_trained(files, Replica(transport, files.devices), None)
        held = [parameter for module in pieces.modules for _, parameter in module.trained()]
        optimizer = torch.optim.AdamW(held, lr=1e-3)
        for _ in range(2):
            calls.clear()
            optimizer.zero_grad()
            loss = flow.program(ids, ids)
            loss.backward()
            optimizer.step()
            steps.append(dict(calls))
        where = sorted({str(one.device) for part in held for one in (part, part.grad, loss) if one is not None})
    found = {"calls": steps, "where": where, "threads": sorted(threads)}
    print(json.dumps({**found, "missing": sum(one.grad is None for one in held)}))
    sys.stdout.flush()
    # autograd's threads of devices that are not there cannot be joined
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
