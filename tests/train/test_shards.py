"""Parameters that a rank holds in part: what is computed of them is what one device computes, or is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.checkpoint.planner_helpers import _create_write_items

import weft
from tests.train.ranks import on_ranks
from weft.errors import RunError
from weft.runtime.checks.shard_tensor import ShardParameter, ShardTensor

PLANS = ["tp=2", "dp=2,zero=1", "dp=2,zero=3", "dp=2,tp=2,zero=3", "pp=2,tp=2,microbatches=2"]


class Net(nn.Module):
    """Rows of all sizes: five fall into uneven parts, one leaves a rank with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(6, 8), nn.Linear(8, 5), nn.Parameter(torch.ones(1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * self.down(self.up(x).tanh())).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> tuple[Tensor]:
    return (torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),)


def gradients(module: Any) -> None:
    (module.forward_backward(batch()) if hasattr(module, "forward_backward") else module(*batch()).backward())


def eager() -> Net:
    made = net()
    gradients(made)
    return made


def opened(plan: str) -> Any:
    parallel = weft.parallelize(net(), batch(), plan, emulate=True, cache=None)
    gradients(parallel)
    return parallel


def original(name: str) -> str:
    """The original's name of a parameter of an emulated module."""
    return name.split(".", 2)[2] if name.startswith("ranks.") else name


def shards(module: Any) -> list[tuple[str, nn.Parameter]]:
    return [(name, one) for name, one in module.named_parameters() if type(one) is ShardParameter]


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda w: w.norm(),
    "norm of the gradient": lambda w: w.grad.norm(),
    "norm of data": lambda w: w.data.norm(),
    "vector norm": lambda w: torch.linalg.vector_norm(w.detach() * 2),
    "sum": lambda w: w.grad.square().sum(),
    "mean": lambda w: w.square().mean(),
    "mean of a copy": lambda w: w.detach().clone().float().mean(),
    "max": lambda w: w.abs().max(),
    "any": lambda w: torch.isnan(w.grad).any(),
    "row norms": lambda w: w.grad.norm(dim=tuple(range(w.dim()))),
    "sort": lambda w: w.data.sort(dim=0),
    "topk": lambda w: w.detach().abs().reshape(-1).topk(1),
    "flat": lambda w: w.grad.flatten(),
    "index": lambda w: w[0],
    "item": lambda w: w.sum().item(),
    "numpy": lambda w: w.detach().numpy(),
    "list": lambda w: w.tolist(),
    "normal": lambda w: w.data.normal_(),
    "init": nn.init.uniform_,
    "noise": torch.randn_like,
    "product": lambda w: w @ w.T,
    "cat": lambda w: torch.cat([w, w]),
    "norm of a sum": lambda w: w.square().sum().sqrt(),
    "product of sums": lambda w: w.sum() * w.sum(),
    "of lists": lambda w: torch._foreach_norm([w.grad]),
    "unknown": torch.special.i0,
    "places": torch.where,
    "axis": lambda w: w.sum(axis=0),
    "biased": lambda w: w.detach().std(False),
    "equal": lambda w: torch.equal(w, w),
    "equal to a copy": lambda w: w.grad.equal(w.grad.clone()),
    "allclose": lambda w: torch.allclose(w.grad, torch.zeros_like(w.grad)),
    "close to zero": lambda w: w.detach().allclose(torch.zeros(1).double()),
    "all are close": lambda w: torch.isclose(w, w).all(),
    "nonzero": torch.is_nonzero,
    "bool": bool,
    "contains": lambda w: 0.0 in w,
    "asserted": lambda w: torch.testing.assert_close(w, w.detach().clone()),
    "asserted of lists": lambda w: torch.testing.assert_close([w.grad], [w.grad.clone()]),
    "asserted of all": lambda w: torch.testing.assert_close(w, torch.zeros(8, 6).double()),
    "new tensor": lambda w: w.new_tensor(w),
    "storage": lambda w: w.untyped_storage(),
    "typed storage": lambda w: w.grad.storage(),
    "set": lambda w: torch.empty(0).double().set_(w.untyped_storage(), 0, w.shape),
    "vmap": torch.vmap(torch.norm),
    "shallow copy": lambda w: copy.copy(w).norm(),
    "shallow copy of the gradient": lambda w: copy.copy(w.grad).norm(),
    "pickled": pickle.dumps,
    "saved": lambda w: torch.save(w, io.BytesIO()),
    "saved in a dict": lambda w: torch.save({"w": w.detach().cpu()}, io.BytesIO()),
    "saved for all": lambda w: save({"w": w.detach()}),
    "sent": lambda w: ForkingPickler.dumps(w.grad),
    "saved by all ranks": lambda w: _create_write_items("w", w),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_mixes_elements_is_refused(kind: str) -> None:
    parallel = opened("dp=2,zero=3")
    weight = dict(shards(parallel))["ranks.1.up.weight"]
    with pytest.raises(RunError, match=r"up\.weight(.|\n)*test_shards") as caught:
        REFUSED[kind](weight)
    assert "[4:8, 0:6] of its [8, 6]" in caught.value.message and "weft." in caught.value.remedy


