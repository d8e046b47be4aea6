"""Models of operators that few models use, whole: recurrent layers, ctc, transforms, linear algebra, distances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.capture import capture
from weft.ops.book import RuleBook
from weft.ops.work import work_of


class Speech(nn.Module):
    """Convolution, recurrent layers with dropout between them, ctc with lengths that are tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 8, 3, padding=1)
        self.rnn = nn.LSTM(8, 6, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.gru = nn.GRU(12, 6, 2, dropout=0.1)
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor, steps: Tensor, marks: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.conv(x).relu().transpose(1, 2))
        hidden, _ = self.gru(hidden.transpose(0, 1))
        return F.ctc_loss(self.out(hidden).log_softmax(-1), y, steps, marks)


class Rare(nn.Module):
    """A bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.m = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 9)
        self.cell = nn.LSTMCell(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        waves = torch.view_as_real(torch.fft.rfft(self.a(x), dim=1, norm="ortho")) * 1.5
        h = torch.fft.irfft(torch.view_as_complex(waves), n=x.shape[1], dim=1, norm="ortho")
        h = F.normalize(h, dim=-1) + h.prod(-1, keepdim=True).tanh()
        h = self.b(F.dropout(h, 0.1))
        matrices = self.m(h.mean(1)).view(-1, 3, 3) + 4 * torch.eye(3)
        solved = torch.linalg.solve(matrices, h[:, :3, :4])
        gaps = torch.cdist(h, h).tril()
        turned = F.cosine_similarity(h, h.roll(1, 1), dim=-1)
        first, second, third = h[:, :3].unbind(1)
        losses = F.triplet_margin_loss(first, second, third) + F.cosine_embedding_loss(first, second, y.sign())
        sizes = torch.linalg.norm(solved, dim=(1, 2)).mean() + torch.logdet(matrices @ matrices.mT).mean()
        mixed = h.masked_scatter(h > 0.5, x.flatten()).mean() + torch.quantile(h, 0.3, dim=1).sum()
        return losses + sizes + mixed + turned.mean() + gaps.mean() + torch.hstack(self.cell(first)).sum()


def speech() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    lengths = torch.tensor([9, 8, 7, 9]), torch.tensor([3, 2, 1, 3])
    return Speech(), (torch.randn(4, 6, 9), torch.randint(1, 5, (4, 3)), *lengths)


def rare() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Rare(), (torch.randn(4, 6, 8), torch.randn(4))


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
@pytest.mark.parametrize("made", [speech, rare])
def test_equal(made: object, plan: str) -> None:
    model, example = made()  # type: ignore[operator]
    result = weft.verify(model, example, plan=plan)
    assert result.equal, str(result)


@pytest.mark.parametrize("made", [speech, rare])
def test_all_have_rules(made: object) -> None:
    graph = capture(*made())  # type: ignore[operator]
    book = RuleBook(graph)
    assert not [op.target for op in graph.ops if book.rule(op).source in ("none", "discovered")]


def test_recurrent_layers_carry_their_work() -> None:
    graph = capture(*speech())
    book = RuleBook(graph)
    flops = [work_of(op, book.rule(op), graph).flops for op in graph.ops if op.kind == "lstm"]
    rows = 4 * 9
    assert flops == [2 * rows * 2 * (24 * 8 + 24 * 6), 2 * rows * 2 * (24 * 12 + 24 * 6)]
