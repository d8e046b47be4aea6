"""Micro-batches count by their rows, wherever the batch dim is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import weft
from weft.compile.model_file import Subject, load_model_file
from weft.runtime.training.microbatches import TooFewRows, split_arguments
from weft.runtime.training.reduction import Reduction
from weft.verify.reference import run_reference, shares_of


class Late(nn.Module):
    """The batch is dim 1, as in recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def late() -> Subject:
    torch.manual_seed(0)
    return Subject(Late(), (torch.randn(2, 7, 3),), batch_dims=(1,))


def test_micro_batches_of_different_sizes_are_the_whole_batch() -> None:
    whole = run_reference(late(), seed=0, wide=True)
    parts = run_reference(late(), seed=0, wide=True, microbatches=3, dims=(1,))
    for ours, theirs in zip(parts.losses, whole.losses, strict=True):
        assert abs(ours - theirs) < 1e-14
    for name, gradient in whole.gradients[0].items():
        assert (parts.gradients[0][name] - gradient).abs().max() < 1e-14


def test_shares_follow_the_batch_dim() -> None:
    parts, shares = split_arguments((torch.zeros(2, 7), torch.zeros(7)), {}, (1, 0), 3)
    assert shares == [3 / 7, 2 / 7, 2 / 7]
    assert [tuple(args[0].shape) for args, _ in parts] == [(2, 3), (2, 2), (2, 2)]
    with pytest.raises(TooFewRows):
        split_arguments((torch.zeros(2, 7),), {}, (0,), 3)


def test_a_pipeline_over_a_late_batch_dim_is_equal(tmp_path) -> None:
    file = tmp_path / "late.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Late(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)\n\n"
        "    def forward(self, x):\n        return self.down(self.up(x).relu()).square().mean()\n\n\n"
        "def model():\n    torch.manual_seed(0)\n    return Late()\n\n\n"
        "def example():\n    return (torch.randn(2, 7, 3),)\n\n\ndef batch_dims():\n    return (1,)\n"
    )
    assert weft.verify(file, plan="pp=2,microbatches=3")


PACKED = """
import torch
from torch import nn

from weft.runtime.training.reduction import per_token


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Embedding(11, 8), nn.Linear(8, 5)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.down(self.up(x)).flatten(0, 1), labels.flatten())


def model():
    torch.manual_seed(0)
    return Tagger()


def example():
    torch.manual_seed(1)
    labels = torch.randint(5, (6, 4))
    labels[0], labels[2:4, 1:] = -100, -100
    return {"x": torch.randint(11, (6, 4)), "labels": labels}


reduction = REDUCTION
"""


@pytest.mark.parametrize("reduction", ['"sum"', 'per_token("labels")'])
def test_losses_are_reduced_as_the_model_file_says(tmp_path, reduction: str) -> None:
    file = tmp_path / "packed.py"
    file.write_text(PACKED.replace("REDUCTION", reduction))
    assert weft.verify(file, plan="pp=2,microbatches=3")
    subject = load_model_file(file)
    found = shares_of(subject, 3, None)
    # four targets of the first two rows count, then one each of two, then all eight
    assert found == ([1.0, 1.0, 1.0] if "sum" in reduction else [4 / 14, 2 / 14, 8 / 14])
    by_rows = run_reference(replace(subject, reduction=Reduction()), seed=0, wide=True, microbatches=3)
    assert run_reference(subject, seed=0, wide=True, microbatches=3).losses[0] != by_rows.losses[0]


class Masked(nn.Module):
    """As many positions as rows: only what is done with them tells the mask from a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        mixed = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) + mask, -1) @ x
        return nn.functional.cross_entropy(self.head(mixed)[:, 0], y, weight, reduction="sum")


def masked() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(6, 6, 6), torch.randn(6, 6), torch.randint(6, (6,)), torch.rand(6)


@pytest.mark.parametrize("count", [2, 6])
def test_what_is_no_batch_is_not_cut(count: int) -> None:
    batch = masked()
    eager, plan = Masked(), f"pp=2,microbatches={count}"
    parallel = weft.parallelize(eager, batch, plan, emulate=True, cache=None, reduction="sum")
    assert torch.isclose(parallel.forward_backward(batch), eager(*batch), rtol=1e-5)


class Recurrent(nn.Module):
    """Time first."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x[0]
        for number in range(1, x.shape[0]):
            state = torch.tanh(self.step(state) + x[number])
        return self.head(state).mean()


def test_rows_that_are_taken_apart_are_told_of() -> None:
    example = (torch.randn(4, 6, 4),)
    with pytest.warns(UserWarning, match=r"takes rows of the batch apart .* name it \(batch_dims\)"):
        weft.parallelize(Recurrent(), example, "pp=2,microbatches=2", emulate=True, cache=None)
    weft.parallelize(Recurrent(), example, "pp=2,microbatches=2", emulate=True, cache=None, batch_dims=(1,))
