"""Precision: in which dtypes a model computes, and in which its gradients are added up.

    precision := compute, reduce, accumulate, keep

A definition that holds on one device too, so it is no part of a plan:

1. Every floating parameter but those that match `keep` has a master in float32 (in its own dtype if that is wider),
   which the optimizer updates; forward and backward use its copy in `compute`.
2. Floating inputs of a batch are taken in `compute`. Buffers stay as they are.
3. Loss functions take their inputs in float32. Products whose operands differ in float dtype take them in `compute`,
   normalisations take their weights in float32 then. Everything else is as torch has it, autocast regions too.
4. Gradients arise in the dtype of the copy. Over micro-batches they are added in `accumulate`, over ranks in `reduce`
   (None: as they arise); in the master's `.grad` they have its dtype.

In: dtypes, or a name (`bf16`). Out: which parameter has which master, and a mode for rule 3 (`Rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

NAMES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float64": torch.float64,
    "fp64": torch.float64,
}
KNOWN = "bfloat16 (bf16), float16 (fp16), float32 (fp32) or float64 (fp64)"


class BadPrecision(ValueError):  # noqa: N818 - says what is wrong
    """No precision, or one that does not fit the model.

    Args:
        remedy: what to write instead.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Sums:
    """In which dtypes the gradients of copies are added up.

    Args:
        compute: of the copies; gradients of other dtypes are of no copies, and stay as they are.
        accumulate: over micro-batches; reduce: over ranks. None: as they arise.
    """

    compute: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def added(self, dtype: torch.dtype) -> torch.dtype | None:
        """Of sums over micro-batches of gradients that arise in a dtype; None: whatever comes."""
        return (self.accumulate or dtype) if dtype == self.compute else None

    def sent(self, dtype: torch.dtype) -> torch.dtype:
        """Of what goes from rank to rank."""
        return (self.reduce or dtype) if dtype == self.compute else dtype


NO_SUMS = Sums()


