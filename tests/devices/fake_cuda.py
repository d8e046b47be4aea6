"""Training steps of one rank on fake CUDA tensors, over torch's fake process group: a script of its own process.

In: the library that `fake_cuda.cpp` makes, and cases, JSON each (`Case`). Out: a line of JSON for each: the calls of
the backend in the last step, and in an evaluation, by kind and their bytes, the threads that made them, where
parameters, gradients and the loss lie, and what touched the host where nothing was to. Nothing is computed and nothing
is sent: what is seen is which calls are made, with which shapes, and that no operator mixes devices.

Steps are counted from 0. In the first ones the host may read numbers: it gets ones and zeros. In step `STRICT`, in
which ranks do not compare what they hold (`is_due`), whatever the host would have to wait for (`.item()`, boolean
indexing) and every tensor that lies there is noted, the optimizer's included. Other ranks are taken to say what this
one says, but for what they store.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

CALLS = ("allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "send", "recv")
ROOT = Path(__file__).parents[2]
STEPS, STRICT = 4, 3


@dataclass(frozen=True)
class Case:
    """What is run.

    Args:
        file: below examples/, with `:function` if a function makes the model.
        devices: of a plan file. rank: of the job.
        precision: as of `parallelize`.
        does: "accumulate": two backwards before each update; "clip", "scale": as of train_step; "evaluate": one
            evaluation after the last step, and another one that is strict.
    """

    file: str
    plan: str
    devices: int | None = None
    rank: int = 0
    replicas: int = 1
    precision: str | None = None
    does: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = [f"{self.devices} devices" * bool(self.devices), f"rank {self.rank}" * bool(self.rank)]
        told += [f"{self.replicas} replicas" * (self.replicas > 1), self.precision or "", *self.does]
        return " ".join([self.file, self.plan, *filter(None, told)])


def load(library: str) -> None:
    """Before torch is imported, and after its own library: hooks are registered once. No symbol becomes global: ortools
    has others of the same names."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"))
    ctypes.CDLL(library)


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


def place() -> str:
    """The innermost line of the project, this file apart."""
    frames = [one for one in traceback.extract_stack() if one.filename.startswith(str(ROOT))]
    own = [one for one in frames if one.filename != __file__ and "site-packages" not in one.filename]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"


def watcher() -> Any:
    import torch
    from torch._subclasses import FakeTensor
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    number, equal = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default

    class Watcher(TorchDispatchMode):
        """Answers what the host reads with a one or a zero; where it is strict it notes that, and tensors there."""

        def __init__(self) -> None:
            super().__init__()
            self.strict = False
            self.found: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (number, equal) and isinstance(args[0], FakeTensor) and args[0].constant is None:
                self._note(func)
                kind = args[0].dtype
                return True if func is equal else False if kind == torch.bool else 1.0 if kind.is_floating_point else 0
            out = func(*args, **(kwargs or {}))
            leaves = pytree.tree_leaves((args, kwargs, out))
            if any(isinstance(one, torch.Tensor) and one.device.type == "cpu" and one.numel() for one in leaves):
                self._note(func)
            return out

        @contextmanager
        def being(self, *, strict: bool) -> Iterator[None]:
            self.strict = strict
            yield
            self.strict = False

        def _note(self, func: Any) -> None:
            if self.strict:
                self.found[f"{func} {place()}"] += 1

    return Watcher()


def make_transport(case: Case, num_ranks: int, seen: Seen) -> Any:
    """The transport of devices, over a group that sends nothing."""
    import torch
    from torch._C._distributed_c10d import FakeProcessGroup, HashStore

    from weft.runtime.links.backend import Backend
    from weft.runtime.links.device import DeviceTransport
    from weft.runtime.links.groups import Groups
    from weft.runtime.links.wire import num_bytes

    @dataclass(frozen=True)
    class Fake(Backend):
        def make_group(self, store: Any, position: int, size: int, links: Any, **settings: Any) -> Any:
            return Counted(FakeProcessGroup._create_internal(position, size), seen)

    class Alone(DeviceTransport):
        """Whoever is to have posted something has; all say the same."""

        def take(self, peer: int, tag: str, expects: Any) -> Any:
            if peer != self.rank and not self._inbox.has(peer, tag):
                self.store.set(f"post/{peer}/{self.rank}/{self._received[peer]}", f"{num_bytes(expects)} {tag}")
            return super().take(peer, tag, expects)

        def tell(self, numbers: Any, group: Any) -> Any:
            return [tuple(numbers)] * len(group)

    groups = Groups(HashStore(), case.rank, Fake("fake", "cuda", host_waits=False), local=True)
    return Alone(HashStore(), groups, num_ranks, device=torch.device("cuda:0"), timeout=600.0)