@pytest.mark.parametrize("plan", PLANS)
def test_clipping_one_parameter_by_torch_is_refused(plan: str) -> None:
    parallel = opened(plan)
    for _, one in shards(parallel):
        if one.grad is not None:
            with pytest.raises(RunError, match=r"weft\.clip_grad_norm_\(parameters"):
                torch.nn.utils.clip_grad_norm_([one], 1e-3)


ALLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda g: 2 * g / 3 - g.abs().clamp(max=0.1) ** 2,
    "masked": lambda g: torch.where(g > 0, g, torch.zeros_like(g)).masked_fill(g > 0.01, 1.0),
    "in place": lambda g: g.clone().mul_(0.5).addcmul_(g, g, value=0.1).lerp_(g.sign(), 0.5),
    "with its own shape": lambda g: g + torch.full(g.shape, 0.25, dtype=g.dtype),
    "with a number": lambda g: 1 - g + torch.tensor(0.5),
    "other dtype": lambda g: g.float().double().to(torch.float64),
    "of lists": lambda g: torch._foreach_mul([g], 0.5)[0],
    "maximum": lambda g: torch.max(g, -g),
}


@pytest.mark.parametrize("kind", ALLOWED)
@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=3", "dp=2,tp=2,zero=3"])
def test_what_takes_each_element_by_itself_is_right(kind: str, plan: str) -> None:
    expected = {name: ALLOWED[kind](one.grad) for name, one in eager().named_parameters()}

    def body(module: Any) -> None:
        gradients(module)
        for name, one in module.named_parameters():
            with torch.no_grad():
                found = weft.full_tensor(ALLOWED[kind](one.grad))
            assert type(found) is Tensor
            torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-14)

    on_ranks(net(), batch(), plan, body)


def test_reductions_along_whole_dims_are_right() -> None:
    """Gradient centralisation, a bound for the norms of rows."""
    weight = eager().up.weight
    centred = weight.grad - weight.grad.mean(dim=1, keepdim=True)
    bounded = weight.detach() * (0.3 / weight.detach().norm(dim=1).unsqueeze(1)).clamp(max=1.0)

    def body(module: Any) -> None:
        gradients(module)
        mine = module.up.weight
        torch.testing.assert_close(weft.full_tensor(mine.grad - mine.grad.mean(1, True)), centred)
        rows = mine.detach().norm(dim=1)
        assert type(rows) is ShardTensor
        torch.testing.assert_close(weft.full_tensor(rows), weight.detach().norm(dim=1))
        torch.testing.assert_close(weft.full_tensor(mine.detach() * (0.3 / rows.unsqueeze(1)).clamp(max=1.0)), bounded)
        torch.testing.assert_close(weft.full_tensor(mine.detach().topk(2).values), weight.detach().topk(2).values)
        with pytest.raises(RunError, match="needs more of"):
            mine.grad.mean(dim=0)
        with pytest.raises(RunError, match="belong together"):
            mine.detach() * rows.unsqueeze(0)

    on_ranks(net(), batch(), "dp=2,zero=3", body)


