"""Makers of rarer ops: see `makers`."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.property.sketch import Sketch, ref, small


def assorted(sketch: Sketch, rng: random.Random) -> bool:
    """One of many operators that take one tensor and a dim."""
    x = sketch.pick(lambda shape: 1 <= len(shape) <= 4 and small(shape))
    if x is None:
        return False
    shape = sketch.shape(x)
    at = rng.randrange(len(shape))
    rows = sketch.noise(shape).argsort(at)[tuple(slice(2) if i == at else slice(None) for i in range(len(shape)))]
    choices: list[tuple[Any, ...]] = [
        ("aten.cumsum.default", ref(x), at),
        ("aten.max.dim", ref(x), at),
        ("aten.var.correction", ref(x), (at,)),
        ("aten.logsumexp.default", ref(x), (at,), True),
        ("aten.roll.default", ref(x), (1,), (at,)),
        ("aten.repeat.default", ref(x), (2, *(1,) * (len(shape) - 1))),
        ("aten.constant_pad_nd.default", ref(x), (1, 2), 0.5),
        ("aten.index_select.default", ref(x), at, ref(sketch.integers((3,), shape[at]))),
        ("aten.gather.default", ref(x), at, ref(sketch.constant(rows))),
        ("aten.sort.default", ref(x), at),
        ("aten.unbind.int", ref(x), at),
        ("aten.argmax.default", ref(x), at),
        ("aten.flatten.using_ints", ref(x), 0, at),
        ("aten.clamp.default", ref(x), -0.7, 0.9),
        ("aten.movedim.int", ref(x), at, 0),
        ("aten.glu.default", ref(x), at),
        ("aten.addcmul.default", ref(x), ref(x), ref(sketch.weight(shape))),
        ("aten.lerp.Scalar", ref(x), ref(sketch.input(shape)), 0.3),
        ("aten.triu.default", ref(x), 1),
        ("aten.norm.ScalarOpt_dim", ref(x), 2, (at,)),
    ]
    chosen = rng.choice(choices)
    odd = {"aten.glu.default": shape[at] % 2 == 1, "aten.triu.default": len(shape) < 2}
    if odd.get(chosen[0]) or (shape[at] == 1 and chosen[0] == "aten.var.correction"):
        return False
    sketch.run(*chosen)
    return True


def convolution(sketch: Sketch, rng: random.Random) -> bool:
    """A convolution along one dim, a group norm, or an einsum."""
    x = sketch.pick(lambda shape: len(shape) == 3 and shape[2] >= 2 and small(shape))
    if x is None:
        return False
    _, channels, _ = sketch.shape(x)
    match rng.randrange(3):
        case 0:
            out = rng.choice([2, 4])
            bias = ref(sketch.weight((out,))) if rng.random() < 0.5 else None
            sketch.run("aten.conv1d.default", ref(x), ref(sketch.weight((out, channels, 2))), bias)
        case 1:
            groups = 2 if channels % 2 == 0 else 1
            weight = ref(sketch.weight((channels,)))
            sketch.run("aten.group_norm.default", ref(x), groups, weight, ref(sketch.weight((channels,))), 0.05)
        case _:
            weight = ref(sketch.weight((channels, 3)))
            sketch.run("aten.einsum.default", rng.choice(["abc,bd->adc", "abc,bd->acd"]), (ref(x), weight))
    return True


def tied(sketch: Sketch, rng: random.Random) -> bool:
    """Use a matrix again that another op uses."""
    used = [name for name in sketch.parameters if name in sketch.read and len(sketch.shape(name)) == 2]
    if not used:
        return False
    weight = rng.choice(used)
    rows, columns = sketch.shape(weight)
    x = sketch.pick(lambda shape: len(shape) >= 1 and shape[-1] in (rows, columns) and small(shape))
    if x is None:
        return False
    target = "aten.linear.default" if sketch.shape(x)[-1] == columns else "aten.matmul.default"
    sketch.run(target, ref(x), ref(weight))
    return True


def opaque(sketch: Sketch, rng: random.Random) -> bool:
    """An operator that only its function knows."""
    x = sketch.pick(lambda shape: len(shape) >= 1)
    if x is None:
        return False
    sketch.run("function:squash", ref(x), function=squash)
    return True


def squash(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * x.sum()
