"""DrawMode: makes an eager model draw from a Stream, so that it can be compared with any plan.

In: a Stream; entered around one forward. While it is on, the n-th random draw that reaches the dispatcher takes the
numbers of draw n, element by element of the whole tensor, and the global generator is not touched. A random
operator that it does not know raises: nothing is drawn from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.runtime import random, sampling
from weft.runtime.random import Stream

aten = torch.ops.aten
Numbers = Callable[..., Any]


class DrawMode(TorchDispatchMode):
    """Replaces every random draw by the numbers of a Stream, counting draws from zero."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        self.num_draws = 0
        self._table = _table()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        if func not in self._table:
            raise RuntimeError(f"{func}: a random operator that cannot be drawn from a stream")
        if kwargs.get("generator") is not None:
            raise RuntimeError(f"{func}: draws from a generator of its own, not from the stream")
        return self._table[func](self, *args, **{k: v for k, v in kwargs.items() if k != "generator"})

    def draw(self, shape: Sequence[int]) -> dict[str, Any]:
        """The next draw, as arguments of a function in `random`."""
        number = self.num_draws
        self.num_draws += 1
        return {"draw": random.whole_draw(number, tuple(shape)), "stream": self.stream}


def _draws_nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True for operators that carry the tag, but with these arguments draw nothing."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if "dropout_p" in names:
        return float(given.get("dropout_p", 0.0)) == 0.0
    if func in (aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default):
        return not given.get("training", False)
    if func is aten.native_dropout.default:
        return given["train"] is False or not 0 < given["p"] < 1 or given["input"].numel() == 0
    return False


def _like(x: Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "device": x.device}


def _made(options: Mapping[str, Any], x: Tensor | None = None) -> dict[str, Any]:
    """dtype and device of a factory function, `x` being the tensor it imitates."""
    default = torch.get_default_dtype() if x is None else x.dtype
    device = None if x is None else x.device
    return {"dtype": options.get("dtype") or default, "device": options.get("device") or device}


def _new(numbers: Numbers) -> Numbers:
    """The functional twin of `_fill`."""

    def run(mode: DrawMode, x: Tensor, *args: Any, **named: Any) -> Tensor:
        args = (*args, *named.values())
        return numbers(*args, **mode.draw(x.shape), **_like(x))  # type: ignore[no-any-return]

    return run


def _fill(numbers: Numbers) -> Numbers:
    """`x.numbers_(*args)`."""
    new = _new(numbers)
    return lambda mode, x, *args, **named: x.copy_(new(mode, x, *args, **named))


def _of(numbers: Numbers) -> Numbers:
    """`numbers(x)`, drawn for each element of `x`."""
    return lambda mode, x: numbers(x, **mode.draw(x.shape), **_like(x))


def _factory(numbers: Numbers) -> Numbers:
    """`numbers(*args, size)`."""

    def run(mode: DrawMode, *args: Any, **options: Any) -> Tensor:
        return numbers(*args[:-1], **mode.draw(args[-1]), **_made(options))  # type: ignore[no-any-return]

    return run


def _imitate(numbers: Numbers) -> Numbers:
    """`numbers_like(x, *args)`."""

    def run(mode: DrawMode, x: Tensor, *args: Any, **options: Any) -> Tensor:
        return numbers(*args, **mode.draw(x.shape), **_made(options, x))  # type: ignore[no-any-return]

    return run


def _below(high: int, **options: Any) -> Tensor:
    return random.randint(0, high, **options)


def _permutation(mode: DrawMode, n: int, **options: Any) -> Tensor:
    return random.randperm(**mode.draw((n,)), **(_made(options) | {"dtype": options.get("dtype") or torch.int64}))


def _integers(numbers: Numbers) -> Numbers:
    run = _factory(numbers)
    return lambda mode, *args, **options: run(mode, *args, **{"dtype": torch.int64, **options})


def _multinomial(mode: DrawMode, p: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    shape = (*p.shape[:-1], num_samples) if replacement else tuple(p.shape)
    return sampling.multinomial(p, num_samples, replacement, **mode.draw(shape))


def _normal(mode: DrawMode, mean: Tensor | float = 0.0, std: Tensor | float = 1.0) -> Tensor:
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    return random.randn(mean, std, **mode.draw(shape), **_like(tensors[0]))


def _native_dropout(mode: DrawMode, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return random.native_dropout(x, p, train, **mode.draw(x.shape))


def _rrelu(
    mode: DrawMode, x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    drawn = mode.draw(x.shape)
    slope = (random.uniform(drawn["stream"], drawn["draw"], device=x.device) * (upper - lower) + lower).to(x.dtype)
    noise.copy_(torch.where(x <= 0, slope, 1))
    return x * noise


def _table() -> Mapping[Any, Numbers]:
    draw = random
    return {
        aten.bernoulli_.float: _fill(lambda p=0.5, **options: draw.bernoulli(p, **options)),
        aten.bernoulli_.Tensor: _fill(draw.bernoulli),
        aten.bernoulli.default: _of(draw.bernoulli),
        aten.bernoulli.p: _new(draw.bernoulli),
        aten.bernoulli.Tensor: _new(draw.bernoulli),
        aten.uniform_.default: _fill(draw.rand),
        aten.uniform.default: _new(draw.rand),
        aten.normal_.default: _fill(draw.randn),
        aten.normal_functional.default: _new(draw.randn),
        aten.normal.Tensor_float: _normal,
        aten.normal.float_Tensor: _normal,
        aten.normal.Tensor_Tensor: _normal,
        aten.normal.float_float: _factory(draw.randn),
        aten.exponential_.default: _fill(draw.exponential),
        aten.exponential.default: _new(draw.exponential),
        aten.cauchy_.default: _fill(sampling.cauchy),
        aten.cauchy.default: _new(sampling.cauchy),
        aten.log_normal_.default: _fill(sampling.log_normal),
        aten.log_normal.default: _new(sampling.log_normal),
        aten.geometric_.default: _fill(sampling.geometric),
        aten.geometric.default: _new(sampling.geometric),
        aten.poisson.default: _of(sampling.poisson),
        aten.multinomial.default: _multinomial,
        aten.random_.to: _fill(_below),
        aten.random_.__getattr__("from"): _fill(draw.randint),
        aten.rand.default: _factory(draw.rand),
        aten.rand_like.default: _imitate(draw.rand),
        aten.randn.default: _factory(draw.randn),
        aten.randn_like.default: _imitate(draw.randn),
        aten.randint.default: _integers(_below),
        aten.randint.low: _integers(draw.randint),
        aten.randint_like.default: _imitate(_below),
        aten.randint_like.low_dtype: _imitate(draw.randint),
        aten.randperm.default: _permutation,
        aten.native_dropout.default: _native_dropout,
        aten.rrelu_with_noise.default: _rrelu,
    }
