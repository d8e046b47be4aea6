"""Kernels of what a test runs, and what ranks write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from weft.cost.compute.device import Device
from weft.cost.compute.kernel import Kernel, kernel_of
from weft.cost.compute.profiled import Profile
from weft.runtime.links.transport import Transport


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kernel = kernel_of(func, args, kwargs or {}, result)
        self.kernels += [] if kernel is None else [kernel]
        return result


def record(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels of a function, in order."""
    with _Recorder() as recorder:
        run()
    return recorder.kernels


def write(transport: Transport, asked: tuple[str, Device, int]) -> None:
    """Add so many kernels to a profile, one at a time."""
    path, device, count = asked
    kernel = Kernel("mm", "", "float32", 10, 10, 10)
    transport.barrier(tuple(range(transport.num_ranks)))
    profile = Profile(device, Path(path))
    for step in range(count):
        one = replace(kernel, key=f'["mm.default", {transport.rank}, {step}, {{}}]')
        profile.add([one], {one.key: 1e-6 * (step + 1)})
