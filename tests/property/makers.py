"""Makers: each adds one op of the pool to a Sketch (or a few that belong together).

A maker answers False where nothing fits. `POOL` says how often each is tried.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from tests.property.rarer import assorted, convolution, opaque, tied
from tests.property.sketch import MOST_ELEMENTS, Sketch, ref, small

Maker = Callable[[Sketch, random.Random], bool]

SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 8)


def linear(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick(lambda shape: len(shape) >= 1 and small(shape))
    if x is None:
        return False
    last = sketch.shape(x)[-1]
    out = last if rng.random() < 0.4 else rng.choice(SIZES)
    bias = ref(sketch.weight((out,))) if rng.random() < 0.5 else None
    sketch.run("aten.linear.default", ref(x), ref(sketch.weight((out, last))), bias)
    return True


def matmul(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick(lambda shape: len(shape) >= 2 and small(shape))
    if x is None:
        return False
    shape = sketch.shape(x)
    other = sketch.pick(lambda s: len(s) >= 2 and s[-2] == shape[-1] and s[:-2] in (shape[:-2], ()))
    if other is None or rng.random() < 0.4:
        other = sketch.weight((shape[-1], rng.choice(SIZES)))
    sketch.run("aten.matmul.default", ref(x), ref(other))
    return True


def bmm(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick(lambda shape: len(shape) == 3 and small(shape))
    if x is None:
        return False
    b, _, k = sketch.shape(x)
    other = sketch.pick(lambda s: len(s) == 3 and s[:2] == (b, k)) or sketch.weight((b, k, rng.choice(SIZES)))
    sketch.run("aten.bmm.default", ref(x), ref(other))
    return True


def addmm(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick(lambda shape: len(shape) == 2 and small(shape))
    if x is None:
        return False
    m, k = sketch.shape(x)
    n = rng.choice(SIZES)
    bias = sketch.weight(rng.choice([(n,), (m, n), (1, n)]))
    options: dict[str, Any] = {"beta": 0.5, "alpha": 2.0} if rng.random() < 0.3 else {}
    sketch.run("aten.addmm.default", ref(bias), ref(x), ref(sketch.weight((k, n))), **options)
    return True


UNARY = ("tanh", "gelu", "relu", "sigmoid", "silu", "sin", "neg", "softplus", "clone")


def unary(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick()
    if x is None:
        return False
    sketch.run(f"aten.{rng.choice(UNARY)}.default", ref(x))
    return True


def bounded_exp(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick()
    if x is None:
        return False
    (bounded,) = sketch.run("aten.tanh.default", ref(x))
    sketch.run("aten.exp.default", ref(bounded))
    return True


def scalar(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick()
    if x is None:
        return False
    target, number = rng.choice(
        [
            ("aten.mul.Scalar", 0.5),
            ("aten.add.Scalar", 1.5),
            ("aten.div.Scalar", 3.0),
            ("aten.mul.Tensor", -1.25),
            ("aten.add.Tensor", 0.25),
            ("aten.pow.Tensor_Scalar", 2),
            ("aten.rsub.Scalar", 1.0),
        ]
    )
    sketch.run(target, ref(x), number)
    return True


def binary(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick()
    if x is None:
        return False
    shape = sketch.shape(x)
    kind = rng.random()
    if kind < 0.15:
        other = x
    elif kind < 0.55:
        other = sketch.pick(lambda s: _broadcasts(s, shape)) or x
    elif kind < 0.65:
        other = sketch.input(_broadcastable(shape, rng))
    elif kind < 0.7:
        other = sketch.constant(sketch.noise(_broadcastable(shape, rng)))
    else:
        other = sketch.weight(_broadcastable(shape, rng))
    target = rng.choice(["aten.add.Tensor"] * 2 + ["aten.mul.Tensor"] * 2 + ["aten.sub.Tensor"] * (other != x))
    pair = [ref(x), ref(other)]
    rng.shuffle(pair)
    options: dict[str, Any] = {"alpha": 0.5} if target == "aten.add.Tensor" and rng.random() < 0.2 else {}
    sketch.run(target, *pair, **options)
    return True


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    pairs = zip(reversed(a), reversed(b), strict=False)
    long_a, long_b = (*(1,) * (len(b) - len(a)), *a), (*(1,) * (len(a) - len(b)), *b)
    size = math.prod(max(x, y) for x, y in zip(long_a, long_b, strict=True))
    return all(x == y or 1 in (x, y) for x, y in pairs) and size <= MOST_ELEMENTS


def _broadcastable(shape: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    kept = shape[rng.randint(0, len(shape)) :] if rng.random() < 0.5 else shape
    return tuple(1 if rng.random() < 0.25 else size for size in kept)


def where(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick()
    other = None if x is None else sketch.pick(lambda s: _broadcasts(s, sketch.shape(x)))
    if x is None or other is None:
        return False
    (mask,) = sketch.run("aten.gt.Scalar", ref(sketch.input(sketch.shape(x))), 0.1, grad=rng.random() < 0.5)
    if rng.random() < 0.5:
        sketch.run("aten.where.self", ref(mask), ref(x), ref(other))
    else:
        sketch.run("aten.masked_fill.Scalar", ref(x), ref(mask), 0.5)
    return True


def reshape(sketch: Sketch, rng: random.Random) -> bool:
    """Merge neighbouring dims, or split one."""
    x = sketch.pick(lambda shape: len(shape) >= 1)
    if x is None:
        return False
    shape = sketch.shape(x)
    at = rng.randrange(len(shape))
    factors = [f for f in range(1, shape[at] + 1) if shape[at] % f == 0]
    if (len(shape) >= 2 and rng.random() < 0.5) or len(shape) >= 5:
        at = min(at, len(shape) - 2)
        new = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
    else:
        outer = rng.choice(factors)
        new = (*shape[:at], outer, shape[at] // outer, *shape[at + 1 :])
    if rng.random() < 0.3:
        at = rng.randrange(len(new))
        new = (*new[:at], -1, *new[at + 1 :])
    viewable = sketch.values[x].is_contiguous() and rng.random() < 0.5
    sketch.run(f"aten.{'view' if viewable else 'reshape'}.default", ref(x), new)
    return True


def permute(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick(lambda shape: len(shape) >= 2)
    if x is None:
        return False
    dims = list(range(len(sketch.shape(x))))
    if rng.random() < 0.5:
        sketch.run("aten.transpose.int", ref(x), *rng.sample(dims, 2))
    else:
        rng.shuffle(dims)
        sketch.run("aten.permute.default", ref(x), tuple(dims))
    return True


def squeeze(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick(lambda shape: 1 in shape)
    if x is not None and rng.random() < 0.6:
        ones = [i for i, size in enumerate(sketch.shape(x)) if size == 1]
        sketch.run("aten.squeeze.dim", ref(x), rng.choice(ones))
        return True
    x = sketch.pick(lambda shape: len(shape) <= 3)
    if x is None:
        return False
    (y,) = sketch.run("aten.unsqueeze.default", ref(x), rng.randint(-len(sketch.shape(x)) - 1, len(sketch.shape(x))))
    if rng.random() < 0.5:
        sizes = tuple(rng.choice([2, 3]) if size == 1 else rng.choice([size, -1]) for size in sketch.shape(y))
        sketch.run("aten.expand.default", ref(y), sizes)
    return True


def cat(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick(lambda shape: len(shape) >= 1)
    if x is None:
        return False
    shape = sketch.shape(x)
    at = rng.randrange(len(shape))
    rest = (shape[:at], shape[at + 1 :])
    parts = [x]
    for _ in range(rng.randint(1, 2)):
        other = sketch.pick(lambda s: len(s) == len(shape) and (s[:at], s[at + 1 :]) == rest)
        parts.append(other or x)
    if sum(math.prod(sketch.shape(part)) for part in parts) > MOST_ELEMENTS:
        return False
    if all(sketch.shape(part) == shape for part in parts) and rng.random() < 0.3:
        sketch.run("aten.stack.default", tuple(map(ref, parts)), at)
    else:
        sketch.run("aten.cat.default", tuple(map(ref, parts)), at - len(shape) * rng.randint(0, 1))
    return True


def split(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick(lambda shape: any(size > 1 for size in shape))
    if x is None:
        return False
    shape = sketch.shape(x)
    at = rng.choice([i for i, size in enumerate(shape) if size > 1])
    size = shape[at]
    match rng.randrange(3):
        case 0:
            parts = sketch.run("aten.split.Tensor", ref(x), rng.randint(1, size), at)
        case 1:
            parts = sketch.run("aten.chunk.default", ref(x), rng.choice([2, 3]), at)
        case _:
            first = rng.randint(1, size - 1)
            parts = sketch.run("aten.split_with_sizes.default", ref(x), (first, size - first), at)
    if len(parts) > 1 and rng.random() < 0.6 and sketch.shape(parts[0]) == sketch.shape(parts[1]):
        sketch.run("aten.mul.Tensor", ref(parts[0]), ref(parts[1]))
    return True


def piece(sketch: Sketch, rng: random.Random) -> bool:
    """Slice, select, flip or narrow."""
    x = sketch.pick(lambda shape: any(size > 1 for size in shape))
    if x is None:
        return False
    shape = sketch.shape(x)
    at = rng.choice([i for i, size in enumerate(shape) if size > 1])
    size = shape[at]
    match rng.randrange(4):
        case 0:
            sketch.run("aten.select.int", ref(x), at, rng.randrange(-size, size))
        case 1:
            sketch.run("aten.flip.default", ref(x), (at,))
        case 2:
            start = rng.randrange(size)
            sketch.run("aten.slice.Tensor", ref(x), at, start, rng.choice([size, 2**63 - 1, start + 1]))
        case _:
            sketch.run("aten.slice.Tensor", ref(x), at, 0, size, 2)
    return True


def reduce(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick(lambda shape: len(shape) >= 2)
    if x is None:
        return False
    dims = list(range(len(sketch.shape(x))))
    chosen = tuple(rng.sample(dims, rng.randint(1, len(dims) - 1)))
    keep = rng.random() < 0.4
    match rng.randrange(5):
        case 0 | 1:
            sketch.run("aten.sum.dim_IntList", ref(x), chosen, keep)
        case 2 | 3:
            sketch.run("aten.mean.dim", ref(x), chosen, keep)
        case _:
            sketch.run("aten.amax.default", ref(x), chosen[:1], keep)
    return True


def normalise(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick(lambda shape: len(shape) >= 1)
    if x is None:
        return False
    shape = sketch.shape(x)
    match rng.randrange(4):
        case 0:
            sketch.run("aten.softmax.int", ref(x), rng.randrange(len(shape)))
        case 1:
            sketch.run("aten.log_softmax.int", ref(x), rng.randrange(len(shape)))
        case 2:
            last = shape[-rng.randint(1, min(2, len(shape))) :]
            scaled = rng.random() < 0.7
            weights = [ref(sketch.weight(last)) if scaled else None for _ in range(2)]
            sketch.run("aten.layer_norm.default", ref(x), last, *weights, 0.05)
        case _:
            sketch.run("aten.rms_norm.default", ref(x), shape[-1:], ref(sketch.weight(shape[-1:])), 0.05)
    return True


def dropout(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick()
    if x is None:
        return False
    train = rng.random() < 0.85
    sketch.run("aten.dropout.default", ref(x), 0.4, train, random_op=train)
    return True


def attention(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick(lambda shape: len(shape) in (3, 4) and small(shape))
    if x is None:
        return False
    shape = sketch.shape(x)
    key = sketch.pick(lambda s: s == shape) or x
    value = sketch.pick(lambda s: s == shape) or x
    dropped = rng.random() < 0.25
    causal = rng.random() < 0.4
    mask = None
    if not causal and rng.random() < 0.4:
        mask = ref(sketch.constant(sketch.noise((shape[-2], shape[-2]))))
    sketch.run(
        "aten.scaled_dot_product_attention.default",
        ref(x),
        ref(key),
        ref(value),
        mask,
        0.3 if dropped else 0.0,
        causal,
        random_op=dropped,
    )
    return True


def embedding(sketch: Sketch, rng: random.Random) -> bool:
    rows, width = rng.choice([3, 5, 6, 8]), rng.choice(SIZES)
    ids = sketch.integers(tuple(rng.choice(SIZES) for _ in range(rng.randint(1, 2))), rows)
    if rng.random() < 0.3:
        (ids,) = sketch.run("aten.remainder.Scalar", ref(ids), rows)
    sketch.run("aten.embedding.default", ref(sketch.weight((rows, width))), ref(ids), rng.choice([-1, -1, 0]))
    return True


def without_grad(sketch: Sketch, rng: random.Random) -> bool:
    x = sketch.pick()
    if x is None:
        return False
    if rng.random() < 0.3:
        sketch.run("aten.detach.default", ref(x))
        return True
    (y,) = sketch.run(rng.choice(["aten.tanh.default", "aten.sigmoid.default"]), ref(x), grad=False)
    if rng.random() < 0.6:
        sketch.run("aten.mul.Tensor", ref(x), ref(y))
    return True


def created(sketch: Sketch, rng: random.Random) -> bool:
    """Positions made in the forward and turned into floats."""
    x = sketch.pick(lambda shape: len(shape) >= 1)
    if x is None:
        return False
    (ids,) = sketch.run("aten.arange.default", sketch.shape(x)[-1])
    (numbers,) = sketch.run("aten.to.dtype", ref(ids), torch.float64)
    (small,) = sketch.run("aten.mul.Scalar", ref(numbers), 0.1)
    sketch.run("aten.add.Tensor", ref(x), ref(small))
    return True


def residual(sketch: Sketch, rng: random.Random) -> bool:
    """Read a tensor again that has been read before."""
    old = [name for name in sketch.floats() if name in sketch.read]
    if not old:
        return False
    x = rng.choice(old)
    other = sketch.pick(lambda s: s == sketch.shape(x))
    if other is None:
        return False
    sketch.run("aten.add.Tensor", ref(other), ref(x))
    return True


POOL: tuple[tuple[Maker, int], ...] = (
    (linear, 12),
    (matmul, 6),
    (bmm, 3),
    (addmm, 4),
    (unary, 8),
    (bounded_exp, 1),
    (scalar, 4),
    (binary, 10),
    (where, 3),
    (reshape, 6),
    (permute, 4),
    (squeeze, 3),
    (cat, 3),
    (split, 4),
    (piece, 4),
    (reduce, 4),
    (normalise, 6),
    (dropout, 3),
    (attention, 4),
    (embedding, 3),
    (without_grad, 3),
    (created, 1),
    (residual, 5),
    (assorted, 8),
    (convolution, 2),
    (opaque, 1),
    (tied, 8),
)
MAKERS = tuple(maker for maker, _ in POOL)
WEIGHTS = tuple(weight for _, weight in POOL)
