"""parallelize(): the same numbers as eager training, in the emulator and on processes, and the calls of a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.train.eager import STEPS, adamw, check_same, gpt, mlp, train_eager
from weft.compile import compile_program
from weft.errors import PlanError, RunError
from weft.runtime.jobs.launch import Pool
from weft.runtime.layout.execute import take
from weft.runtime.links.processes import ProcessTransport
from weft.train.opened import open_rank


def train(parallel: nn.Module, batch: Any) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = adamw(parallel)
    losses = [parallel.train_step(batch, optimizer).item() for _ in range(STEPS)]
    return losses, parallel.state_dict()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_a_gpt_with_tied_weights_and_dropout_trains_as_on_one_device(plan: str) -> None:
    module, batch = gpt()
    check_same(
        train(weft.parallelize(module, batch, plan, emulate=True, cache=None), batch), train_eager(module, batch)
    )


def test_keyword_batches_and_a_plain_backward() -> None:
    module, batch = mlp()
    parallel = weft.parallelize(module, batch, "dp=2", emulate=True, cache=None)
    optimizer = adamw(parallel)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = parallel(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    check_same((losses, parallel.state_dict()), train_eager(module, batch))


def test_gradients_accumulate_and_scale() -> None:
    module, batch = mlp()
    module.drop.p = 0.0
    parallel = weft.parallelize(module, batch, "dp=2", emulate=True, cache=None)
    for factor in (1.0, 2.0):
        (parallel(**batch) * factor).backward()
    module(**batch).backward()
    for name, parameter in parallel.ranks[1].named_parameters():
        wanted = module.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, 3 * wanted, rtol=1e-12, atol=1e-13)


def test_each_rank_has_the_original_names_and_its_parts() -> None:
    module, batch = gpt()
    parallel = weft.parallelize(module, batch, "tp=2", emulate=True, cache=None)
    rank = parallel.ranks[0]
    # the first name of a tied parameter is the one that stands first, here and there
    assert {name for name, _ in rank.named_parameters()} == {name for name, _ in module.named_parameters()}
    assert rank.state_dict().keys() == module.state_dict().keys()
    assert rank.get_parameter("lm_head.weight") is rank.get_parameter("transformer.wte.weight")
    assert any(p.shape != module.get_parameter(name).shape for name, p in rank.named_parameters())
    assert (rank.replica, rank.num_replicas) == (0, 1)


def test_a_state_dict_goes_there_and_back() -> None:
    module, batch = gpt()
    parallel = weft.parallelize(module, batch, "tp=2", emulate=True, cache=None)
    other, _ = gpt(dropout=0.0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    parallel.load_state_dict(other.state_dict())
    for name, tensor in parallel.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_frozen_parameters_stay() -> None:
    module, batch = gpt()
    for parameter in module.transformer.h.parameters():
        parameter.requires_grad_(False)
    parallel = weft.parallelize(module, batch, "tp=2", emulate=True, cache=None)
    found = train(parallel, batch)
    check_same(found, train_eager(module, batch))
    frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
    assert frozen and all(torch.equal(found[1][name], module.state_dict()[name]) for name in frozen)
    assert all(p.grad is None for n, p in parallel.ranks[0].named_parameters() if n in frozen)


def test_a_function_that_makes_the_model_is_replayed_under_the_seed() -> None:
    made = []

    def make() -> nn.Module:
        made.append(nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), Mean()))
        return made[-1]

    batch = torch.randn(4, 6, dtype=torch.float64)
    before = torch.random.get_rng_state()
    parallel = weft.parallelize(make, batch, "dp=2", emulate=True, seed=7, cache=None)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(7)
    wanted = make().state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in parallel.state_dict().items())


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_other_batches_are_refused() -> None:
    module, batch = mlp()
    parallel = weft.parallelize(module, batch, "dp=2", emulate=True, cache=None)
    with pytest.raises(RunError, match=r"x of the batch is \[4, 6\]"):
        parallel(x=batch["x"][:4], y=batch["y"][:4])
    # the ranks were not told: they go on
    assert parallel(**batch).requires_grad


def test_alone_or_with_too_few() -> None:
    module, batch = mlp()
    with pytest.raises(RunError, match="needs 2 processes"):
        weft.parallelize(module, batch, "dp=2", cache=None)
    with pytest.raises(PlanError):
        weft.parallelize(module, batch, "dp=2", devices=1, emulate=True, cache=None)
    parallel = weft.parallelize(module, batch, "dp=1", cache=None)
    check_same(train(parallel, batch), train_eager(module, batch))


class Noisy(nn.Module):
    """Dropout and batch statistics: training and evaluation are different programs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.down = nn.Dropout(0.5), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.norm(self.up(x)))).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_evaluation_is_a_program_of_its_own_on_the_same_weights(plan: str) -> None:
    torch.manual_seed(0)
    module, batch = Noisy().double(), torch.randn(8, 6, dtype=torch.float64)
    parallel = weft.parallelize(module, batch, plan, emulate=True, cache=None)
    trained = train(parallel, batch)
    check_same(trained, train_eager(module, batch))
    module.load_state_dict(trained[1])
    with torch.no_grad():
        wanted = module.eval()(batch)
        assert parallel.eval()(batch).item() == pytest.approx(wanted.item(), rel=1e-12)
    optimizer = adamw(parallel.train())
    before = parallel.state_dict()
    parallel.train_step(batch, optimizer)
    after = parallel.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in ("up.weight", "norm.running_mean"))
    module.load_state_dict(after)
    with torch.no_grad():
        assert parallel.eval()(batch).item() == pytest.approx(module(batch).item(), rel=1e-12)


