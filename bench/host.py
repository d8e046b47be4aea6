"""What a step costs the host: ours and torch's, with collectives that do nothing.

    python bench/host.py [--rounds 60] [--only FSDP2] [--out bench/results/host.json]

On a device the host only issues work: what limits small steps is how long that takes. Here the tensors are small, and
rank 0 of a job runs over torch's fake process group, which sends nothing and returns at once: what remains of a step is
the host's work. Ours runs over the transport for devices (`runtime/links/device.py`). Pairs, each in a process of its
own, the same model, share of the batch and optimizer on all sides:

    dp=2,zero=3   fully_shard of every block and of the root (FSDP2), on a GPT of 6 blocks
    tp=2          DTensor: parallelize_module with Colwise and Rowwise styles, on a stack of 6 MLPs

(DistributedDataParallel needs results that the fake group does not give.) Sides take turns, step by step, the eager
module on the rank's share among them. Told for each: medians of microseconds of forward and backward, and of zero_grad
and the optimizer's step (time of the process: what else runs on the machine does not count); operators that were
dispatched in forward and backward, and collectives; microseconds for each collective: what forward and backward take
more than the eager module, by collective.

Operators are those that reach a device's tensors: what DTensor does for one operator, not that operator again; FSDP2's
own operators, which copy, count too; calls of the backend and ranges of the profiler do not.

The tensors lie on the CPU. Fake CUDA tensors (`tests/devices/fake_cuda.py`) would be nearer to a device, but a step on
them takes what FakeTensorMode takes for each operator, many times what is to be measured, and FSDP2 makes streams and
events of torch.cuda, which a build without CUDA does not have. Operators and collectives are those of a device: neither
side has other ones there. Times are those of the host, less what small operators compute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "host.json"
RANKS = 2
WARM_UP = 10
LOOKS = 3
"""Steps whose operators are counted: in some of ours ranks compare what they hold."""
CALLS = ("allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "send", "recv")
ISSUED = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "alltoall", "broadcast")
"""What the names of operators of these namespaces begin with that issue a collective."""
NAMESPACES = ("c10d", "_c10d_functional")
UNCOUNTED = (*NAMESPACES, "profiler")

Step = Callable[[], Any]


class Blocks(nn.Module):
    """A stack of MLPs: what torch's styles of tensor parallelism are made for."""

    def __init__(self, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(x)))
        return F.mse_loss(x, y)


@dataclass(frozen=True)
class Case:
    """One pair of sides.

    Args:
        plan: ours; peer: makes torch's of an eager module.
        gpt: the model is a GPT, else a stack of MLPs. shares: each rank has a share of the batch.
    """

    plan: str
    peer: Callable[[nn.Module], nn.Module]
    gpt: bool = True
    shares: bool = True

    def model(self) -> nn.Module:
        from bench.gpt import GPT, Sizes  # noqa: PLC0415 - also in a process of its own

        torch.manual_seed(0)
        return GPT(Sizes(width=64, heads=4, length=16, vocabulary=256)) if self.gpt else Blocks()

    def batch(self, ranks: int) -> tuple[Tensor, Tensor]:
        """Of that many ranks' shares."""
        torch.manual_seed(1)
        if self.gpt:
            tokens = torch.randint(256, (2 * ranks, 17))
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return torch.randn(4, 64), torch.randn(4, 64)


def fully_sharded(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (RANKS,))
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    return fully_shard(module, mesh=mesh)


