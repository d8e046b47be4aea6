"""Families: operators that reach alike much of what a device can do, and how much that is.

In: the name of an operator. Out: its family, and the Efficiency of a family on accelerators or on processors. One table
of constants, each with where it is from; none is of a model, and none was fitted to the time of a training step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Efficiency:
    """How much of a device a family of operators reaches.

    Args:
        compute: of the rate of products, at most. bandwidth: of that of the memory, at most.
        ramp: seconds in which a kernel that computes fills the device and drains it: a saturating curve in its size,
            since what takes as long as this reaches half.
        half: sizes of the smallest dim of a product at which half of `compute` is reached.
        tile: rows and columns of a product are rounded up to whole tiles of that size.
    """

    compute: float = 1.0
    bandwidth: float = 0.85
    ramp: float = 0.0
    half: float = 0.0
    tile: int = 1


WORDS = (
    ("attention", ("scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")),
    ("convolution", ("convolution", "conv1d", "conv2d", "conv3d")),
    ("optimizer", ("_fused_adam", "_fused_sgd", "_fused_adagrad", "_foreach_", "_amp_")),
    ("reduction", ("vector_norm", "matrix_norm")),
    ("normalisation", ("_norm",)),
    ("product", ("addmm", "baddbmm", "bmm", "mm", "addmv", "mv", "dot", "linear", "lstm", "gru", "rnn")),
    ("index", ("embedding", "index", "gather", "scatter", "nll_loss", "take", "masked_select", "nonzero")),
    ("copy", ("copy", "clone", "cat", "stack", "contiguous", "fill", "zero", "ones", "full", "arange", "pad", "slice")),
    (
        "reduction",
        (
            *("softmax", "sum", "mean", "amax", "amin", "argmax", "var", "std", "prod", "cumsum", "sort", "topk"),
            *("logsumexp", "loss", "pool", "max", "min", "any", "all"),
        ),
    ),
)
"""Families by parts of names of their operators; the first that fits. All else works element by element."""

ACCELERATOR = {
    # 78% to 86% of the peak at the best shape (A100 86, H100 80, B200 78; MI300X 60): ml-engineering's table of maximum
    # achievable matmul FLOPS, compute/accelerator/README.md; shapes of models are rarely the best one, hence 0.78.
    # Tiles of 128 rows and columns, and k in steps that only pay from some hundreds on: NVIDIA's guide to matrix
    # multiplication (tile quantisation, figures over K). 4 us: one wave of such tiles on an A100.
    "product": Efficiency(0.78, ramp=4e-6, half=24, tile=64),
    # implicit products whose operands are gathered, few channels in the first of them: estimate
    "convolution": Efficiency(0.55, ramp=4e-6),
    # FlashAttention-2's paper (arXiv 2307.08691): 50% to 73% of an A100's peak forward, up to 63% backward; the same
    # kernels on an H100 reach 30% (pytorch/benchmark pull request 2296: 290 TFLOPS)
    "attention": Efficiency(0.5, ramp=4e-6),
    "attention backward": Efficiency(0.42, ramp=4e-6),
    # copies and triads reach 90% of the memory's rate (H100: 3.02 to 3.09 of 3.35 TB/s), kernels with more streams less
    "elementwise": Efficiency(bandwidth=0.85),
    "copy": Efficiency(bandwidth=0.85),
    "optimizer": Efficiency(bandwidth=0.85),
    # estimates: a row is read, reduced, and read again out of caches; backward of norms reduces along the other dim too
    "normalisation": Efficiency(bandwidth=0.7),
    "normalisation backward": Efficiency(bandwidth=0.5),
    "reduction": Efficiency(bandwidth=0.7),
    # estimates: rows of a table, long enough for whole lines of memory, but in no order; gradients are sorted first, or
    # added atomically
    "index": Efficiency(bandwidth=0.5),
    "index backward": Efficiency(bandwidth=0.3),
}
"""Families on devices that the host issues kernels to."""

PROCESSOR = {
    # MKL and oneDNN reach 80% to 90% of what the vector units can do where operands are long
    "product": Efficiency(0.8, ramp=2e-6, half=8),
    "convolution": Efficiency(0.6, ramp=5e-6),
    # torch's flash attention on processors: products of blocks of 32 to 512 rows, exponentials between them
    "attention": Efficiency(0.4, ramp=5e-6),
    "attention backward": Efficiency(0.4, ramp=5e-6),
    # one core alone does not fill the memory's pipes: what it writes it also reads, if not by stores that pass caches
    "elementwise": Efficiency(bandwidth=0.6),
    "copy": Efficiency(bandwidth=0.6),
    "optimizer": Efficiency(bandwidth=0.6),
    "normalisation": Efficiency(bandwidth=0.4),
    "normalisation backward": Efficiency(bandwidth=0.3),
    # exponentials and logarithms, not the memory, limit a softmax
    "reduction": Efficiency(bandwidth=0.3),
    "index": Efficiency(bandwidth=0.3),
    "index backward": Efficiency(bandwidth=0.15),
}
"""Families on processors: estimates throughout. Here it costs little to measure."""

FIXED = 2e-6
"""Seconds in which an accelerator begins and ends a kernel, whatever it does: estimate. Between kernels of a full queue
lie 0.5 us (NVIDIA's blog on CUDA graphs, a V100: kernels of 2.9 us, one every 3.4 us); the rest are its first and last
blocks."""


@cache
def family_of(op: str) -> str:
    """The family of an operator.

    >>> family_of("addmm"), family_of("native_layer_norm_backward"), family_of("gelu"), family_of("_fused_adamw_")
    ('product', 'normalisation backward', 'elementwise', 'optimizer')
    """
    found = next((name for name, words in WORDS if any(word in op for word in words)), "elementwise")
    return f"{found} backward" if "backward" in op and f"{found} backward" in PROCESSOR else found


def efficiency_of(op: str, kind: str) -> Efficiency:
    """How much of a device of this kind an operator reaches."""
    return (PROCESSOR if kind == "cpu" else ACCELERATOR)[family_of(op)]
