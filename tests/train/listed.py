"""What a rank of processes does with all parameters of the original, those of other ranks among them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import weft
from weft.capture.example import split_example
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.program.surface import surface_of
from weft.train.opened import open_rank

DECAY = 0.9


class Net(nn.Module):
    """A frozen layer, a number, a bias that is smaller than a job, a parameter without use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fixed, self.head = nn.Linear(6, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1)
        self.scale, self.unused = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.head(torch.tanh(self.fixed(self.body(x))))).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(seed: int = 0) -> tuple[Tensor]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),)


def optimizers(module: Any) -> list[torch.optim.Optimizer]:
    """By submodule, by name and by number of dims."""
    rest = [(name, one) for name, one in module.named_parameters() if not name.startswith("head")]
    groups = [
        {"params": [one for name, one in rest if "weight" not in name], "weight_decay": 0.0},
        {"params": [one for _, one in rest if one.ndim == 2]},
    ]
    return [torch.optim.SGD(module.head.parameters(), lr=0.1), torch.optim.AdamW(groups, lr=0.01)]


def prepare(module: Any) -> Tensor:
    """What loops do with gradients; the norm of those of the head."""
    for one in module.parameters():
        if one.grad is None:
            continue
        one.grad.mul_(0.5)
    for one in module.body.parameters():
        one.grad.add_(one.detach(), alpha=0.1)
    if isinstance(module, Net) and type(module) is Net:
        return nn.utils.clip_grad_norm_(module.head.parameters(), 0.1)
    return weft.clip_grad_norm_(module.head.parameters(), 0.1)


@torch.no_grad()
def follow(teacher: Any, student: Any) -> None:
    for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.lerp_(theirs, 1 - DECAY)


def trained_eagerly() -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """The weights, those of a mean that follows them, the norms, the last gradients."""
    model, mean, norms = net(), net(), []
    ours = optimizers(model)
    for step in range(3):
        for one in ours:
            one.zero_grad()
        model(*batch(step)).backward()
        norms.append(prepare(model))
        for one in ours:
            one.step()
        follow(mean, model)
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return model.state_dict(), mean.state_dict(), norms, grads


def opened(transport: ProcessTransport, files: Any, model: nn.Module) -> Any:
    surface = surface_of(model, lambda: model, split_example(batch()))
    order = {name: at for at, name in enumerate(model.state_dict())}
    return open_rank(files, transport, model, surface=surface, known=order)


def trains(transport: ProcessTransport, given: tuple[Any, nn.Module]) -> tuple[Any, ...]:
    """A loop in which each line is that of one device."""
    files, model = given
    parallel, mean = opened(transport, files, model), opened(transport, files, model)
    ours, norms = optimizers(parallel), list[Tensor]()
    for step in range(3):
        parallel.train_step(batch(step), ours, prepare=lambda: norms.append(prepare(parallel)))
        follow(mean, parallel)
    named = dict(parallel.named_parameters())
    full = {name: weft.full_tensor(one) for name, one in named.items()}
    gradients = {name: weft.full_tensor(one.grad) for name, one in named.items() if one.grad is not None}
    with torch.no_grad():
        for name, one in named.items():
            one.copy_(weft.shard_like(full[name], one))
    kept = parallel.full_state_dict()
    parallel.load_state_dict(parallel.state_dict())
    kinds = {name: (one.requires_grad, one.dim(), one.numel()) for name, one in named.items()}
    return kinds, kept, mean.full_state_dict(), norms, full, gradients, list(parallel.state_dict())