def test_a_plan_of_the_training_graph_is_said_again_of_the_other() -> None:
    torch.manual_seed(0)
    module, batch = Noisy().double(), torch.randn(8, 6, dtype=torch.float64)
    plan = weft.Plan(weft.capture(module, batch), 2).trans("up", weft.cut("n", 2, axis="a"))
    parallel = weft.parallelize(module, batch, plan, emulate=True, cache=None)
    with torch.no_grad():
        assert parallel.eval()(batch).item() == pytest.approx(module.eval()(batch).item(), rel=1e-12)


def work(transport: ProcessTransport, files: dict[str, bytes]) -> tuple[list[float], dict[str, Tensor], Any]:
    module, batch = gpt()
    parallel = open_rank(files, transport, module)
    losses, _ = train(parallel, batch)
    return losses, parallel.local_state_dict(), parallel.stored


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_processes_train_as_on_one_device(pool: Pool, plan: str) -> None:
    module, batch = gpt()
    files = compile_program(module, batch, plan).files
    wanted = train_eager(module, batch)
    for losses, state, stored in pool.run(work, files):
        check_same((losses, state), (wanted[0], {name: take(wanted[1][name], stored[name]) for name in state}))


def replicas(transport: ProcessTransport, files: dict[str, bytes]) -> dict[str, Tensor]:
    module, batch = mlp()
    parallel = open_rank(files, transport, module)
    assert (parallel.replica, parallel.num_replicas) == (transport.rank, 2)
    half = {name: tensor.chunk(2)[parallel.replica] for name, tensor in batch.items()}
    parallel.train_step(half, adamw(parallel))
    return parallel.state_dict()


def test_replicas_average_their_gradients(pool: Pool) -> None:
    module, batch = mlp()
    module.drop.p = 0.0
    half = {name: tensor.chunk(2)[0] for name, tensor in batch.items()}
    files = compile_program(module, half, "dp=1").files
    optimizer = adamw(module)
    module(**batch).backward()
    optimizer.step()
    for state in pool.run(replicas, files):
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-13)


def other_batches(transport: ProcessTransport, files: dict[str, bytes]) -> list[str]:
    """What is said of a batch that only one rank has."""
    module, batch = mlp()
    parallel = open_rank(files, transport, module)
    with pytest.raises(weft.errors.RunError) as told:
        parallel(**{name: tensor + (name == "x") * transport.rank for name, tensor in batch.items()})
    return [told.value.message]


def test_ranks_with_different_batches(pool: Pool) -> None:
    module, batch = mlp()
    found = pool.run(other_batches, compile_program(module, batch, "tp=2").files)
    assert found[0] == ["ranks 0 and 1 of a replica were given different batches"]


def test_programs_are_kept_found_again_and_edits_are_told(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    module, batch = mlp()
    module.drop.p = 0.0
    first = weft.parallelize(module, batch, "dp=1", cache=tmp_path)(**batch).item()
    (folder,) = tmp_path.iterdir()
    text = (folder / "program.py").read_text()
    assert weft.parallelize(module, batch, "dp=1", cache=tmp_path)(**batch).item() == first
    assert not recwarn.list
    (folder / "program.py").write_text(text.replace("F.gelu(up)", "F.gelu(up) * 2"))
    with pytest.warns(UserWarning, match="was edited and is run as it is"):
        edited = weft.parallelize(module, batch, "dp=1", cache=tmp_path)
    assert edited(**batch).item() != first
    assert "* 2" in (folder / "program.py").read_text()