@pytest.mark.parametrize("plan", PLANS)
def test_full_tensors_are_those_of_one_device_and_come_back(plan: str) -> None:
    expected = dict(eager().named_parameters())

    def body(module: Any) -> int:
        gradients(module)
        for name, one in module.named_parameters():
            wanted = expected[name].detach()
            torch.testing.assert_close(weft.full_tensor(one), wanted, rtol=0, atol=0)
            torch.testing.assert_close(weft.full_tensor(one.grad), expected[name].grad, rtol=1e-12, atol=1e-14)
            with torch.no_grad():
                one.copy_(weft.shard_like(2 * weft.full_tensor(one), one))
            torch.testing.assert_close(weft.full_tensor(one.data), 2 * wanted, rtol=0, atol=0)
        return len(shards(module))

    assert sum(on_ranks(net(), batch(), plan, body))
    parallel = opened(plan)
    for name, one in parallel.named_parameters():
        torch.testing.assert_close(weft.full_tensor(one), expected[original(name)].detach(), rtol=0, atol=0)
        torch.testing.assert_close(weft.full_tensor(one.grad), expected[original(name)].grad, rtol=1e-12, atol=1e-14)


def clip_by_weight(module: Any) -> None:
    for one in (one for one in module.parameters() if one.grad is not None):
        bound = 0.01 * weft.full_tensor(one).norm()
        one.grad.mul_((bound / weft.full_tensor(one.grad).norm()).clamp(max=1.0))


