"""Several optimizers as one, and parameters that stand for what a rank lacks.

In: optimizers over parameters of their own (Muon for matrices, AdamW for the rest). Out: one whose groups, states and
steps are theirs: schedules of rates, saved states and training loops need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizers that step one after the other. Their groups are its groups."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.optimizers = tuple(optimizers)
        self.state = _States(self.optimizers)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step() if closure is None else one.step(closure)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CombinedOptimizer.__init__(self, state["optimizers"])


class _States(MutableMapping[Any, Any]):
    """The state of each parameter, where its optimizer has it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _home(self, parameter: Any) -> MutableMapping[Any, Any]:
        for one in self._optimizers:
            if any(parameter is held for group in one.param_groups for held in group["params"]):
                return one.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: Any) -> Any:
        return self._home(parameter)[parameter]

    def __setitem__(self, parameter: Any, state: Any) -> None:
        self._home(parameter)[parameter] = state

    def __delitem__(self, parameter: Any) -> None:
        del self._home(parameter)[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in one.state for one in self._optimizers)

    def get(self, parameter: Any, default: Any = None) -> Any:
        """Makes no state where there is none."""
        return self._home(parameter)[parameter] if parameter in self else default

    def __iter__(self) -> Iterator[Any]:
        return (parameter for one in self._optimizers for parameter in one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)


def as_one(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives one optimizer where `make` gives a list of them."""

    def made(parameters: Sequence[nn.Parameter]) -> Any:
        found = make(parameters)
        several = isinstance(found, list | tuple) and found and all(isinstance(o, torch.optim.Optimizer) for o in found)
        return CombinedOptimizer(found) if several else found

    return made


def with_empties(held: Sequence[nn.Parameter], dims: Collection[int]) -> list[nn.Parameter]:
    """The parameters, and an empty one of each of these numbers of dims of which none is trained.

    Optimizers refuse an empty list, also of matrices alone. An empty one never has a gradient: nobody updates it.
    """
    missing = set(dims) - {parameter.dim() for parameter in held if parameter.requires_grad} - {0}
    return [*held, *(nn.Parameter(torch.empty((0,) * num_dims)) for num_dims in sorted(missing))]
