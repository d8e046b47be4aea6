"""In-place operators, views and buffer updates become functional and mean the same."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.capture.compare import assert_same
from weft.capture import capture
from weft.errors import CaptureError


class Around(nn.Module):
    """A linear, then some function of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(self.linear(x)) ** 2).sum()


def relu(y: Tensor) -> Tensor:
    return y.relu_()


def add(y: Tensor) -> Tensor:
    z = y * 2
    z.add_(y, alpha=0.5)
    z += 1
    return z


def set_column(y: Tensor) -> Tensor:
    z = y.clone()
    z[:, 0] = 3.0
    z[:, 1] = y[:, 2]
    z[1:3, 3:] = y[0, 3:]
    return z * y


def masked_fill(y: Tensor) -> Tensor:
    z = y.exp() + 0
    z.masked_fill_(z > 1, 0.25)
    return z


def index_put(y: Tensor) -> Tensor:
    z = y.clone()
    z[y > 0.3] = 2.0
    z[torch.tensor([0, 2]), torch.tensor([1, 3])] = y[0, :2] * 2
    return z


def view_of_view(y: Tensor) -> Tensor:
    z = y.view(2, 2, 6)[1]
    w = z.t()[2]
    early = y * 1
    w.mul_(3)
    z[0].sub_(1)
    return y * early + z.sum() + w.sum()


def base_then_view(y: Tensor) -> Tensor:
    z = y + 0
    row = z[1]
    flat = z.view(-1)
    z.mul_(2)
    flat[3:7] = 1.5
    return z.sum() + row.prod() + flat[4] * 2


def split_and_change(y: Tensor) -> Tensor:
    z = y.detach().clone()  # autograd forbids changing one of several views
    left, middle, right = z.split([1, 2, 3], dim=1)
    middle.zero_()
    right.neg_()
    first, *_ = z.unbind(0)
    first.add_(left[1])
    z.chunk(2, dim=1)[1].mul_(2)
    return z * y


def permuted(y: Tensor) -> Tensor:
    z = y.clone().view(2, 2, 6)
    z.permute(2, 0, 1)[3].fill_(0.5)
    z.transpose(0, 2)[0].mul_(4)
    z.movedim(0, 2)[1, 2].add_(1)
    z.diagonal(dim1=0, dim2=1).mul_(2)
    return z


def squeezed(y: Tensor) -> Tensor:
    z = y.clone()
    z.unsqueeze_(0)
    z.add_(1)
    return z.squeeze(0).transpose(0, 1)


def copied(y: Tensor) -> Tensor:
    z = torch.zeros(4, 6, dtype=torch.float64)
    z.copy_(y[0])
    z[2:].copy_(y[2:].float())
    out = torch.empty(4, 6, dtype=torch.float64)
    torch.mul(out.zero_() + 2, 3, out=out)
    return out * z


def reshaped_copy(y: Tensor) -> Tensor:
    z = y.t().reshape(-1)  # a copy: writing it leaves y alone
    z.mul_(5)
    return y.sum() + z[:3]


def chosen(y: Tensor) -> Tensor:
    z = y.clone()
    z.clamp_(min=-0.2).pow_(2)
    z.scatter_(1, torch.zeros(4, 1, dtype=torch.long), y[:, :1])
    z.index_add_(0, torch.tensor([1]), y[:1])
    return z


def diagonal(y: Tensor) -> Tensor:
    z = y @ y.t()
    z.fill_diagonal_(-2.0)
    tall, wide, cube = y[:, :2] * 1, y * 1, torch.stack([z[:, :2], z[:, 2:]])[:, :2] * 1
    tall.fill_diagonal_(3, wrap=True)
    wide.fill_diagonal_(0.5)
    cube.fill_diagonal_(4.0)
    short = (y[:, :2] * 1).fill_diagonal_(3)
    return z.sum() + tall.square().sum() + wide.exp().sum() + cube.square().sum() + short.sum()


def bits(y: Tensor) -> Tensor:
    z, mask = (y * 9).long(), y > 0
    z |= 8
    z &= 13
    z ^= (y * 5).long()
    z <<= 2
    z >>= mask.long()
    mask |= y < -1
    mask &= y < 1
    mask ^= mask[0].clone()
    return y * z * mask


def of_more_arguments(y: Tensor) -> Tensor:
    z = y.detach().abs() + 1
    return y * z.polygamma_(1)


