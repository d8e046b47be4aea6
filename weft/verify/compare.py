"""Comparison: how far two sets of tensors lie apart, and the verdict over all of them.

The difference of two tensors is max|a - b| / max(max|b|, RMS over all tensors of that kind), where b is the reference.
The RMS keeps gradients that vanish in exact arithmetic (the bias of an attention key) from being compared with their
own rounding. Kinds: loss, gradients, weights (buffers count as weights). Promised: values that are not finite are as
far apart as floats can be unless they are the same infinity; a gradient that one side lacks is compared with zeros.

Optimizers such as AdamW divide a gradient by its own size, and so turn rounding into a step of full length. Elements of
the reference's gradient below ROUNDING of the scale at which that gradient is judged are `Noise`: on both sides the
update takes them as zero, after the gradients were kept for judging. So every weight and buffer can be judged.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LARGEST = sys.float_info.max
ROUNDING = 1e-9
KINDS = ("loss", "gradients", "weights", "evaluation")
FEW = 3
"""So many copies that differ are named."""

Tensors = Mapping[str, Tensor]
"""By name."""


@dataclass(frozen=True)
class Difference:
    """The largest difference of one kind, and the tensor that has it."""

    kind: str
    value: float
    tensor: str


@dataclass(frozen=True)
class FirstDifference:
    """Where the two sides part: the first operator, in execution order, whose output differs.

    `op` and `source` are empty if every forward value agrees; `tensor` is then a parameter whose gradient differs.
    """

    op: str
    tensor: str
    source: str
    difference: float
    note: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Sample:
    """What one side of the comparison computed: steps of training, and an evaluation between them."""

    losses: tuple[Tensor, ...]
    gradients: tuple[Tensors, ...]
    """Per step, by parameter name; a parameter without a gradient is absent."""
    weights: Tensors
    """Parameters and buffers after the last step."""
    disagreements: tuple[str, ...] = ()
    """Copies of one tensor that differ between ranks."""
    outputs: tuple[Tensor, ...] = ()
    """What the model returned in evaluation; none if it was not evaluated."""
    other: bool = False
    """One step was done on a batch of other values."""

    def by_kind(self) -> Iterator[Tensors]:
        """The tensors of each kind, in the order of KINDS; gradients of all steps."""
        yield {f"of step {step}": loss for step, loss in enumerate(self.losses, 1)}
        yield {
            f"{name} in step {step}": gradient
            for step, gradients in enumerate(self.gradients, 1)
            for name, gradient in gradients.items()
        }
        yield self.weights
        yield {f"output {at}": output for at, output in enumerate(self.outputs)}


@dataclass(frozen=True)
class Noise:
    """Elements of one gradient that are zero or rounding only: `where` the reference is smaller than `below`."""

    where: Tensor
    below: float

    def silence(self, gradient: Tensor) -> Tensor:
        """The gradient with those elements zero; an element that is larger than rounding on this side stays."""
        # Twice: what lies just below the bound on one side may lie just above it on the other.
        return torch.where(self.where & (gradient.abs() < 2 * self.below), torch.zeros_like(gradient), gradient)


@dataclass(frozen=True)
class Processes:
    """How a run on true processes compares with the emulator's.

    `difference` is the largest of all tensors, in `tensor`; `why` says where one may come from."""

    backend: str
    equal_bits: bool
    difference: float = 0.0
    tensor: str = ""
    why: str = ""


@dataclass(frozen=True)
class AtSizes:
    """How the same program compares at other sizes of the batch."""

    sizes: Mapping[str, int]
    equal: bool
    differences: tuple[Difference, ...]

    @property
    def largest(self) -> Difference:
        return max(self.differences, key=lambda found: found.value)

    def as_json(self) -> dict[str, Any]:
        return {
            "sizes": dict(self.sizes),
            "equal": self.equal,
            "differences": _by_kind(self.differences),
        }

    def __str__(self) -> str:
        where = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        what = f", in the {self.largest.kind} of {self.largest.tensor}" if not self.equal else ""
        return f"at {where}: largest difference {show(self.largest.value)}{what}"


@dataclass(frozen=True)
class Rounded:
    """How far steps in another precision lie from float64 (`rounded.py`).

    Args:
        ours: the largest error of each kind on the devices; one: by the definition on one device.
        wrong: tensors in which the devices' error is larger than one device's explains.
    """

    precision: str
    ours: tuple[Difference, ...]
    one: tuple[Difference, ...]
    wrong: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "devices": _by_kind(self.ours),
            "one_device": _by_kind(self.one),
            "wrong": list(self.wrong),
        }

    def __str__(self) -> str:
        pairs = zip(self.ours, self.one, strict=True)
        told = ", ".join(f"{a.kind} {show(a.value)} (one device {show(b.value)})" for a, b in pairs)
        wrong = f"; too far in {', '.join(shortened(self.wrong))}" if self.wrong else ""
        return f"in {self.precision}, from float64: {told}{wrong}"


@dataclass(frozen=True)
class Result:
    """The verdict of `weft.verify`.

    Args:
        equal: every difference is below the tolerance and all copies agree bit for bit.
        differences: the largest of each kind, in the order loss, gradients, weights, evaluation; the last only if the
            model was evaluated.
        first_difference: where the sides part, if they do.
        disagreements: copies of one tensor that differ between ranks.
        rounding: the largest difference of each kind in the model's own precision; not judged.
        silenced: elements of gradients that are rounding only, and that the updates took as zero.
        processes: how the processes compare with the emulator, if the devices were processes.
        summary: numbers about the plan and its check, for printing.
        sizes: the same program at other sizes, if dims of the example are marked.
        rounded: the same in the precision that was asked for, judged.
    """

    equal: bool
    largest_difference: float
    differences: tuple[Difference, ...]
    tolerance: float
    devices: int
    first_difference: FirstDifference | None = None
    disagreements: tuple[str, ...] = ()
    rounding: tuple[Difference, ...] = ()
    silenced: int = 0
    processes: Processes | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[AtSizes, ...] = ()
    rounded: Rounded | None = None

    def __bool__(self) -> bool:
        return self.equal

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        first = self.first_difference
        return {
            "equal": self.equal,
            "largest_difference": plain(self.largest_difference),
            "tolerance": self.tolerance,
            "devices": self.devices,
            "differences": _by_kind(self.differences),
            "first_difference": None if first is None else _plain(first),
            "disagreements": list(self.disagreements),
            "rounding": {found.kind: plain(found.value) for found in self.rounding},
            "gradients_taken_as_zero": self.silenced,
            "processes": None if self.processes is None else _plain(self.processes),
            **({"sizes": [one.as_json() for one in self.sizes]} if self.sizes else {}),
            **({} if self.rounded is None else {"mixed": self.rounded.as_json()}),
            **self.summary,
        }

    def __str__(self) -> str:
        lines = ["equal to one device" if self.equal else "different from one device"]
        lines += [f"  {d.kind}: {show(d.value)} ({d.tensor})" for d in self.differences]
        lines += [f"  {one}" for one in self.sizes]
        lines += [] if self.rounded is None else [f"  {self.rounded}"]
        lines += [f"  copies differ: {text}" for text in shortened(self.disagreements)]
        if self.first_difference is not None:
            lines.append(f"  first: {describe(self.first_difference)}")
        lines += [f"  warning: {text}" for text in self.summary.get("warnings", ())]
        return "\n".join(lines)


def describe(first: FirstDifference) -> str:
    """One line: which operator, which tensor, which line of the user's code."""
    where = f"operator {first.op}" if first.op else "gradient of"
    source = f" at {first.source}" if first.source else ""
    note = f" ({first.note})" if first.note else ""
    remedy = f"; {first.remedy}" if first.remedy else ""
    return f"{where} {first.tensor}{source}: {show(first.difference)}{note}{remedy}"


