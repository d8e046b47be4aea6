"""From the name of a call to the function that runs it.

In: `aten.OPERATOR.OVERLOAD` of torch, or `weft.NAME` of this runtime. Out: a callable. Which names exist is written
down here and nowhere else; an unknown one raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from weft.runtime import attention, embedding, losses, norms, random, reductions, softmax

FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "alpha_dropout": random.alpha_dropout,
        "attention": attention.attention,
        "batch_norm": norms.batch_norm,
        "bernoulli": random.bernoulli,
        "cross_entropy": losses.cross_entropy,
        "dropout": random.dropout,
        "embedding_part": embedding.embedding_part,
        "exponential": random.exponential,
        "extreme": reductions.extreme,
        "extreme_and_index": reductions.extreme_and_index,
        "extreme_index": reductions.extreme_index,
        "group_norm": norms.group_norm,
        "layer_norm": norms.layer_norm_out,
        "logsumexp": softmax.logsumexp,
        "loss_part": losses.loss_part,
        "mean_part": reductions.mean_part,
        "native_dropout": random.native_dropout,
        "native_layer_norm": norms.layer_norm,
        "native_rms_norm": norms.rms_norm,
        "rand": random.rand,
        "randint": random.randint,
        "randn": random.randn,
        "randperm": random.randperm,
        "rms_norm": norms.rms_norm_out,
        "rrelu": random.rrelu,
        "soft_cross_entropy": losses.soft_cross_entropy,
        "softmax": softmax.softmax,
        "vector_norm": reductions.vector_norm,
        "variance": reductions.variance,
        "variance_only": reductions.variance_only,
    }
)
"""The functions behind `weft.NAME`."""


def resolve(target: str) -> Callable[..., Any]:
    """The function that a call's target names.

    >>> resolve("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    room, *names = target.split(".")
    if room == "weft" and len(names) == 1 and names[0] in FUNCTIONS:
        return FUNCTIONS[names[0]]
    if room == "aten" and len(names) == 2:
        return getattr(getattr(torch.ops.aten, names[0]), names[1])  # type: ignore[no-any-return]
    raise LookupError(f"no function is called {target!r}")
