"""Fourier transforms: all dims but the transformed ones may be cut.

In: an op and its shapes. Out: its rule, names after the input's dims. A transform is linear in the signal; its length
and norm are those of dims that stay whole, so the local call is the op's own.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.ir.graph import Op, Tensor
from weft.ops.arguments import arguments, integers, positive
from weft.ops.build import build, fixed, named
from weft.ops.rule import Rule, RuleOf
from weft.ops.windows import local_window


def fourier_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """fft and its kin in one, two or n dims, and the shifts that go with them."""
    values = arguments(op)
    shape, result = reads[0].sizes, makes[0].sizes
    listed = integers(values["dim"])
    if not listed:
        # as many of the last dims as lengths are given, else all
        count = len(integers(values.get("s"))) or len(shape)
        listed = tuple(range(len(shape) - count, len(shape)))
    moved = {positive(i, len(shape)) for i in listed}
    sides = [
        tuple(fixed(size) if i in moved else named(f"d{i}", size) for i, size in enumerate(sizes))
        for sizes in (shape, result)
    ]
    return build(sides[:1], sides[1:], reads, makes, linear=[[0]], local=local_window)


def frames_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """stft and istft: signals of a batch by themselves; a window stays whole."""
    signal = makes[0] if op.kind == "istft" else reads[0]
    lead = (named("b", signal.sizes[0]),) if len(signal.sizes) == 2 else ()
    sides = [(*lead, *map(fixed, tensor.sizes[len(lead) :])) for tensor in (reads[0], makes[0])]
    windows = [tuple(map(fixed, tensor.sizes)) for tensor in reads[1:]]
    return build([sides[0], *windows], sides[1:], reads, makes, linear=[[0]], local=local_window)


_TRANSFORMS = """
fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2
fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift
"""

SPECTRAL: Mapping[str, RuleOf] = {
    **{f"aten.{name}": fourier_rule for name in _TRANSFORMS.split()},
    **dict.fromkeys(("aten.stft", "aten.istft"), frames_rule),
}
"""Computed rules, by family."""
