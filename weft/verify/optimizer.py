"""The optimizer of a model file: made, checked for kind, and probed for whether it works on parts.

In: `optimizer(parameters)` of the user's. Out: an optimizer that has a plain `step()`, or a ModelFileError with the
user's line. Weft runs an optimizer over the parts that a rank stores. That is right for optimizers that treat every
element by itself (AdamW, SGD); one that mixes the elements of a parameter (Adafactor, Muon, a norm over all of them)
would give other weights. Promised: such an optimizer is refused where a trained parameter is stored in parts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
from torch import nn

from weft.errors import ModelFileError, PlanError
from weft.ir.program import Program
from weft.ir.ranges import count
from weft.verify.model_file import Inside, Optimizer, Subject
from weft.verify.precision import Float64Mode

PROBE = (4, 6)
"""Shape of the matrix that shows whether an optimizer mixes elements: both dims can be halved."""
NUM_STEPS = 2
SAME = 1e-9

GIVEN = "optimizer(parameters) is given a list of parameters, as in torch.optim.SGD(parameters, lr=0.1)"


def make_optimizer(subject: Subject, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The user's optimizer over these parameters."""
    with Inside(subject.path, "optimizer()", remedy=GIVEN):
        made = subject.optimizer(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        what = "None" if made is None else f"a {type(made).__name__}"
        raise ModelFileError(
            f"optimizer() returned {what}, not a torch.optim.Optimizer",
            place=subject.place,
            remedy=f"return an optimizer: {GIVEN}",
        )
    if needs_closure(made):
        raise ModelFileError(
            f"{type(made).__name__} needs a closure in step(): it runs the model several times in one step",
            place=subject.place,
            remedy="use an optimizer whose step() needs no argument, such as AdamW or SGD",
        )
    return made


def needs_closure(made: torch.optim.Optimizer) -> bool:
    """True if `step()` cannot be called without an argument.

    >>> needs_closure(torch.optim.LBFGS([torch.zeros(1)]))
    True
    """
    wanted = list(inspect.signature(type(made).step).parameters.values())[1:]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.default is inspect.Parameter.empty and one.kind in plain for one in wanted)


def check_optimizer(subject: Subject, program: Program) -> None:
    """Refuse an optimizer that is none, or that mixes elements of a parameter which the plan stores in parts."""
    parameters = program.graph.parameters
    check_on_parts(
        subject, next((p.names[0] for p in parameters if p.trainable and _in_parts(program, p.tensor)), None)
    )


def check_on_parts(subject: Subject, cut: str | None) -> None:
    """The same, told the name of a trained parameter that is stored in parts, if there is one."""
    trained = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    if not trained:
        return
    # on copies: some optimizers change their parameters when they are made
    made = make_optimizer(subject, [nn.Parameter(one.detach().clone()) for one in trained])
    if cut is not None and mixes_elements(subject.optimizer):
        raise PlanError(
            f"{type(made).__name__} mixes the elements of a parameter, and the plan stores {cut} in parts: "
            "the weights would differ from one device",
            place=subject.place,
            remedy="a plan that cuts no parameter (dp), or an optimizer that treats each element alone (AdamW, SGD)",
        )


def _in_parts(program: Program, tensor: str) -> bool:
    layout = program.stored[tensor]
    whole = math.prod(layout.shape)
    return any(math.prod(map(count, part.ranges)) < whole for part in layout.parts())


def mixes_elements(optimizer: Optimizer) -> bool:
    """True if two steps on a whole matrix and on its halves, each by itself as on a rank, give other weights.

    False also for one that cannot run on a single matrix: the comparison with one device will tell then.

    >>> mixes_elements(torch.optim.AdamW), mixes_elements(torch.optim.Adafactor)
    (False, True)
    """
    start, gradients = _wave(0), [_wave(step) for step in range(1, NUM_STEPS + 1)]
    with _Quietly(), Float64Mode(), torch.random.fork_rng(devices=[]):
        whole = _trained(optimizer, start, gradients)
        for dim in range(len(PROBE)):
            halves = [
                _trained(optimizer, part, steps)
                for part, *steps in zip(*(one.chunk(2, dim) for one in (start, *gradients)), strict=True)
            ]
            if not torch.allclose(torch.cat(halves, dim), whole, rtol=SAME, atol=SAME):
                return True
    return False


def _wave(phase: int) -> torch.Tensor:
    """A matrix whose rows and columns differ in size."""
    position = torch.arange(math.prod(PROBE), dtype=torch.float64).reshape(PROBE)
    return torch.sin(1.7 * position + phase) * (1.0 + position)


def _trained(optimizer: Optimizer, start: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    parameter = nn.Parameter(start.clone(memory_format=torch.contiguous_format))
    made = optimizer([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        made.step()
    return parameter.detach()


class _Quietly:
    """Whatever the user's optimizer raises on the probe says nothing about the model's parameters."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, Exception)
