"""Training in another precision: masters in float32 behind copies in bfloat16 or float16, as the definition has it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from tests.parts import parts
from weft.compile import compile_subject
from weft.compile.model_file import Subject
from weft.compile.programs import Programs
from weft.errors import RunError
from weft.runtime.links.transport import Transport
from weft.runtime.weights.precision import Precision
from weft.train.memory.expected import expect_rank
from weft.train.opened import open_rank
from weft.verify.mixed import OneDevice
from weft.verify.ranks import emulate

BF16 = torch.bfloat16
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """No parameter is used twice: sums over uses have no order that could differ."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batch(seed: int = 0, rows: int = 16) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, 16, (rows, 4), generator=draw) for _ in range(2))
    return x, y


def parallel(plan: str, precision: Any = "bf16", make: Any = model, example: Any = None, **more: Any) -> Any:
    found = batch() if example is None else example
    return weft.parallelize(make, found, plan=plan, emulate=True, cache=None, precision=precision, **more)


def trained(module: Any, steps: int = 3, rows: int = 16) -> dict[str, Tensor]:
    """The weights after some steps."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(steps):
        module.train_step(batch(step, rows), optimizer)
    return {name: one.clone() for name, one in module.state_dict().items()}


def by_definition(precision: Precision, micros: int, steps: int = 3, rows: int = 16) -> dict[str, Tensor]:
    """The same on one device, in micro-batches."""
    module = model()
    one = OneDevice(module, precision)
    optimizer = torch.optim.AdamW(one.masters.values(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        one.refresh()
        x, y = batch(step, rows)
        for part in zip(x.tensor_split(micros), y.tensor_split(micros), strict=True):
            with one.forward():
                loss = module(*one.inputs(part))
            (loss / micros).backward()
            one.add()
        one.finish()
        optimizer.step()
    return {name: master.detach() for name, master in one.masters.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_optimizers_see_masters() -> None:
    module = parallel("dp=2,zero=2")
    module.train_step(batch(), torch.optim.AdamW(module.parameters(), lr=1e-2))
    rank = module.ranks[0]
    names = dict(model().named_parameters())
    assert dict(rank.named_parameters()).keys() == names.keys() == dict(module.state_dict()).keys()
    for one in rank.parameters():
        assert one.dtype == torch.float32 and one.grad is not None and one.grad.dtype == torch.float32
    assert {one.dtype for one in rank.program.modules[0].parameters()} == {BF16}
    assert all(one.grad is None for one in rank.program.modules[0].parameters())


def test_data_parallel_is_one_device_with_two_micro_batches() -> None:
    precision = Precision(BF16)
    found = trained(parallel("dp=2", precision))
    assert_same(found, by_definition(precision, 2))
    plain = by_definition(precision, 1)
    assert any(not torch.equal(found[name], plain[name]) for name in plain)  # or the comparison says nothing


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.full), 2, 3])
@pytest.mark.parametrize("more", ["", pytest.param(",microbatches=2", marks=pytest.mark.full)])
def test_zero_is_data_parallel_bit_for_bit(zero: int, more: str) -> None:
    assert_same(trained(parallel(f"dp=2,zero={zero}{more}")), trained(parallel(f"dp=2{more}")))


def test_micro_batches_are_added_in_the_dtype_asked_for() -> None:
    wide, narrow = Precision(BF16), Precision(BF16, accumulate=None)
    found = trained(parallel("microbatches=16", wide), steps=2)
    assert_same(found, by_definition(wide, 16, steps=2))
    errors = {}
    for precision in (wide, narrow):
        module = parallel("microbatches=16", precision)
        module.forward_backward(batch())
        mine = {name: one.grad for name, one in module.ranks[0].named_parameters()}
        exact = model().double()
        exact(*batch()).backward()
        right = {name: one.grad for name, one in exact.named_parameters()}
        errors[precision] = sum(float((mine[name] - right[name]).norm() / right[name].norm()) for name in right)
    assert errors[wide] < 0.95 * errors[narrow]


def test_ranks_add_in_the_dtype_asked_for() -> None:
    wide, narrow = (trained(parallel("dp=4", Precision(BF16, reduce=one))) for one in (torch.float32, None))
    assert any(not torch.equal(wide[name], narrow[name]) for name in wide)
    for name in wide:
        torch.testing.assert_close(wide[name], narrow[name], atol=0.03, rtol=0.05)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "pp=2,microbatches=2"])
def test_gradients_are_added_to_those_before(plan: str) -> None:
    module = parallel(plan)
    module.forward_backward(batch(0))
    first = [one.grad.clone() for one in module.parameters()]
    module.zero_grad()
    module.forward_backward(batch(1))
    second = [one.grad.clone() for one in module.parameters()]
    module.zero_grad()
    for seed in (0, 1):
        module.forward_backward(batch(seed))
    for parameter, a, b in zip(module.parameters(), first, second, strict=True):
        assert torch.equal(parts(parameter.grad), parts(a + b))


def test_what_is_kept_has_no_copy() -> None:
    module = parallel("dp=2", Precision(BF16, keep=("norm.*", "head.bias")))
    inside = {name: one.dtype for name, one in module.ranks[0].program.modules[0].named_parameters()}
    wide = {name for name, dtype in inside.items() if dtype == torch.float32}
    assert wide == {"norm.weight", "norm.bias", "head.bias"}
    trained(module)
    assert all(one.dtype == torch.float32 for one in module.parameters())


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", pytest.param("dp=2,zero=3", marks=pytest.mark.full)])
def test_another_forward_before_backward_does_no_harm(plan: str) -> None:
    module = parallel(plan)
    loss = module(*batch(0))
    with torch.no_grad():
        module(*batch(1))
    loss.backward()
    found = [one.grad.clone() for one in module.parameters()]
    module.zero_grad()
    module(*batch(0)).backward()
    for parameter, gradient in zip(module.parameters(), found, strict=True):
        assert torch.equal(parts(parameter.grad), parts(gradient))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", pytest.param("dp=2,zero=3", marks=pytest.mark.full)])
def test_weights_changed_before_backward_are_an_error(plan: str) -> None:
    module = parallel(plan)
    loss = module(*batch(0))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    module(*batch(1))
    with pytest.raises(RunError, match=r"modified by an inplace|changed in place"):
        loss.backward()


def test_writes_that_nobody_sees_reach_the_copies() -> None:
    module, other = parallel("dp=2"), parallel("dp=2")
    with torch.no_grad():
        module(*batch())
        for one, two in zip(module.parameters(), other.parameters(), strict=True):
            one.data.mul_(1.5)
            two.mul_(1.5)
        assert torch.equal(module(*batch()), other(*batch()))


@pytest.mark.parametrize("plan", ["dp=2,zero=2", "pp=2,microbatches=2"])
def test_evaluation_has_the_newest_weights(plan: str) -> None:
    module = parallel(plan)
    trained(module)
    module.eval()
    one = OneDevice(model().eval(), Precision(BF16))
    with torch.no_grad():
        for name, master in one.masters.items():
            master.copy_(module.state_dict()[name])
        one.refresh()
        with one.forward():
            right = one._module(*batch(7))
        torch.testing.assert_close(module(*batch(7)), right, atol=2e-3, rtol=0)


def test_a_state_dict_is_float32_and_comes_back() -> None:
    module = parallel("dp=2,zero=3")
    saved = trained(module)
    other = parallel("dp=2,tp=2")
    other.load_state_dict(saved)
    assert_same(dict(other.state_dict()), saved)
    assert all(one.dtype == torch.float32 for one in saved.values())


def test_frozen_for_a_while() -> None:
    module = parallel("dp=2")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("head" in name)
    module(*batch()).backward()
    assert {"head" in name for name, one in module.named_parameters() if one.grad is not None} == {True}
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    module(*batch()).backward()
    assert all(one.grad is not None for one in module.parameters())


def test_clipping_counts_masters() -> None:
    module = parallel("dp=2,zero=2")
    module.forward_backward(batch())
    whole = parallel("dp=1")
    whole.forward_backward(batch())
    plain = torch.stack([one.grad.norm() for one in whole.parameters()]).norm()
    norm = weft.clip_grad_norm_(module, 0.5 * float(plain))
    torch.testing.assert_close(norm, plain.double(), rtol=0.02, atol=0)
    again = weft.clip_grad_norm_(module, 1e9)
    torch.testing.assert_close(again, 0.5 * norm, rtol=0.03, atol=0)


class Squared(nn.Module):
    """Its gradient overflows in float16 where x is large."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.two(self.one(x)).float() ** 2).mean()


