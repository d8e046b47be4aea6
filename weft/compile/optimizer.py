"""The optimizer of a model file: made, checked for kind, and probed for whether it works on parts.

In: `optimizer(parameters)` of the user's. Out: an optimizer that has a plain `step()`, or a ModelFileError with the
user's line. Weft runs an optimizer over the parts that a rank stores. That is right for optimizers that treat every
element by itself (AdamW, SGD); one that mixes the elements of a parameter (Adafactor, Muon, a norm over all of them)
would give other weights. Promised: such an optimizer is refused where a trained parameter is stored in parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import nn

from weft.compile.model_file import Subject, inside
from weft.errors import ModelFileError, PlanError
from weft.ops.precision import Float64Mode
from weft.runtime.checks.elementwise import mixing

GIVEN = "optimizer(parameters) is given a list of parameters, as in torch.optim.SGD(parameters, lr=0.1)"


def make_optimizer(subject: Subject, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The user's optimizer over these parameters."""
    with inside(subject.path, "optimizer()", remedy=GIVEN):
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
    _refuse_strangers(subject, made, parameters)
    return made


def _refuse_strangers(subject: Subject, made: torch.optim.Optimizer, given: list[nn.Parameter]) -> None:
    """An optimizer over other parameters trains nothing, on one device and in parallel alike."""
    known = set(map(id, given))
    strange = [one for group in made.param_groups for one in group["params"] if id(one) not in known]
    if strange:
        raise ModelFileError(
            f"optimizer(parameters) updates {len(strange)} tensors that are not among the parameters it was given, the "
            f"first of shape {list(strange[0].shape)}",
            place=subject.place,
            remedy="make it over `parameters`: a model made in the file is not the one that is trained",
        )


def needs_closure(made: torch.optim.Optimizer) -> bool:
    """True if `step()` cannot be called without an argument.

    >>> needs_closure(torch.optim.LBFGS([torch.zeros(1)]))
    True
    """
    wanted = list(inspect.signature(type(made).step).parameters.values())[1:]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.default is inspect.Parameter.empty and one.kind in plain for one in wanted)


def check_on_parts(subject: Subject, cut: Mapping[str, int]) -> None:
    """Refuse an optimizer that is none, or that mixes elements of a parameter which is stored in parts.

    Args:
        cut: the trained parameters that are, and how many dims each has.
    """
    trained = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    if not trained:
        return
    # not on the parameters: some optimizers change them when they are made. Memory that nobody touches costs nothing
    made = make_optimizer(subject, [nn.Parameter(torch.empty_like(one)) for one in trained])
    if not cut:
        return
    with Float64Mode():
        # of every number of dims that there is: an optimizer may be made of several, each for its own
        mixed = mixing(subject.optimizer, {one.dim() for one in trained}).elements
        if not mixed:
            mixed = frozenset(n for n in set(cut.values()) if mixing(subject.optimizer, {n}).elements)
    wrong = next((name for name, num_dims in cut.items() if num_dims in mixed), None)
    if wrong is not None:
        raise PlanError(
            f"{type(made).__name__} mixes the elements of a parameter, and the plan stores {wrong} in parts: "
            "the weights would differ from one device",
            place=subject.place,
            remedy="add `spread` to the recipe: each parameter lies whole on one device; or a plan that cuts no "
            "parameter (dp), or an optimizer that treats each element alone (AdamW, SGD)",
        )
