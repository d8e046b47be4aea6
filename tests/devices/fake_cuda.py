"""Training steps of one rank on fake CUDA tensors, over torch's fake process group: a script of its own process.

In: the library that `fake_cuda.cpp` makes, and cases, `FILE PLAN` each. Out: a line of JSON for each: the calls of the
backend in the steps by kind and their bytes, the threads that made them, where parameters and gradients lie, and
operators of the second step that touch the host. Nothing is computed and nothing is
sent: what is seen is which calls are made, with which shapes, and that no operator mixes devices. A number that the
host would have to wait for (`.item()`, boolean indexing) is an error here: a fake tensor has none.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALLS = ("allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "send", "recv")
ROOT = Path(__file__).parents[2]


def load(library: str) -> None:
    """Before torch is imported, and after its own library: hooks are registered once."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


@dataclass
class Seen:
    """What a backend was asked for."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    threads: set[str] = field(default_factory=set)

    def take(self) -> dict[str, list[int]]:
        """Calls and bytes by kind; counting begins anew."""
        found = {kind: [number, self.bytes[kind]] for kind, number in sorted(self.calls.items())}
        self.calls.clear(), self.bytes.clear()
        return found


class Counted:
    """A group whose calls are counted."""

    def __init__(self, group: Any, seen: Seen) -> None:
        self._group, self._seen = group, seen

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name not in CALLS:
            return found

        def call(*args: Any) -> Any:
            # the larger side: what each member ends up with, or begins with
            sides = [args[0]] if isinstance(args[0], list) else [[one] for one in args[:2] if hasattr(one, "nbytes")]
            self._seen.calls[name] += 1
            self._seen.bytes[name] += max(sum(one.nbytes for one in side) for side in sides)
            self._seen.threads.add(threading.current_thread().name)
            # the fake group takes an exchange for a mistake in which this rank only receives
            return found(*args) if name != "alltoall_base" or args[1].numel() else self._group.allreduce([args[0]])

        return call


def run_case(file: str, plan: str) -> dict[str, Any]:
    import torch
    from torch._C._distributed_c10d import FakeProcessGroup, HashStore
    from torch._subclasses import FakeTensorMode
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    from weft.capture.example import split_example
    from weft.compile import compile_subject
    from weft.compile.model_file import load_model_file
    from weft.runtime.links.backend import Backend
    from weft.runtime.links.device import DeviceTransport
    from weft.runtime.links.groups import Groups
    from weft.runtime.links.replicas import Replica
    from weft.runtime.program.files import files_of
    from weft.runtime.training.flow import open_trained

    seen = Seen()

    @dataclass(frozen=True)
    class Fake(Backend):
        def make_group(self, store: Any, position: int, size: int, links: Any, **settings: Any) -> Any:
            return Counted(FakeProcessGroup._create_internal(position, size), seen)

    class OnHost(TorchDispatchMode):
        """Operators that read or make tensors of the host."""

        def __init__(self) -> None:
            super().__init__()
            self.found: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            leaves = pytree.tree_leaves((args, kwargs, out))
            if any(isinstance(one, torch.Tensor) and one.device.type == "cpu" and one.numel() for one in leaves):
                self.found[str(func)] += 1
            return out

    subject = load_model_file(ROOT / file)
    files = files_of(compile_subject(subject, plan).files)
    groups = Groups(HashStore(), 0, Fake("fake", "cuda", host_waits=False), local=True)
    transport = DeviceTransport(HashStore(), groups, files.devices, device=torch.device("cuda:0"))
    steps = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        flow, pieces, _ = open_trained(files, Replica(transport, files.devices), None)
        held = [parameter for module in pieces.modules for _, parameter in module.trained()]
        optimizer = torch.optim.AdamW(held, lr=1e-3, foreach=True)

        def step(batch: Any, mode: Any) -> torch.Tensor:
            args, kwargs = split_example(batch)
            optimizer.zero_grad()
            with mode:
                loss: torch.Tensor = flow.program(*args, **kwargs)
                loss.backward()
            # torch's optimizers count their steps on the host
            optimizer.step()
            steps.append(seen.take())
            return loss

        # how batches get there is shown by test_inputs.py
        batch = pytree.tree_map_only(torch.Tensor, lambda one: one.to("cuda:0"), subject.example)
        loss, on_host = step(batch, nullcontext()), OnHost()
        step(batch, on_host)
        where = sorted({str(one.device) for part in held for one in (part, part.grad, loss) if one is not None})
    return {
        "case": [file, plan],
        "calls": steps,
        "where": where,
        "threads": sorted(seen.threads),
        "missing": sum(one.grad is None for one in held),
        "on host": dict(on_host.found),
    }


def main(library: str, *cases: str) -> None:
    load(library)
    import torch

    from weft.runtime.program import load as loading

    # fake tensors have no pinned memory, and no values could be moved to a device that is not there
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign, assignment]
    real = loading.load_constants
    loading.load_constants = lambda piece, device: {
        name: torch.empty_like(one, device=device) for name, one in real(piece, "cpu").items()
    }
    for file, plan in zip(cases[::2], cases[1::2], strict=True):
        print(json.dumps(run_case(file, plan)), flush=True)
    # autograd's threads of devices that are not there cannot be joined
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
