"""Roofline: how long a kernel takes by what its device can do.

In: a Device, a Kernel. Out: seconds: the longer of the time to compute and the time to move its bytes, each at the part
of the device's rate that operators of its family reach (`families.py`), and what a kernel takes at least. It is
deterministic, and needs no device. Waves (the last tiles of a product, which keep only some of the device busy) are not
known of.

A dtype whose rate the device does not state is computed in the next that can hold it: bfloat16 and float16 in each
other, or in float32; float8 in these; float64 at half of float32. float32 is float32 and not TF32, unless that is asked
for, as torch does; convolutions are an exception, as torch makes one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from weft.cost.compute.device import Device
from weft.cost.compute.families import FIXED, Efficiency, efficiency_of, family_of
from weft.cost.compute.kernel import Kernel, read, sizes_of

INSTEAD = {
    "bfloat16": (("float16", 1.0), ("float32", 1.0)),
    "float16": (("bfloat16", 1.0), ("float32", 1.0)),
    "float8_e4m3fn": (("float8", 1.0), ("float8_e5m2", 1.0), ("bfloat16", 1.0), ("float16", 1.0), ("float32", 1.0)),
    "float8_e5m2": (("float8", 1.0), ("float8_e4m3fn", 1.0), ("bfloat16", 1.0), ("float16", 1.0), ("float32", 1.0)),
    "float64": (("float32", 0.5),),
    "tf32": (("float32", 1.0),),
    # a multiplication of complex numbers is counted as one, and is four
    "complex64": (("float32", 0.25),),
    "complex128": (("float64", 0.25), ("float32", 0.125)),
}
"""Dtypes whose rate stands for another's, with the part of it."""


@dataclass(frozen=True)
class Roofline:
    """Times by what a device can do.

    Args:
        tf32: products of float32 are computed in TF32, where the device has it (`torch.backends.cuda.matmul`).
    """

    device: Device
    tf32: bool = False

    def seconds(self, kernel: Kernel) -> float:
        """Of one call."""
        efficiency = efficiency_of(kernel.op, self.device.kind)
        moving = kernel.bytes / (self.device.bandwidth * efficiency.bandwidth)
        fixed = self.device.launch if self.device.kind == "cpu" else FIXED
        return max(self._computing(kernel, efficiency), moving) + fixed

    def rate(self, dtype: str, family: str = "product") -> float:
        """Operations a second at most, of a dtype or what stands for it."""
        flops = self.device.flops
        if dtype == "float32" and (self.tf32 or family == "convolution"):
            dtype = "tf32"
        for name, part in ((dtype, 1.0), *INSTEAD.get(dtype, ()), ("float32", 1.0)):
            if name in flops:
                return flops[name] * part
        # a device that only states rates of short dtypes
        return min(flops.values())

    def _computing(self, kernel: Kernel, efficiency: Efficiency) -> float:
        if not kernel.flops:
            return 0.0
        family = family_of(kernel.op)
        reached, flops = efficiency.compute, float(kernel.flops)
        if family == "product":
            reached *= _filled(kernel, efficiency)
        if "attention" in family and read(kernel.key).named.get("is_causal") is True:
            # the half above the diagonal is left out, though it is counted
            flops /= 2
        return flops / (self.rate(kernel.dtype, family) * reached) + efficiency.ramp


def _filled(kernel: Kernel, efficiency: Efficiency) -> float:
    """The part of its best that a product of these sizes reaches."""
    found = product_sizes(kernel)
    if found is None:
        return 1.0
    *sides, length = found
    tiles = [efficiency.tile * math.ceil(size / efficiency.tile) for size in sides]
    smallest = min(*tiles, length)
    return math.prod(sides) / math.prod(tiles) * smallest / (smallest + efficiency.half)


def product_sizes(kernel: Kernel) -> tuple[int, int, int] | None:
    """Rows, columns and the length of the sums of a product of matrices; None if it is another."""
    matrices = [one for one in _matrices(kernel) if len(one) >= 2]
    if len(matrices) < 2:
        return None
    (*_, rows, length), (*_, again, columns) = matrices[-2:]
    if length != again or not rows * columns * length:
        return None
    return rows, columns, length


def _matrices(kernel: Kernel) -> Iterator[tuple[int, ...]]:
    for name, argument in read(kernel.key).named.items():
        sizes = sizes_of(argument)
        if sizes is not None and name != "bias":
            yield sizes
