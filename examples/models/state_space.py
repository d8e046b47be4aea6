"""A model file: a selective state-space model (Mamba): a causal convolution, then a recurrence that inputs steer.

The recurrence runs by running sums within chunks of the sequence, and from chunk to chunk step by step; its channels do
not meet, so all of it may be cut along them. They meet where the steering is computed, which leaves addends.
"""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, CHUNK = 96, 16, 4
WIDTH, CHANNELS, STATE, RANK, KERNEL, LAYERS = 24, 48, 6, 4, 4, 2


def scan(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """h[t] = exp(decay[t]) * h[t - 1] + x[t] along dim 1."""
    decay, x = decay.unflatten(1, (-1, CHUNK)), x.unflatten(1, (-1, CHUNK))
    total = decay.cumsum(2)
    inside = total.exp() * (x * (-total).exp()).cumsum(2)
    states = [inside[:, 0]]
    for i in range(1, inside.shape[1]):
        states.append(inside[:, i] + total[:, i].exp() * states[-1][:, -1:])
    return torch.cat(states, 1)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, 2 * CHANNELS, bias=False)
        self.convolution = nn.Conv1d(CHANNELS, CHANNELS, KERNEL, groups=CHANNELS, padding=KERNEL - 1)
        self.steer = nn.Linear(CHANNELS, RANK + 2 * STATE, bias=False)
        self.step = nn.Linear(RANK, CHANNELS)
        self.log_decay = nn.Parameter(torch.arange(1, STATE + 1).float().log().repeat(CHANNELS, 1))
        self.skip = nn.Parameter(torch.ones(CHANNELS))
        self.outward = nn.Linear(CHANNELS, WIDTH, bias=False)
        nn.init.uniform_(self.step.bias, -4.0, -2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.inward(x).chunk(2, -1)
        x = F.silu(self.convolution(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        rank, inputs, outputs = self.steer(x).split([RANK, STATE, STATE], -1)
        step = F.softplus(self.step(rank)).unsqueeze(-1)  # (batch, time, channel, 1)
        states = scan(-step * self.log_decay.exp(), step * inputs.unsqueeze(2) * x.unsqueeze(-1))
        y = torch.einsum("btcs,bts->btc", states, outputs) + self.skip * x
        return self.outward(y * F.silu(gate))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer, self.dropout = nn.RMSNorm(WIDTH), Mixer(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.mixer(self.norm(x)))


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def model() -> nn.Module:
    torch.manual_seed(0)
    return Mamba()


def example() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]