CASES = [
    relu, add, set_column, masked_fill, index_put, view_of_view, base_then_view, split_and_change, permuted, squeezed,
    copied, reshaped_copy, chosen, diagonal, bits, of_more_arguments,
]  # fmt: skip


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_in_place(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    graph = assert_same(Around(function).double(), torch.randn(4, 6, dtype=torch.float64))
    for op in graph.ops:
        packet = getattr(torch.ops.aten, op.target.split(".")[1])
        assert not getattr(packet, op.target.split(".")[2])._schema.is_mutable


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.BatchNorm1d(6)
        self.images = nn.BatchNorm2d(3, momentum=0.3, affine=False)
        self.quiet = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.images(self.quiet(self.rows(x)).view(2, 3, 2, 2))
        return (y**3).sum()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm2d(3, momentum=None), (4, 3, 5, 5)),
        (nn.BatchNorm1d(3, momentum=None, affine=False), (4, 3)),
        (nn.InstanceNorm2d(3, track_running_stats=True, affine=True), (4, 3, 5, 5)),
        (nn.InstanceNorm1d(3, track_running_stats=True, momentum=0.3), (3, 5)),
        (nn.InstanceNorm1d(3, track_running_stats=True, momentum=None), (4, 3, 5)),
    ],
)
def test_running_statistics(norm: nn.Module, shape: tuple[int, ...], training: bool) -> None:
    module = nn.Sequential(copy.deepcopy(norm)).double()
    for _ in range(3):
        module(torch.randn(shape, dtype=torch.float64))
    module.train(training)
    x = torch.randn(shape, dtype=torch.float64)
    graph = assert_same(module, x)
    updated = {buffer.names[0] for buffer in graph.buffers if buffer.update is not None}
    assert ({"0.running_mean", "0.running_var"} <= updated) == training


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_statistics(training: bool) -> None:
    module = Norms().double().train(training)
    module.rows.running_mean += 0.3
    graph = assert_same(module, torch.randn(4, 6, dtype=torch.float64), tolerance=1e-11)
    updated = {buffer.tensor for buffer in graph.buffers if buffer.update is not None}
    names = ["running_mean", "running_var", "num_batches_tracked"]
    expected = {f"{norm}.{name}" for norm in ("rows", "images") for name in names}
    assert updated == (expected if training else set())
    assert not any(op.grad for op in graph.ops if op.kind in ("mean", "var", "lerp"))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("recent", torch.zeros(3, dtype=torch.float64), persistent=False)
        self.register_buffer("scale", torch.full((), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        with torch.no_grad():
            self.recent = 0.9 * self.recent + 0.1 * x.mean(0)
        return x * self.scale + self.count + self.recent


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.counter(self.counter(self.linear(x))).sum()


def test_buffer_updates() -> None:
    graph = assert_same(Holder(), torch.randn(4, 3, dtype=torch.float64))
    buffers = {buffer.names[0]: buffer for buffer in graph.buffers}
    assert buffers["counter.count"].update == "counter@1/add"
    assert buffers["counter.recent"].update is not None and not buffers["counter.recent"].persistent
    assert buffers["counter.scale"].update is None and buffers["counter.scale"].persistent


class Unseen(nn.Module):
    """Reads and writes through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.register_buffer("count", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count.data.add_(1)
        y = self.linear(x)
        return (y * y.data / self.linear.weight.data.norm() + self.count).sum()


def test_data_is_detached() -> None:
    graph = assert_same(Unseen(), torch.randn(4, 3, dtype=torch.float64))
    assert graph.buffers[0].update is not None


def refused(function: Callable[[Tensor], Tensor]) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        capture(Around(function), torch.randn(4, 6))
    assert __file__.rsplit("/", 1)[1] in caught.value.place
    assert caught.value.remedy
    return caught.value


def test_refuses_change_under_no_grad() -> None:
    def change(y: Tensor) -> Tensor:
        z = y * 2
        with torch.no_grad():
            z.mul_(3)
        return z

    error = refused(change)
    assert "z.mul_(3)" in error.place and "needs a gradient" in error.message


def test_refuses_change_through_detach() -> None:
    def change(y: Tensor) -> Tensor:
        y.detach()[0].zero_()
        return y

    assert "y.detach()[0].zero_()" in refused(change).place


def test_refuses_overlapping_view() -> None:
    def change(y: Tensor) -> Tensor:
        z = y.clone()
        z.unfold(0, 2, 2).mul_(2)
        return z

    assert "unfold" in refused(change).message


class ChangesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[0] = 0
        return x.sum()


class ChangesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return (self.weight * x).sum()


class ChangesConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        self.table.add_(1)
        return (self.table * x).sum()


@pytest.mark.parametrize(
    ("module", "what", "line"),
    [
        (ChangesInput(), "input x", "x[0] = 0"),
        (ChangesParameter(), "parameter weight", "self.weight.mul_(0.9)"),
        (ChangesConstant(), "attribute table", "self.table.add_(1)"),
    ],
    ids=["input", "parameter", "attribute"],
)
def test_refuses_change_of_what_lasts(module: nn.Module, what: str, line: str) -> None:
    with pytest.raises(CaptureError, match=f"the {what} is changed in place") as caught:
        capture(module, torch.randn(2, 3))
    assert line in caught.value.place
    assert caught.value.remedy


@torch.library.custom_op("test_functional::double", mutates_args=("x",))
def double_in_place(x: Tensor) -> None:
    x.mul_(2)


def writes_by_library(y: Tensor) -> Tensor:
    z = y.detach().clone()
    double_in_place(z)
    return y * z


def writes_lists(y: Tensor) -> Tensor:
    z = y * 1
    torch._foreach_mul_([z], 2.0)
    return z


@pytest.mark.parametrize("function", [writes_by_library, writes_lists])
def test_refuses_operator_that_only_writes(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="writes into its argument") as caught:
        capture(Around(function), torch.randn(2, 6))
    assert "test_functional.py" in caught.value.place
    assert caught.value.remedy


def test_constants_written_in_forward_may_change() -> None:
    def change(y: Tensor) -> Tensor:
        table = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)
        table[0] = 7.0
        return y * table

    graph = assert_same(Around(change).double(), torch.randn(4, 6, dtype=torch.float64))
    assert [op.constant for op in graph.ops if op.kind.startswith("select")] == [True]


def test_dropout_in_place() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5, inplace=True), nn.Linear(4, 1))
    graph = capture(module, torch.randn(3, 4))
    assert [op.target for op in graph.ops if "dropout" in op.target] == ["aten.dropout.default"]