def squared() -> nn.Module:
    torch.manual_seed(0)
    return Squared()


def test_an_overflow_skips_the_step_on_all_ranks() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    huge = x.clone()
    huge[3] *= 3e4  # in the rows of the last rank alone
    module = parallel("dp=2,zero=2", "fp16", squared, (x,))
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.1), weft.GradScaler("cpu", init_scale=1024.0)
    start = [one.detach().clone() for one in module.parameters()]
    module.train_step((huge,), optimizer, scaler=scaler)
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(*parts((one, before))) for one, before in zip(module.parameters(), start, strict=True))
    module.train_step((x,), optimizer, scaler=scaler)
    plain = squared()
    plain(x).backward()
    for name, value in module.state_dict().items():
        moved = plain.get_parameter(name) - 0.1 * plain.get_parameter(name).grad
        torch.testing.assert_close(value, moved.detach(), rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize("plan", ["dp=2", "microbatches=2"])
def test_a_scale_that_overflows_for_ever_is_refused(plan: str) -> None:
    module = parallel(plan, "fp16", squared, (torch.full((4, 4), 1e4),))
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.1), weft.GradScaler("cpu")
    with pytest.raises(RunError, match="not finite in 64 steps"):
        for _ in range(70):
            module.train_step((torch.full((4, 4), torch.inf),), optimizer, scaler=scaler)