@pytest.mark.parametrize("plan", PLANS)
def test_a_loop_that_writes_what_it_has_read(plan: str) -> None:
    """Where all ranks are here, it comes to the first rank's part before it reads for the next."""

    def trained(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            gradients(module)
            clip_by_weight(module)
            optimizer.step()
        return module

    parallel = trained(weft.parallelize(net(), batch(), plan, emulate=True, cache=None))
    expected = trained(net()).state_dict()
    torch.testing.assert_close(parallel.full_state_dict(), dict(expected), rtol=1e-12, atol=1e-14)

    def body(module: Any) -> None:
        found = trained(module).full_state_dict()
        torch.testing.assert_close(found, dict(expected), rtol=1e-12, atol=1e-14)

    on_ranks(net(), batch(), plan, body)


def test_what_one_of_several_ranks_here_computed_is_not_full() -> None:
    (_, weight), *_ = shards(opened("tp=2"))
    with pytest.raises(RunError, match="take the full tensor first"):
        weft.full_tensor(weight * 2)
    with pytest.raises(RunError, match="was given shape"):
        weft.shard_like(torch.zeros(3), weight)


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=1", "dp=2,zero=3"])
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_optimizers_see_ordinary_parameters(plan: str, how: dict[str, bool]) -> None:
    seen = list[type]()

    class Looks(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            seen.extend(type(one) for group in self.param_groups for p in group["params"] for one in (p, p.grad))
            return super().step(closure)

    parallel, module = opened(plan), eager()
    for one in parallel.parameters():
        assert one.grad is one.grad
    ours = Looks(parallel.parameters(), lr=0.1, **how)
    theirs = torch.optim.AdamW(module.parameters(), lr=0.1, **how)
    for _ in range(3):
        ours.step()
        theirs.step()
    assert set(seen) <= {nn.Parameter, Tensor} and shards(parallel)
    assert {type(one) for state in ours.state.values() for one in state.values()} == {Tensor}
    for name, one in parallel.state_dict().items():
        torch.testing.assert_close(one, module.state_dict()[name], rtol=1e-12, atol=1e-14)
    again = torch.optim.AdamW(parallel.parameters())
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    torch.save(again.state_dict(), io.BytesIO())


def test_a_step_that_raises_leaves_shards() -> None:
    class Raises(torch.optim.SGD):
        raises = False

        def step(self, closure: Any = None) -> Any:
            if self.raises:
                raise ValueError("no")

    parallel = opened("tp=2")
    optimizer = Raises(parallel.parameters(), lr=0.1)
    optimizer.step()
    optimizer.raises = True
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            optimizer.step()
        gradients(parallel)
        assert shards(parallel)


def test_copies_are_shards() -> None:
    (_, weight), *_ = shards(opened("tp=2"))
    for one, kind in ((weight, ShardParameter), (weight.grad, ShardTensor)):
        for copied in (copy.copy, copy.deepcopy):
            assert type(copied(one)) is kind and copied(one).requires_grad == one.requires_grad
            with pytest.raises(RunError, match="needs more of"):
                copied(one).norm()
        assert copy.copy(one).data_ptr() == one.data_ptr() != copy.deepcopy(one).data_ptr()
        assert "[0:4, 0:6] of its [8, 6]" in repr(one)
        assert torch.equal(one.new_tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).double())


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3", "pp=2,tp=2,microbatches=2"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_term_of_the_loss_may_be_a_sum_over_elements(plan: str, precision: str | None) -> None:
    """Its gradients are right; what else would be made of it is refused."""
    parallel = (
        opened(plan)
        if precision is None
        else weft.parallelize(net().float(), (batch()[0].float(),), plan, emulate=True, cache=None, precision=precision)
    )
    parallel.zero_grad()
    term = sum(0.5 * one.square().sum() for one in parallel.parameters()) - 1
    (term / 2).backward()
    for one in parallel.parameters():
        assert torch.equal(weft.full_tensor(one.grad), weft.full_tensor(one) / 2)
    if shards(parallel):
        for wrong in (term.item, lambda: float(term), lambda: 1 / term, term.exp):
            with pytest.raises(RunError, match="a sum over the elements"):
                wrong()


@pytest.mark.parametrize("plan", ["dp=2", *PLANS])
def test_clipping_some_parameters(plan: str) -> None:
    module, parallel = eager(), opened(plan)
    wanted = torch.nn.utils.clip_grad_norm_(list(module.up.parameters()), 1e-3)
    chosen = [one for name, one in parallel.named_parameters() if original(name).startswith("up")]
    torch.testing.assert_close(weft.clip_grad_norm_(chosen, 1e-3), wanted, rtol=1e-12, atol=0)
    for name, one in parallel.named_parameters():
        expected = module.get_parameter(original(name)).grad
        torch.testing.assert_close(weft.full_tensor(one.grad), expected, rtol=1e-6, atol=1e-12)
    with pytest.raises(RunError, match="no parameters"):
        weft.clip_grad_norm_([], 1.0)
    assert weft.clip_grad_norm_(module.parameters(), 1e9) > 0


@pytest.mark.parametrize("bound", [1e-3, 1e9])
@pytest.mark.parametrize("plan", ["dp=2", *PLANS])
def test_clipping_several_modules_together(plan: str, bound: float) -> None:
    """And one beside them: the norm is over the chosen of all of them."""
    modules, parallels = (eager(), eager()), (opened(plan), opened("dp=2"))
    beside, other = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    for one in (beside, other):
        for held in one.parameters():
            held.grad = torch.ones_like(held)
    chosen = [one for name, one in parallels[1].named_parameters() if original(name).startswith("up")]
    wanted = torch.nn.utils.clip_grad_norm_(
        [*modules[0].parameters(), *modules[1].up.parameters(), *beside.parameters()], bound
    )
    found = weft.clip_grad_norm_([*parallels[0].parameters(), *chosen, *other.parameters()], bound)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    for module, parallel in zip(modules, parallels, strict=True):
        for name, one in parallel.named_parameters():
            expected = module.get_parameter(original(name)).grad
            torch.testing.assert_close(weft.full_tensor(one.grad), expected, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(other.weight.grad, beside.weight.grad, rtol=1e-6, atol=0)


# --- other memory -------------------------------------------------------------------------------------------------


def swapping(module: Any, grad: bool) -> list[float]:
    """Train, with the running mean of the weights put in place of them for each evaluation."""
    found, mean = [], [one.detach().clone() for one in module.parameters()]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        gradients(module)
        optimizer.step()
        before = [one.data for one in module.parameters()]
        for one, average in zip(module.parameters(), mean, strict=True):
            average.lerp_(one.detach(), 0.5)
            one.data = average
        module.eval()
        with torch.set_grad_enabled(grad):
            found.append(float(module(*batch())))
        module.train()
        for one, memory in zip(module.parameters(), before, strict=True):
            one.data = memory
    return found


@pytest.mark.filterwarnings("ignore:.*lies in other memory", "ignore:Converting a tensor")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("plan", ["dp=2", *PLANS])
def test_memory_that_is_swapped_is_followed_or_refused(plan: str, grad: bool) -> None:
    wanted = swapping(net(), grad)
    parallel = weft.parallelize(net(), batch(), plan, emulate=True, cache=None)
    if "zero=1" in plan:
        with pytest.raises(RunError, match=r"was given other memory(.|\n)*parameter\.copy_\(values\)"):
            swapping(parallel, grad)
    else:
        assert swapping(parallel, grad) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("plan", [*PLANS, "dp=2,spread"])
def test_full_shapes_are_those_of_the_original(plan: str) -> None:
    parallel, shapes = opened(plan), {name: one.shape for name, one in net().named_parameters()}
    for name, one in parallel.named_parameters():
        if "@" not in name:
            assert weft.full_shape(one) == shapes[original(name)]
            assert one.grad is None or weft.full_shape(one.grad * 2) == shapes[original(name)]
    assert weft.full_shape(torch.ones(2, 3)) == (2, 3)


def unpacked(w: Tensor) -> int:
    rows, columns = w.shape
    return rows * columns


SIZES: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda w: w.shape[0],
    "last": lambda w: 1 / w.shape[-1],
    "unpacked": unpacked,
    "size": lambda w: w.size(0),
    "size by name": lambda w: w.size(dim=0),
    "sizes": lambda w: w.size()[0],
    "numel": lambda w: w.numel(),
    "nelement": lambda w: w.nelement(),
    "len": len,
}


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_of_parts_are_told_once(kind: str) -> None:
    parallel = opened("pp=2,tp=2,microbatches=2")
    part, empty = (parallel.get_parameter(f"ranks.{rank}.up.weight") for rank in (0, 2))
    with pytest.warns(
        UserWarning, match=r"up\.weight on this rank is that of its part, \[4, 6\].*has \[8, 6\]"
    ) as told:
        SIZES[kind](part)
    assert told[0].filename == __file__
    SIZES[kind](part), SIZES[kind](empty)


def holds_some(one: Tensor) -> bool:
    """Questions in all forms."""
    if one.numel() == 0 or not one.numel():
        return False
    return True if one.numel() > 0 else len([1 for _ in range(2) if one.numel()]) == 0


def test_sizes_that_others_ask_for_are_not_told() -> None:
    parallel = opened("dp=2,zero=3")
    torch.optim.AdamW(parallel.parameters()).step()
    str(parallel), repr(list(parallel.parameters())), copy.deepcopy(list(parallel.parameters()))
    assert sum(one.dim() for one in parallel.parameters())
    one = parallel.get_parameter("ranks.0.up.weight")
    # to look whether there is something, to print and to compare
    assert one.shape == (4, 6) and len(one.shape) == 2 and str(one.shape) == "torch.Size([4, 6])"
    assert holds_some(one)
    assert torch.zeros(one.shape).shape == one.shape and type(pickle.loads(pickle.dumps(one.shape))) is torch.Size


def test_that_nothing_is_held_is_no_size() -> None:
    parallel = opened("dp=2,spread")
    assert not all(one.numel() for one in parallel.parameters())
    with pytest.warns(UserWarning, match=r"on this rank is that of its part, \[0.*weft\.full_shape"):
        assert sum(one.size(0) for one in parallel.parameters())


@pytest.mark.parametrize("plan", [*PLANS, "dp=2,spread"])
def test_a_penalty_over_all_is_a_term_where_some_are_frozen(plan: str) -> None:
    def penalised(module: Any) -> dict[str, Tensor]:
        for name, one in module.named_parameters():
            one.requires_grad_("up" not in name)
        (0.1 * sum(one.square().sum() for one in module.parameters())).backward()
        return {name: weft.full_tensor(one.grad) for name, one in module.named_parameters() if one.grad is not None}

    parallel = weft.parallelize(net(), batch(), plan, emulate=True, cache=None)
    expected = penalised(net())
    for name, gradient in penalised(parallel).items():
        torch.testing.assert_close(gradient, expected[original(name)], rtol=1e-12, atol=1e-12)
    for _, one in shards(parallel):
        if not one.requires_grad:
            with pytest.raises(RunError, match="sum over the elements"):
                one.square().sum().item()
