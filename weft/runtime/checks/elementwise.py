"""Elementwise optimizers: does an optimizer treat every element of a parameter by itself?

In: what makes an optimizer over given parameters, or an optimizer as it is (its class, its settings, one group). Out: a
Verdict, found by running it: two steps on small whole parameters, against two steps on their halves, each by itself as
on a rank; and on two parameters together, against each alone. AdamW and SGD give the same numbers either way;
Adafactor, Muon and whatever takes a norm of a parameter do not, and whatever takes a norm over all parameters mixes
parameters as well. Settings that change from step to step (rates) are not part of the question.
Promised: the optimizer in question is not changed, and neither are its parameters.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer over parameters."""

SIZES = (4, 6, 2)
"""Of the first dims of what is tried; every other is 2. All of them can be halved."""
NUM_STEPS = 2
SAME = 1e-9
MARK = "_weft_watched"
"""Where an optimizer keeps what was found out about it."""
RATE = 0.05
"""What is tried has a rate that moves it: the optimizer's own may be 0 for the time being."""


@dataclass(frozen=True)
class Verdict:
    """What an optimizer mixes.

    Args:
        elements: numbers of dims of parameters whose elements it mixes.
        parameters: it mixes parameters with each other.
        known: False if it could not be tried.
    """

    elements: frozenset[int] = frozenset()
    parameters: bool = False
    known: bool = True


def mixing(make: Make, dims: Collection[int]) -> Verdict:
    """What the optimizer mixes that `make` gives, on parameters of these numbers of dims.

    >>> sorted(mixing(torch.optim.AdamW, {1, 2}).elements), sorted(mixing(torch.optim.Adafactor, {1, 2}).elements)
    ([], [1, 2])
    """
    asked = sorted(dims)
    # whatever an optimizer raises on small parameters says nothing about the real ones
    with suppress(Exception), torch.random.fork_rng(devices=[]):
        whole = [_waves(num_dims) for num_dims in asked]
        trained = _trained(make, whole)
        found = frozenset(num_dims for at, num_dims in enumerate(asked) if _differs(make, whole, at, trained[at]))
        return Verdict(found, _mixes_parameters(make, whole, trained))
    return Verdict(known=False)


def mixing_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dims: Collection[int]) -> Verdict:
    """What an optimizer mixes, as it is set, in one of its groups."""
    # parameters of other numbers of dims may be what its class refuses: one after the other
    found = [_mixing_like(optimizer, group, num_dims) for num_dims in sorted(dims)]
    elements = frozenset(num_dims for one in found for num_dims in one.elements)
    return Verdict(elements, any(one.parameters for one in found), all(one.known for one in found))


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the answer depends on: the class, and settings; of numbers whether they are 0."""
    told = sorted(_settings(group).items())
    return type(optimizer), *((name, _kind(value)) for name, value in told if name != "lr")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names", "initial_lr")}


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_kind, value))})"
    if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1):
        return "0.0" if float(value) == 0 else "number"
    return repr(value)


def _waves(num_dims: int) -> list[Tensor]:
    """A tensor to start from, whose rows and columns differ in size, and gradients of it."""
    shape = tuple(SIZES[dim] if dim < len(SIZES) else 2 for dim in range(num_dims))
    position = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    return [torch.sin(1.7 * position + phase) * (1.0 + position) for phase in range(NUM_STEPS + 1)]


def _trained(make: Make, waves: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each of the parameters after two steps."""
    dense = torch.contiguous_format
    parameters = [nn.Parameter(start.clone(memory_format=dense)) for start, *_ in waves]
    made = make(parameters)
    for step in range(NUM_STEPS):
        for parameter, wave in zip(parameters, waves, strict=True):
            parameter.grad = wave[step + 1].clone(memory_format=dense)
        made.step()
    return [parameter.detach() for parameter in parameters]


def _differs(make: Make, whole: Sequence[Sequence[Tensor]], at: int, trained: Tensor) -> bool:
    """True if halves of one of the parameters, along some dim, become other than the whole does."""
    for dim in range(trained.dim()):
        halves = []
        for number in range(2):
            part = [wave.chunk(2, dim)[number] for wave in whole[at]]
            halves.append(_trained(make, [part if other == at else one for other, one in enumerate(whole)])[at])
        if not torch.allclose(torch.cat(halves, dim), trained, rtol=SAME, atol=SAME):
            return True
    return False


def _mixes_parameters(make: Make, whole: Sequence[Sequence[Tensor]], trained: Sequence[Tensor]) -> bool:
    """True if parameters become others when there are more of them."""
    more = [[3.0 * wave.flip(0) for wave in one] for one in whole]
    together = _trained(make, [*whole, *more])
    return not all(
        torch.allclose(one, alone, rtol=SAME, atol=SAME)
        for one, alone in zip(together[: len(whole)], trained, strict=True)
    )


def _mixing_like(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], num_dims: int) -> Verdict:
    found = Verdict(known=False)
    for make in _likes(optimizer, group):
        if not found.known:
            found = mixing(make, {num_dims})
    return found


def _likes(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[Make]:
    """What makes optimizers of the same class and settings."""
    own, kind = vars(optimizer), cast(Callable[..., torch.optim.Optimizer], type(optimizer))
    settings = _settings(group)
    if "lr" in settings:
        settings["lr"] = torch.tensor(RATE) if isinstance(settings["lr"], Tensor) else RATE
    if "capturable" in settings:
        # is for devices only, and changes no number
        settings["capturable"] = False

    def twin(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = object.__new__(type(optimizer))
        # a scheduler puts its own step() there
        made.__dict__.update({name: value for name, value in own.items() if name not in ("step", "zero_grad")})
        made.state = defaultdict(dict)
        made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        made.param_groups = [{**settings, "params": parameters}]
        return made

    def again(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return kind([{**settings, "params": parameters}])

    # what holds more than settings (another optimizer, tensors) must not be shared with a twin
    base = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    plain = all(
        _is_plain(value)
        for name, value in own.items()
        if name not in (*base, "step", "zero_grad") and not name.startswith("_weft")
    )
    return [twin, again] if plain else [again]


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)
