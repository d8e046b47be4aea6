"""A parallel module in the hands of others: wrapped, compiled, copied. Right, or refused with the way that works."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft
from tests.models import MLP
from weft.errors import RunError


class Around(nn.Module):
    """An eager model with a parallel part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(6, 6).double(), part

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.part(x=self.before(x), y=y)


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(*, grads: bool = False) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    model = MLP().double()
    example = {"x": x.clone().requires_grad_(grads), "y": y}
    return model, weft.parallelize(model, example, "tp=2", cache=None, emulate=True), {"x": x, "y": y}


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "fully_shard": lambda module: fully_shard(module, mesh=init_device_mesh("cpu", (1,))),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.usefixtures("one_process")
def test_what_shards_or_averages_by_itself_is_refused(name: str) -> None:
    _, parallel, batch = made()
    for target in (parallel, Around(parallel), parallel.ranks[0]):
        with pytest.raises(RunError, match=rf"{name}.*is given a parallel module") as caught:
            WRAPPERS[name](target)
        assert "train it as it is" in caught.value.remedy
    parallel(**batch).backward()


def test_replicas_of_data_parallel_are_refused() -> None:
    _, parallel, batch = made()
    with pytest.raises(RunError, match=r"nn.DataParallel is given a parallel module"):
        parallel._replicate_for_data_parallel()
    # on a machine without accelerators it calls the module
    assert torch.equal(nn.DataParallel(parallel)(**batch), parallel(**batch))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: held.grad for name, held in module.named_parameters() if held.grad is not None}


def test_compile_leaves_programs_as_they_are() -> None:
    model, parallel, batch = made(grads=True)
    traced = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return graph.forward

    compiled = torch.compile(parallel, backend=backend)
    loss = compiled(**batch)
    loss.backward()
    parallel.compile(backend=backend)
    assert torch.equal(parallel(**batch), loss) and not traced
    torch.testing.assert_close(loss, model(**batch), rtol=1e-12, atol=0)

    around, eager = Around(made(grads=True)[1]), Around(model)
    eager.load_state_dict(around.state_dict())
    for one in (torch.compile(around, backend=backend), eager):
        one(**batch).backward()
    assert len(traced) == 1
    torch.testing.assert_close(around.before.weight.grad, eager.before.weight.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel])
def test_copies_are_refused(how: Callable[[Any], Any]) -> None:
    _, parallel, _ = made()
    wholes = (parallel,) if how is copy.copy else (parallel, Around(parallel))
    for target in wholes:
        with pytest.raises(RunError, match="cannot be copied or pickled"):
            how(target)