def show(value: float, digits: int = 1) -> str:
    """A difference for people."""
    return "infinite" if value >= LARGEST else f"{value:.{digits}e}"


def plain(value: Any) -> Any:
    """A difference for JSON, which has no word for infinity: "infinite" then."""
    return "infinite" if isinstance(value, float) and not value < LARGEST else value


def _plain(found: Difference | FirstDifference | Processes) -> dict[str, Any]:
    return {name: plain(value) for name, value in vars(found).items()}


def _by_kind(differences: Sequence[Difference]) -> dict[str, Any]:
    return {found.kind: _plain(found) for found in differences}


def shortened(texts: Sequence[str]) -> list[str]:
    """The first few of many.

    >>> shortened(["a", "b", "c", "d", "e"])
    ['a', 'b', 'c', 'and 2 more']
    """
    left = len(texts) - FEW
    return [*texts[:FEW], f"and {left} more"] if left > 0 else list(texts)


def difference(a: Tensor, b: Tensor, scale: float = 0.0) -> float:
    """max|a - b| / max(max|b|, scale); `b` is the reference.

    >>> difference(torch.tensor([1.0, 2.2]), torch.tensor([1.0, 2.0]))
    0.10000002384185791
    """
    if a.shape != b.shape:
        return LARGEST
    if b.numel() == 0:
        return 0.0
    a, b = wide(a), wide(b)
    apart = torch.where(a == b, torch.zeros_like(b.abs()), (a - b).abs())
    if not bool(torch.isfinite(apart).all()):
        return LARGEST
    largest = float(apart.max())
    if largest == 0.0:
        return 0.0
    below = max(_largest(b.abs()), scale)
    return min(largest / below, LARGEST) if below > 0.0 else LARGEST


