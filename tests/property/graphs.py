"""Random Graphs: three to fourteen ops of a broad pool on tensors of odd sizes, ending in a scalar loss.

`random_case(seed)` is a pure function of its seed.
"""

from __future__ import annotations

import math
import random
from typing import Any

from tests.property.makers import MAKERS, SIZES, WEIGHTS, linear
from tests.property.sketch import Case, Sketch, ref


def random_case(seed: int, num_ops: int | None = None) -> Case:
    """A random graph with tensors to run it on."""
    rng = random.Random(seed)
    sketch = Sketch(rng)
    for _ in range(rng.randint(1, 2)):
        sketch.input(_shape(rng))
    wanted = num_ops or rng.randint(3, 14)
    tries = 0
    while len(sketch.ops) < wanted and tries < 60:
        tries += 1
        rng.choices(MAKERS, WEIGHTS)[0](sketch, rng)
    if rng.random() < 0.15:
        sketch.parameter(_shape(rng))
    if rng.random() < 0.15:
        _buffer_update(sketch, rng)
    loss = _loss(sketch, rng)
    others = [name for op in sketch.ops for name in op.outputs if name != loss]
    extra = rng.sample(others, 1) if others and rng.random() < 0.25 else []
    return sketch.finish(loss, extra)


def _shape(rng: random.Random) -> tuple[int, ...]:
    while True:
        shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((2, 2, 3, 3, 4))))
        if 2 <= math.prod(shape) <= 200:
            return shape


def _buffer_update(sketch: Sketch, rng: random.Random) -> None:
    """A buffer that is read and gets new content."""
    x = sketch.pick(lambda shape: len(shape) >= 1)
    if x is None:
        return
    (mean,) = sketch.run("aten.mean.dim", ref(x), (0,), False, grad=False)
    buffer = sketch.buffer(sketch.shape(mean))
    (new,) = sketch.run("aten.lerp.Scalar", ref(buffer), ref(mean), 0.1, grad=False)
    sketch.buffers[buffer] = new
    if rng.random() < 0.5:
        sketch.run("aten.sub.Tensor", ref(x), ref(buffer))


def _loss(sketch: Sketch, rng: random.Random) -> str:
    """A scalar that depends on what has not been read yet."""
    if not any(sketch.tensors[name].needs_grad for op in sketch.ops for name in op.outputs):
        linear(sketch, rng)
    made = [name for op in sketch.ops for name in op.outputs if sketch.values[name].is_floating_point()]
    trained = [name for name in made if sketch.tensors[name].needs_grad]
    unread = [name for name in trained if name not in sketch.read]
    terms = unread[-rng.randint(1, 3) :] or trained[-1:] or made[-1:]
    losses = [_term(sketch, rng, name) for name in terms]
    while len(losses) > 1:
        losses.append(sketch.run("aten.add.Tensor", ref(losses.pop(0)), ref(losses.pop(0)))[0])
    return losses[0]


def _term(sketch: Sketch, rng: random.Random, x: str) -> str:
    shape = sketch.shape(x)
    if len(shape) == 2 and shape[1] > 1 and rng.random() < 0.6:
        targets = sketch.integers(shape[:1], shape[1])
        ignored = rng.choice([-100, 0])
        reduction = rng.choice([1, 1, 2])
        if (sketch.values[targets] != ignored).any():
            options: dict[str, Any] = {"label_smoothing": 0.1} if rng.random() < 0.2 else {}
            name = "aten.cross_entropy_loss.default"
            return sketch.run(name, ref(x), ref(targets), None, reduction, ignored, **options)[0]
    if rng.random() < 0.7:
        target = sketch.input(shape)
        if rng.random() < 0.3:
            return sketch.run("aten.mse_loss.default", ref(x), ref(target), rng.choice([1, 2]))[0]
        (x,) = sketch.run("aten.mul.Tensor", ref(x), ref(target))
    return sketch.run(rng.choice(["aten.sum.default", "aten.mean.default"]), ref(x))[0]
