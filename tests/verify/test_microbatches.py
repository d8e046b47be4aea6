"""Micro-batches count by their rows, wherever the batch dim is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from weft.runtime.microbatches import TooFewRows, split_arguments
from weft.verify.model_file import Subject
from weft.verify.reference import run_reference


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