def _largest(sizes: Tensor) -> float:
    """The largest that is finite."""
    finite = sizes[torch.isfinite(sizes)]
    return float(finite.max()) if finite.numel() else 0.0


def wide(value: Tensor) -> Tensor:
    """In float64, or complex128."""
    value = value.detach()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def scale_of(tensors: Tensors) -> float:
    """RMS over all finite elements of all float tensors."""
    total, count = 0.0, 0
    for tensor in tensors.values():
        if tensor.is_floating_point() or tensor.is_complex():
            finite = wide(tensor).abs()
            finite = finite[torch.isfinite(finite)]
            total += float(finite.square().sum())
            count += finite.numel()
    return math.sqrt(total / count) if count else 0.0


def apart_in(name: str, ours: Tensors, reference: Tensors, scale: float) -> float:
    """The difference of the tensors of that name; one that only one side has is compared with zeros."""
    if name not in ours and name not in reference:
        return 0.0
    b = reference[name] if name in reference else torch.zeros_like(ours[name])
    a = ours[name] if name in ours else torch.zeros_like(b)
    # An integer buffer is right or wrong: the scale of the float tensors means nothing to it.
    return difference(a, b, scale if b.is_floating_point() or b.is_complex() else 0.0)


def compare_kind(kind: str, ours: Tensors, reference: Tensors) -> Difference:
    """The largest difference over all tensors of one kind."""
    scale = scale_of(reference)
    names = dict.fromkeys((*reference, *ours))
    found = [Difference(kind, apart_in(name, ours, reference, scale), name) for name in names]
    return max(found, key=lambda one: one.value, default=Difference(kind, 0.0, ""))


def compare(ours: Sample, reference: Sample) -> tuple[Difference, ...]:
    """The largest difference of each kind, over all steps; of an evaluation only if there was one."""

    def losses(sample: Sample) -> dict[str, Tensor]:
        return {f"loss of step {i}": loss for i, loss in enumerate(sample.losses, 1)}

    *_, mine = ours.by_kind()
    *_, theirs = reference.by_kind()
    evaluation = [compare_kind("evaluation", mine, theirs)] if mine or theirs else []
    gradients = [compare_kind("gradients", a, b) for a, b in zip(ours.gradients, reference.gradients, strict=True)]
    return (
        compare_kind("loss", losses(ours), losses(reference)),
        max(gradients, key=lambda found: found.value),
        compare_kind("weights", ours.weights, reference.weights),
        *evaluation,
    )


def noise_in(gradients: Tensors) -> dict[str, Noise]:
    """What is rounding only in the reference's gradients of one step; tensors without any are left out."""
    scale, found = scale_of(gradients), {}
    for name, gradient in gradients.items():
        size = gradient.abs()
        below = ROUNDING * max(_largest(size), scale)
        where = size < below
        if bool(where.any()):
            found[name] = Noise(where, below)
    return found


def count_silenced(ours: Sample, reference: Sample) -> int:
    """How many elements, of all gradients, were not zero in some step on some side and yet taken as zero."""
    total: dict[str, Tensor] = {}
    for mine, theirs in zip(ours.gradients, reference.gradients, strict=True):
        for name, noise in noise_in(theirs).items():
            for gradient in (side[name] for side in (mine, theirs) if name in side):
                if gradient.shape == noise.where.shape:
                    changed = noise.silence(gradient) != gradient
                    total[name] = total[name] | changed if name in total else changed
    return sum(int(changed.sum()) for changed in total.values())