def test_a_scaled_loss_is_told_as_it_is() -> None:
    for plan in ("dp=2", "microbatches=2"):
        module, plain = parallel(plan, "fp16"), parallel(plan, "fp16")
        scaler = weft.GradScaler("cpu", init_scale=256.0)
        a = module.train_step(batch(), torch.optim.SGD(module.parameters(), lr=0.1), scaler=scaler)
        b = plain.train_step(batch(), torch.optim.SGD(plain.parameters(), lr=0.1))
        assert torch.equal(a, b)
        for name, value in module.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_what_is_no_precision_is_refused() -> None:
    with pytest.raises(RunError, match="'bf17' is no float dtype"):
        parallel("dp=2", "bf17")
    with pytest.raises(RunError, match="float8"):
        parallel("dp=2", torch.float8_e4m3fn)
    with pytest.raises(RunError, match=r"wider than words\.weight itself"):
        parallel("dp=2", "fp64")
    with pytest.raises(RunError, match="no parameter is named norms"):
        parallel("dp=2", Precision(BF16, keep=("norms.*",)))


def test_a_model_without_floating_parameters_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.arange(8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.table[x].float().mean()

    with pytest.raises(RunError, match="no floating parameter"):
        parallel("dp=2", "bf16", Counts(), (torch.arange(8),))


def test_a_meta_model_starts_in_another_precision() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(trained(parallel("dp=2", make=model)), trained(parallel("dp=2", make=model())))


@pytest.mark.parametrize("plan", ["dp=1", "microbatches=2"])
def test_replicas_average_in_float32(plan: str) -> None:
    """Two replicas on half of the batch each are one device with twice as many micro-batches."""
    subject = Subject(model(), batch(rows=8), precision=Precision(BF16))
    files = Programs(lambda module: subject, plan, None, cache=None).training(subject.model)
    halves = [tuple(part) for part in zip(*(one.tensor_split(2) for one in batch(0)), strict=True)]

    def body(transport: Transport) -> dict[str, Tensor]:
        module = open_rank(files, transport, subject.model, mixed=subject.mixed)
        module.train_step(halves[module.replica], torch.optim.AdamW(module.parameters(), lr=1e-2))
        return {name: one.detach() for name, one in module.named_parameters()}

    first, second = emulate(2, body)
    assert_same(first, second)
    wanted = by_definition(Precision(BF16), 4 if plan == "microbatches=2" else 2, steps=1)
    for name in wanted:
        torch.testing.assert_close(first[name], wanted[name], rtol=0, atol=1e-6)


def test_a_part_of_a_model() -> None:
    """What it returns is as it was computed; gradients of inputs come in their own dtype."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plain = part(x.detach()).detach()
    module = parallel("tp=2", "bf16", part, (x,), outputs="all")
    found = module(x)
    assert found.dtype == BF16
    torch.testing.assert_close(found.float(), plain, rtol=0.02, atol=0.02)
    found.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32 and bool(x.grad.abs().sum() > 0)
    assert all(one.grad is not None for one in module.parameters())


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_memory_is_counted_with_masters(zero: int) -> None:
    subject = Subject(model(), batch(), precision=Precision(BF16))
    plan = f"dp=2,zero={zero}" if zero else "dp=2"
    found = expect_rank(compile_subject(subject, plan).files, subject, 0)
    count = sum(one.numel() for one in subject.model.parameters())
    part = count // 2 if zero else count
    assert found.parameters == found.gradients == 4 * part
    assert found.kept == 2 * (part if zero == 3 else count)
    assert found.optimizer == pytest.approx(2 * 4 * part, rel=0.02)


def test_a_plan_of_the_plain_graph_is_said_again() -> None:
    plan = weft.load_plan("dp=2,zero=2", weft.capture(model(), batch()))
    assert_same(trained(parallel(plan)), trained(parallel("dp=2,zero=2")))


def test_hooks_of_masters_are_called() -> None:
    module = parallel("dp=2")
    seen: list[torch.dtype] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.dtype))
    module.forward_backward(batch())
    assert seen == [torch.float32] * len(list(module.parameters()))


def test_what_is_computed_with_as_it_is_has_no_copy() -> None:
    module = parallel("dp=2,zero=2", "fp32")
    assert_same(trained(module), trained(parallel("dp=2,zero=2", None)))
    rank = module.ranks[0]
    assert all(one is rank.program.part(name) for name, one in rank.named_parameters())


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatches=2"])
def test_what_is_kept_in_the_dtype_of_copies(plan: str) -> None:
    """Its gradients are added up as theirs are, and come in its own dtype."""
    module = parallel(plan, Precision(BF16, keep=("norm.*",)), model().bfloat16())
    trained(module)
    found = {name: (one.dtype, one.grad.dtype) for name, one in module.ranks[0].named_parameters()}
    assert found["norm.weight"] == (BF16, BF16)
    assert {one for name, one in found.items() if "norm" not in name} == {(torch.float32, torch.float32)}