def styled(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    return parallelize_module(
        module, init_device_mesh("cpu", (RANKS,)), {"up.*": ColwiseParallel(), "down.*": RowwiseParallel()}
    )


CASES = {
    "FSDP2": Case("dp=2,zero=3", fully_sharded),
    "DTensor": Case("tp=2", styled, gpt=False, shares=False),
}


class Dispatched(TorchDispatchMode):
    """Counts operators: those that compute or copy, and those that issue a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.issued = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # what it does with its local tensors comes by here
        namespace, _, name = func._schema.name.partition("::")
        if namespace not in UNCOUNTED:
            self.operators[func._schema.name] += 1
        elif namespace in NAMESPACES and name.lstrip("_").startswith(ISSUED):
            self.issued[name] += 1
        return func(*args, **(kwargs or {}))


class Counted:
    """A group whose calls are counted, and not what it does in them."""

    def __init__(self, group: Any, calls: Counter[str]) -> None:
        self._group, self._calls = group, calls
        vars(self).update({name: partial(self._call, name) for name in CALLS})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _call(self, name: str, *args: Any) -> Any:
        self._calls[name] += 1
        found = getattr(self._group, name)
        if not torch._C._len_torch_dispatch_stack():
            return found(*args)
        with _disable_current_modes():
            return found(*args)


@dataclass(frozen=True)
class Side:
    """One module, trained."""

    gradients: Step
    update: Step


def trained(module: nn.Module, batch: Any) -> Side:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Side(lambda: module(*batch).backward(), update)


def opened(case: Case, calls: Counter[str]) -> nn.Module:
    """Rank 0 of our program, over the transport for devices."""
    from torch._C._distributed_c10d import FakeProcessGroup, HashStore  # noqa: PLC0415

    from weft.compile import compile_program  # noqa: PLC0415
    from weft.runtime.links.backend import Backend  # noqa: PLC0415
    from weft.runtime.links.device import DeviceTransport  # noqa: PLC0415
    from weft.runtime.links.groups import Groups  # noqa: PLC0415
    from weft.train.opened import open_rank  # noqa: PLC0415

    @dataclass(frozen=True)
    class Fake(Backend):
        def make_group(self, store: Any, position: int, size: int, links: Any, **settings: Any) -> Any:
            return Counted(FakeProcessGroup._create_internal(position, size), calls)  # type: ignore[attr-defined]

    class Alone(DeviceTransport):
        """Nobody else is there to tell numbers: all say the same."""

        def tell(self, numbers: Any, group: Any) -> Any:
            return [tuple(numbers)] * len(group)

    files = compile_program(case.model(), case.batch(RANKS if case.shares else 1), case.plan).files
    groups = Groups(HashStore(), 0, Fake("fake", "cpu", host_waits=False), local=True)
    # calls of the fake group are never over
    transport = Alone(HashStore(), groups, RANKS, device=torch.device("cpu"), timeout=1e6)
    return open_rank(files, transport, case.model())


def measured(name: str, rounds: int) -> dict[str, Any]:
    """One pair of sides, in a process of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    case, calls = CASES[name], Counter[str]()
    share = case.batch(1)
    sides = {
        "ours": trained(opened(case, calls), case.batch(RANKS if case.shares else 1)),
        "theirs": trained(case.peer(case.model()), share),
        "eager": trained(case.model(), share),
    }
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for at in range(WARM_UP + rounds):
        for side in sides if at % 2 else reversed(sides):
            start = time.process_time()
            sides[side].gradients()
            between = time.process_time()
            sides[side].update()
            times[side].append((between - start, time.process_time() - between))
    medians = {
        side: [statistics.median(one) * 1e6 for one in zip(*found[WARM_UP:], strict=True)]
        for side, found in times.items()
    }
    told = {}
    for side, one in sides.items():
        operators, issued = min(counted(one, calls) for _ in range(LOOKS))
        more = medians[side][0] - medians["eager"][0]
        told[side] = {
            "us": medians[side][0],
            "update us": medians[side][1],
            "operators": operators,
            "collectives": issued,
            "us per collective": more / issued if issued else None,
        }
    return told


def counted(side: Side, calls: Counter[str]) -> tuple[int, int]:
    """Operators and collectives of one step."""
    calls.clear()
    with Dispatched() as seen:
        side.gradients()
    side.update()
    return seen.operators.total(), calls.total() + seen.issued.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", nargs="*", choices=[*CASES], default=[*CASES])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    from bench.machine import machine  # noqa: PLC0415 - loads torch's parts: --help should not

    found: dict[str, Any] = {}
    for name in options.only:
        case = CASES[name]
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found[name] = pool.submit(measured, name, options.rounds).result()
        for side, one in found[name].items():
            label = {"ours": case.plan, "theirs": name}.get(side, side)
            per = f", {one['us per collective']:.0f} us each" if one["collectives"] else ""
            print(
                f"{label:12} {one['us']:6.0f} us and {one['update us']:5.0f} us, {one['operators']:4} operators, "
                f"{one['collectives']:3} collectives{per}",
                flush=True,
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine(), "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from bench.host import main as run  # the processes look for this module by its name

    run()
