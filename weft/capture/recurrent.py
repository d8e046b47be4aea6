"""Recurrent layers with dropout between them, layer by layer.

Enters: a call of `torch.lstm` and its kin that forward makes. Leaves: the same layers, one call each, with a dropout
between two of them, so that each draw of random numbers is an op of its own. Torch runs the steps of a sequence in its
first dim, whatever `batch_first` says, and drops there: so do the calls made here, or other numbers would be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LAYERS: Mapping[Any, bool] = {getattr(torch, name): name == "lstm" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
"""Functions of whole stacks of layers, and whether their state is a pair."""
NUM_ARGUMENTS = 9


def drops_between(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws between its layers. Packed sequences are not meant: what they hold is not known."""
    if func not in LAYERS or kwargs or len(args) != NUM_ARGUMENTS or isinstance(args[1], Tensor) != (not LAYERS[func]):
        return False
    _, _, weights, _, num_layers, dropout, train, _, _ = args
    return bool(not isinstance(weights, Tensor) and train and dropout > 0 and num_layers > 1)


def by_layers(func: Callable[..., Any], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """What the call gives."""
    x, state, weights, biases, num_layers, dropout, train, both, batch_first = args
    states = tuple(state) if LAYERS[func] else (state,)
    ways = 2 if both else 1
    each = len(weights) // num_layers
    batched = x.dim() == 3
    x = x.transpose(0, 1) if batch_first and batched else x
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        own = tuple(one[layer * ways : (layer + 1) * ways] for one in states)
        part = weights[layer * each : (layer + 1) * each]
        start = own if LAYERS[func] else own[0]
        x, *end = func(x, start, part, biases, 1, 0.0, train, both, False)
        ends.append(tuple(end))
        if layer < num_layers - 1:
            x = torch.dropout(x, dropout, train)
    x = x.transpose(0, 1) if batch_first and batched else x
    return x, *(torch.cat(one) for one in zip(*ends, strict=True))