@dataclass(frozen=True)
class Precision:
    """See the head of this file.

    Args:
        keep: patterns of names of parameters that stay as they are; `*` stands for anything.
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype | None = torch.float32
    accumulate: torch.dtype | None = torch.float32
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", _patterns(self.keep))
        object.__setattr__(self, "compute", dtype_of(self.compute))
        for name in ("reduce", "accumulate"):
            value = getattr(self, name)
            if value is not None:
                what, remedy = f"{name}={value!r} is no float dtype to add up gradients in", ", or None: as they arise"
                object.__setattr__(self, name, _float_of(value, what, remedy))

    def __str__(self) -> str:
        return str(self.compute).removeprefix("torch.")

    @property
    def sums(self) -> Sums:
        return Sums(self.compute, self.accumulate, self.reduce)

    def mixed(self, module: nn.Module) -> Mixed:
        """What ranks need to know of it to train a module."""
        return Mixed(self.sums, self.masters(module))

    def masters(self, module: nn.Module) -> dict[str, torch.dtype]:
        """The dtype of each master, by all names of its parameter. One that is computed with as it is has none."""
        names: dict[int, list[str]] = {}
        held: dict[int, nn.Parameter] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            held[id(parameter)] = parameter
        self._refuse_idle([name for each in names.values() for name in each])
        found, own = {}, False
        for key, parameter in held.items():
            if parameter.is_floating_point() and not any(map(self._is_kept, names[key])):
                master = torch.promote_types(parameter.dtype, torch.float32)
                if self.compute.itemsize > master.itemsize:
                    raise BadPrecision(
                        f"to compute in {self} is wider than {names[key][0]} itself, which would be kept in "
                        f"{str(master).removeprefix('torch.')}",
                        "compute in what the model is in or in something narrower; or widen it first: model.double()",
                    )
                if parameter.dtype == master == self.compute and {self.reduce, self.accumulate} <= {None, master}:
                    own = True
                    continue
                found.update(dict.fromkeys(names[key], master))
        if not found and not own and self.keep:
            raise BadPrecision(
                f"keep={self.keep} leaves no parameter that would be computed with in another precision",
                "keep fewer parameters as they are, or leave out the precision",
            )
        if not found and not own:
            raise BadPrecision(
                "the model has no floating parameter that would be computed with in another precision",
                "leave out the precision",
            )
        return found

    def _is_kept(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.keep)

    def _refuse_idle(self, names: Sequence[str]) -> None:
        for pattern in self.keep:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = ", ".join(get_close_matches(pattern, names, cutoff=0) or names[:3])
                raise BadPrecision(
                    f"no parameter is named {pattern}, which is to be kept as it is",
                    f"keep takes names of model.named_parameters(), with * for anything; near it: {near}",
                )

    def inputs(self, values: Any) -> Any:
        """The floating tensors among the inputs of a batch in `compute`."""
        return _cast(values, self.compute, lambda one: True)


@dataclass(frozen=True)
class Mixed:
    """How a model that was captured in some precision is trained.

    Args:
        masters: the dtype of each, by all names of its parameter.
    """

    sums: Sums
    masters: Mapping[str, torch.dtype]


def dtype_of(given: Any) -> torch.dtype:
    """A float dtype to compute in, also by its name."""
    return _float_of(given, f"{given!r} is no float dtype to compute in")


def _float_of(given: Any, wrong: str, other: str = "") -> torch.dtype:
    """The dtype; `wrong`: what to say if it is none, `other`: what else may be written."""
    found = NAMES.get(given) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or found not in NAMES.values():
        raise BadPrecision(wrong, f"write {KNOWN}{other}")
    return found


def _patterns(given: Any) -> tuple[str, ...]:
    """Patterns of names, of which one may stand by itself."""
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(isinstance(one, str) for one in found):
        raise BadPrecision(
            f"keep={given!r} is no tuple of names of parameters",
            'write keep=("norm.*", "head.bias"), names of parameters with * for anything, or leave it out',
        )
    return found


class Rules(TorchFunctionMode):
    """Rule 3, while a forward runs under it."""

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self._compute = precision.compute

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LOSSES:
            args, kwargs = _cast((args, kwargs), torch.float32, lambda one: one.dtype.itemsize < torch.float32.itemsize)
        elif func in PRODUCTS and _differ((args, kwargs)) and not _is_autocast((args, kwargs)):
            args, kwargs = _cast((args, kwargs), self._compute, lambda one: True)
        elif func in NORMS and _differ((args, kwargs)):
            at = NORMS[func]
            args = (*args[:at], *_cast(args[at : at + 2], torch.float32, lambda one: True), *args[at + 2 :])
            told = {name: kwargs[name] for name in ("weight", "bias") if name in kwargs}
            kwargs = {**kwargs, **_cast(told, torch.float32, lambda one: True)}
        return func(*args, **kwargs)


LOSSES = frozenset(
    {
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.kl_div,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.poisson_nll_loss,
        F.gaussian_nll_loss,
        F.cosine_embedding_loss,
        F.margin_ranking_loss,
        F.hinge_embedding_loss,
        F.soft_margin_loss,
        F.multi_margin_loss,
        F.multilabel_margin_loss,
        F.multilabel_soft_margin_loss,
        F.triplet_margin_loss,
        F.triplet_margin_with_distance_loss,
        F.ctc_loss,
    }
)

_MATRICES = ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm")
PRODUCTS = frozenset(
    {
        F.linear,
        F.bilinear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        torch.einsum,
        torch.tensordot,
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        *(getattr(torch, name) for name in _MATRICES),
        *(getattr(Tensor, name) for name in _MATRICES),
    }
)

NORMS: Mapping[Any, int] = {
    F.layer_norm: 2,
    F.rms_norm: 2,
    F.group_norm: 2,
    F.batch_norm: 3,
    F.instance_norm: 3,
}
"""Normalisations, and the position of their weight; the bias comes after it."""


def _is_autocast(values: Any) -> bool:
    """True inside an autocast region: torch casts there."""
    devices = {one.device.type for one in pytree.tree_leaves(values) if isinstance(one, Tensor)}
    return any(torch.is_autocast_enabled(one) for one in devices if torch.amp.is_autocast_available(one))


def _differ(values: Any) -> bool:
    """True if there are tensors of several float dtypes."""
    leaves = pytree.tree_leaves(values)
    return len({one.dtype for one in leaves if isinstance(one, Tensor) and one.is_floating_point()}) > 1


def _cast(values: Any, dtype: torch.dtype, which: Callable[[Tensor], bool]) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda one: one.to(dtype) if one.is_floating_point() and which(one) else one, values
    )