def others_agree(files: Any) -> None:
    """What ranks tell each other in the first step and before: what they store is known, else all say the same."""
    import torch

    from weft.runtime.checks import guarded
    from weft.runtime.checks.replicated import Replicated
    from weft.runtime.links.fake_transport import FakeTransport
    from weft.runtime.links.replicas import Replica
    from weft.runtime.training import clip, parallel, shard_owners
    from weft.runtime.training.flow import open_trained

    def stored() -> Any:
        found = []
        for rank in range(files.devices):
            fake = FakeTransport(rank, files.devices, torch.device("cuda:0"))
            pieces = open_trained(files, Replica(fake, files.devices), None)[1]
            found.append(dict(pieces.stored))
        return shard_owners.ShardOwners(tuple(found))

    for module in (guarded, clip):
        module.exchange = lambda program: stored()
    for one in (parallel, guarded):
        one.tell_all = lambda transport, value: [value] * transport.num_ranks
    Replicated._shared = lambda self: [[key for key, _ in self._held]] * len(self._everyone)


def open_case(case: Case, seen: Seen) -> tuple[Any, Any]:
    """The rank's module, and the batch of its replica."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils import _pytree as pytree

    from weft.capture.example import split_example
    from weft.compile.model_file import load_model_file
    from weft.compile.programs import Programs
    from weft.compile.subject import in_precision
    from weft.runtime.program.files import files_of
    from weft.runtime.program.surface import surface_of
    from weft.runtime.start.initialise import original_order
    from weft.train.opened import open_rank

    with unset_fake_temporarily():
        subject = in_precision(load_model_file(ROOT / "examples" / case.file), case.precision)
        programs = Programs(lambda module: subject, case.plan, case.devices, cache=None)
        files = files_of(programs.training(subject.model))
        surface = surface_of(subject.model, lambda: subject.model, split_example(subject.example))

    def more(wanted: Any) -> Any:
        with unset_fake_temporarily():
            return programs(wanted)

    others_agree(files)
    module = open_rank(
        files,
        make_transport(case, files.devices * case.replicas, seen),
        None,
        known=original_order(subject.model),
        make_files=more,
        reduction=subject.reduction,
        mixed=None if subject.precision is None else subject.precision.mixed(subject.model),
        surface=surface,
    )
    # how batches get there is shown by test_inputs.py
    batch = pytree.tree_map_only(torch.Tensor, lambda one: one.to("cuda:0"), subject.example)
    return module, batch


def made_step(case: Case, module: Any, batch: Any) -> Callable[[], Any]:
    """A step of training."""
    import torch

    import weft

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    clip = partial(weft.clip_grad_norm_, module, 1.0) if "clip" in case.does else None
    scaler = weft.GradScaler("cuda") if "scale" in case.does else None

    def step() -> Any:
        if "accumulate" not in case.does:
            return module.train_step(batch, optimizer, prepare=clip, scaler=scaler)
        optimizer.zero_grad()
        losses = [module.forward_backward(batch) for _ in range(2)]
        if clip is not None:
            clip()
        optimizer.step()
        return losses[-1]

    return step


def run_case(case: Case) -> dict[str, Any]:
    import torch
    from torch._subclasses import FakeTensorMode

    from weft.runtime.checks.replicated import is_due
    from weft.runtime.training.step import call

    assert not is_due(STRICT)
    seen, watch, calls = Seen(), watcher(), {}
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        module, batch = open_case(case, seen)
        step = made_step(case, module, batch)
        for number in range(STEPS):
            seen.take()
            with watch.being(strict=number == STRICT):
                loss = step()
            calls["step"] = seen.take()
        held = [parameter for parameter in module.parameters() if parameter.numel()]
        where = {str(one.device) for part in held for one in (part, part.grad, loss) if one is not None}
        if "evaluate" in case.does:
            module.eval()
            # in the first evaluation after a step ranks compare what they hold
            for strict in (False, True):
                seen.take()
                with torch.no_grad(), watch.being(strict=strict):
                    call(module, batch)
                calls["evaluation"] = seen.take()
            module.train()
    return {
        "calls": calls,
        "where": sorted(where),
        "threads": sorted(seen.threads),
        "missing": sum(one.grad is None and one.requires_grad for one in held),
        "on host": dict(watch.found),
    }


def main(library: str, *cases: str) -> None:
    load(library)
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from weft.runtime.program import load as loading
    from weft.runtime.training import step as stepping

    # fake tensors have no pinned memory, and no values could be moved to a device that is not there
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign, assignment]
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    real = loading.load_constants
    loading.load_constants = lambda piece, device: {
        name: torch.empty_like(one, device=device) for name, one in real(piece, "cpu").items()
    }
    # the original lies on the host
    stepping.modes_after = unset_fake_temporarily()(stepping.modes_after)
    for case in cases:
        try:
            found = run_case(Case(**json.loads(case)))
        except Exception:  # noqa: BLE001 - told by the test
            found = {"failed": traceback.format_exc()}
        print(json.dumps({"case": case, **found}), flush=True)
    # autograd's threads of devices that are not there cannot be joined
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
