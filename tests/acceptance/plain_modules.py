"""Modules of torch.nn, each small, in training mode, with a loss: what a user puts together without a library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from weft.compile.model_file import Subject

ROWS, WIDTH, LENGTH = 6, 16, 8


class Loss(nn.Module):
    """A module between two linear layers, or alone, and a squared error."""

    def __init__(self, module: nn.Module, run: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.module = module
        self.run = run or _call

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        y = self.run(self.module, *inputs)
        return (y.sin() - 0.5).square().mean()


def _call(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module(*inputs)
    return found


def _first(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module(*inputs)[0]
    return found


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, LENGTH, WIDTH)))


def plain(module: nn.Module, *inputs: torch.Tensor) -> Subject:
    return Subject(Loss(module), inputs)


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True, **options)


def transformer() -> Subject:
    model = nn.Transformer(WIDTH, 4, 1, 1, 32, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def run(module: nn.Module, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module(source, target, tgt_mask=mask.to(target), tgt_is_causal=True)
        return found

    return Subject(Loss(model, run), (tokens(), tokens()))


def padded_encoder() -> Subject:
    model = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
    padding = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    padding[0, 5:] = True

    def run(module: nn.Module, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module(x, src_key_padding_mask=padding)
        return found

    return Subject(Loss(model, run), (tokens(), padding))


def attention(need_weights: bool, batch_first: bool) -> Subject:
    model = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=batch_first)

    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y, weights = module(x, x, x, need_weights=need_weights)
        found: torch.Tensor = y if weights is None else y.sum() + weights.square().sum()
        return found

    return Subject(Loss(model, run), (tokens(),))


def cross_attention() -> Subject:
    model = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True, kdim=12, vdim=10, add_bias_kv=True)
    return Subject(Loss(model, _first), (tokens(), tokens(ROWS, 5, 12), tokens(ROWS, 5, 10)))


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(8, 12, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.mix(x, y)
        return found


class CTC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 10)
        self.loss = nn.CTCLoss()

    def forward(self, x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        times = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
        found: torch.Tensor = self.loss(scores, targets, times, lengths)
        return found


def ctc() -> Subject:
    return Subject(CTC(), (tokens(ROWS, 12, WIDTH), torch.randint(1, 10, (ROWS, 4)), torch.randint(2, 5, (ROWS,))))


class Lookup(nn.Module):
    """Bags of any length, told by where they begin, beside dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(30, WIDTH, mode="mean")
        self.dense, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out((self.dense(x) * self.bags(ids, offsets)).sin())
        return found


def bags() -> Subject:
    return plain(Lookup(), tokens(ROWS, 8), torch.randint(30, (24,)), torch.tensor([0, 3, 3, 10, 20, 23]))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(WIDTH, LENGTH // 2 + 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft(x.transpose(1, 2), dim=-1) * torch.view_as_complex(self.weights)
        return torch.fft.irfft(modes, n=LENGTH, dim=-1)


def conv(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


def recurrent(cls: Any, **options: Any) -> Subject:
    return Subject(Loss(cls(WIDTH, 12, batch_first=True, **options), _first), (tokens(),))


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = self.left(x), self.right(y)
        return F.cosine_similarity(a, b) + F.pairwise_distance(a, b) + torch.cdist(a, b).mean(1)


class Unpool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, where = F.max_pool2d(self.conv(x), 2, return_indices=True)
        return F.max_unpool2d(y, where, 2)


class Warp(nn.Module):
    """A spatial transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.angle = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        theta = self.angle(x.mean((2, 3))).view(-1, 2, 3)
        y = self.conv(x)
        return F.grid_sample(y, F.affine_grid(theta, list(y.shape), align_corners=False), align_corners=False)


FAMILIES: dict[str, Callable[[], Subject]] = {
    "encoder-layer": lambda: plain(encoder_layer(), tokens()),
    "encoder-layer-norm-first": lambda: plain(encoder_layer(norm_first=True, activation="gelu"), tokens()),
    "encoder": lambda: plain(nn.TransformerEncoder(encoder_layer(), 2), tokens()),
    "encoder-padded": padded_encoder,
    "decoder-layer": lambda: plain(nn.TransformerDecoderLayer(WIDTH, 4, 32, batch_first=True), tokens(), tokens()),
    "transformer": transformer,
    "attention": lambda: attention(need_weights=False, batch_first=True),
    "attention-weights": lambda: attention(need_weights=True, batch_first=True),
    "attention-sequence-first": lambda: attention(need_weights=False, batch_first=False),
    "attention-cross": cross_attention,
    "lstm": lambda: recurrent(nn.LSTM),
    "lstm-two-ways": lambda: recurrent(nn.LSTM, bidirectional=True, num_layers=2),
    "gru": lambda: recurrent(nn.GRU),
    "rnn": lambda: recurrent(nn.RNN),
    "conv1d": lambda: plain(conv(nn.Conv1d(8, 12, 3, padding=1), nn.GELU(), nn.Conv1d(12, 8, 3)), tokens(ROWS, 8, 10)),
    "conv3d": lambda: plain(
        conv(nn.Conv3d(4, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 4, 2), nn.MaxPool3d(2)),
        tokens(ROWS, 4, 4, 5, 6),
    ),
    "conv-transpose": lambda: plain(
        conv(nn.ConvTranspose2d(4, 8, 2, stride=2), nn.InstanceNorm2d(8, affine=True), nn.ConvTranspose2d(8, 4, 3)),
        tokens(ROWS, 4, 5, 5),
    ),
    "conv-grouped": lambda: plain(
        conv(nn.Conv2d(8, 16, 3, groups=8), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 1, groups=2)),
        tokens(ROWS, 8, 6, 6),
    ),
    "conv-lazy-padding": lambda: plain(
        conv(nn.Conv2d(4, 8, 3, padding="same", padding_mode="reflect"), nn.ReLU(), nn.ZeroPad2d(1)),
        tokens(ROWS, 4, 6, 6),
    ),
    "pixel-shuffle": lambda: plain(
        conv(nn.Conv2d(4, 16, 3, padding=1), nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.Conv2d(16, 4, 1)),
        tokens(ROWS, 4, 6, 6),
    ),
    "upsample": lambda: plain(
        conv(nn.Conv2d(4, 8, 3, stride=2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 4, 1)),
        tokens(ROWS, 4, 9, 9),
    ),
    "fold": lambda: plain(
        conv(nn.Unfold(2, stride=2), nn.Conv1d(16, 16, 1), nn.Fold((6, 6), 2, stride=2)), tokens(ROWS, 4, 6, 6)
    ),
    "bilinear": lambda: plain(Bilinear(), tokens(ROWS, 8), tokens(ROWS, 12)),
    "ctc": ctc,
    "bags": bags,
    "weight-norm": lambda: plain(
        conv(nn.utils.parametrizations.weight_norm(nn.Linear(8, 12)), nn.Tanh(), nn.Linear(12, 4)), tokens(ROWS, 8)
    ),
    "spectral": lambda: plain(conv(nn.Linear(WIDTH, WIDTH), Spectral()), tokens()),
    "glu": lambda: plain(conv(nn.Linear(8, 24), nn.GLU(), nn.LayerNorm(12), nn.Linear(12, 8)), tokens(ROWS, 8)),
    "activations": lambda: plain(
        conv(nn.Linear(8, 12), nn.PReLU(12), nn.RReLU(), nn.Softplus(), nn.AlphaDropout(0.1), nn.Linear(12, 8)),
        tokens(ROWS, 8),
    ),
    "batch-norm-1d": lambda: plain(
        conv(nn.Linear(8, 12), nn.BatchNorm1d(12, momentum=None), nn.ELU(), nn.Dropout1d(0.2)), tokens(ROWS, 8)
    ),
    "local-response": lambda: plain(conv(nn.Conv2d(4, 8, 3), nn.LocalResponseNorm(3)), tokens(ROWS, 4, 6, 6)),
    "cosine": lambda: plain(Distances(), tokens(ROWS, WIDTH), tokens(ROWS, WIDTH)),
    "max-unpool": lambda: plain(Unpool(), tokens(ROWS, 4, 6, 6)),
    "grid-sample": lambda: plain(Warp(), tokens(ROWS, 4, 6, 6)),
}
"""By name."""
