"""Public numbers of large runs: what a source says of a run, and what Weft is asked about it.

In: nothing. Out: ROWS, those that today's plans say; NOT_YET, those that they do not, each with what is missing. No
constant of the simulator was fitted to any of them: `weft/cost/compute/families.py` and `weft/cost/cluster/known.yaml`
were committed before the first of them was simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MEGATRON = "arXiv 2104.04473 (Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM)"
SELECTIVE = "arXiv 2205.05198 (Reducing Activation Recomputation in Large Transformer Models)"
TITAN_H100 = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "pytorch/torchtitan, docs/performance.md of 2024 (commit 0413364)"
FUSED = "Megatron's fused kernels (bias and gelu; scale, mask and softmax)"
DROPOUT = "dropout is left out: see `dropout` of the result"


@dataclass(frozen=True)
class Row:
    """One run.

    Args:
        file: of bench/large. batch: of a step, if not the file's own. plan, cluster: as of `weft simulate`.
        says: the source's number in its own words. seconds: of a step by it.
        unsaid: settings of the source that today's plans do not say, and what differs otherwise.
        explained: what the rest of the gap is due to, with a number.
    """

    name: str
    source: str
    says: str
    seconds: float
    file: str
    plan: str
    cluster: str
    batch: int = 0
    unsaid: tuple[str, ...] = ()
    explained: str = ""


@dataclass(frozen=True)
class NotYet:
    """A run that today's plans do not say."""

    name: str
    source: str
    says: str
    missing: str = field(default="")


def by_tokens(tokens_per_device: float, devices: int, tokens: int) -> float:
    """Seconds of a step from tokens per second and device."""
    return tokens / (tokens_per_device * devices)


def by_flops(tflops: float, devices: int, *, batch: int, layers: int, width: int) -> float:
    """Seconds of a step from TFLOP/s of a device, as arXiv 2104.04473 counts operations (equation 3: with all
    activations made again), for 2,048 tokens a row and 51,200 words.

    >>> round(by_flops(163, 3072, batch=3072, layers=128, width=25600), 1)
    103.4
    """
    tokens = batch * 2048
    flops = 96 * tokens * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
    return flops / (tflops * 1e12 * devices)


EVERY_OTHER = "every second product again: what norms make is kept here, not there; memory differs"
SLOWER = (
    "not shown, only what is left: products and attention would have to run at two thirds of the supposed rate "
    "(1.36 s of 2.16 s are predicted for them, 0.68 s are missing); the same program on A100s is within 3%"
)
CLOCK = "the rate of products under a limit of 500 W (unknown to the source as well)"

ROWS = (
    Row(
        "22B, 8 A100, full recomputation",
        f"{SELECTIVE}, Table 5 (sizes: Table 3)",
        "1.42 s an iteration",
        1.42,
        "gpt_22b.py",
        "megatron=8,recompute",
        "1x8-A100-80GB",
        unsaid=(FUSED, DROPOUT),
    ),
    Row(
        "22B, 8 A100, sequence parallel, selective",
        f"{SELECTIVE}, Table 5 (sizes: Table 3)",
        "1.10 s an iteration",
        1.10,
        "gpt_22b.py",
        "megatron=8,sp,recompute=layers.*.attention.scores",
        "1x8-A100-80GB",
        unsaid=(FUSED, DROPOUT),
    ),
    Row(
        "GPT-3 175B, 1,024 A100",
        "NVIDIA/Megatron-LM, README.md of 2021 to 2024 (GPT-3 Example), examples/pretrain_gpt3_175B.sh",
        "around 32 s an iteration, 138 TFLOP/s of a device",
        32.0,
        "gpt_175b.py",
        "dp=8,megatron=8,pp=16,microbatches=192,recompute",
        "128x8-A100-80GB",
        unsaid=(FUSED, DROPOUT, "a first and a last stage of the same layers as the others: Weft balances work"),
    ),
    Row(
        "1T, 512 A100, full recomputation",
        f"{SELECTIVE}, Table 5 (sizes: Table 3)",
        "94.42 s an iteration",
        94.42,
        "gpt_1t.py",
        "megatron=8,pp=64,microbatches=512,recompute",
        "64x8-A100-80GB",
        unsaid=(FUSED, DROPOUT),
    ),
    Row(
        "1T, 512 A100, sequence parallel, selective",
        f"{SELECTIVE}, Table 5 (sizes: Table 3)",
        "71.49 s an iteration",
        71.49,
        "gpt_1t.py",
        "megatron=8,sp,pp=64,microbatches=512,recompute=layers.*.attention.scores",
        "64x8-A100-80GB",
        unsaid=(FUSED, DROPOUT),
    ),
    Row(
        "1T, 3,072 A100",
        f"{MEGATRON}, Table 1",
        "163 TFLOP/s of a device",
        by_flops(163, 3072, batch=3072, layers=128, width=25600),
        "gpt_1t.py",
        "dp=6,megatron=8,pp=64,microbatches=512,recompute",
        "384x8-A100-80GB",
        batch=3072,
        unsaid=(FUSED, DROPOUT, "the degree of interleaving (the source does not name it): 1F1B here"),
    ),
    Row(
        "Llama 3.1 8B, 8 H100",
        f"{TITAN_H100}, Table 1, FSDP",
        "5,762 tokens/s of a device, 82.4 GiB",
        by_tokens(5762, 8, 16 * 8192),
        "llama3_8b.py",
        "bench/large/plans.py:selective_op",
        "bench/large/grand_teton_8.yaml",
        unsaid=(EVERY_OTHER, CLOCK),
        explained=SLOWER,
    ),
    Row(
        "Llama 3.1 8B, 128 H100",
        f"{TITAN_H100}, Table 3, FSDP",
        "5,605 tokens/s of a device, 67.0 GiB",
        by_tokens(5605, 128, 256 * 8192),
        "llama3_8b.py",
        "bench/large/plans.py:selective_op",
        "bench/large/grand_teton_128.yaml",
        batch=256,
        unsaid=(EVERY_OTHER, CLOCK),
        explained=SLOWER,
    ),
    Row(
        "Llama 3 8B, 64 A100",
        f"{TITAN_A100}, Llama 3, selective layer",
        "2,904 tokens/s of a device",
        by_tokens(2904, 64, 64 * 8192),
        "llama3_8b.py",
        "bench/large/plans.py:selective_layer",
        "8x8-A100-80GB",
        batch=64,
    ),
    Row(
        "Llama 3 70B, 64 A100, full recomputation",
        f"{TITAN_A100}, Llama 3, full",
        "331 tokens/s of a device",
        by_tokens(331, 64, 64 * 8192),
        "llama3_70b.py",
        "dp=64,zero=3,recompute",
        "8x8-A100-80GB",
        batch=64,
    ),
)

COMPILE = "torch.compile: kernels that are fused"
NOT_YET = (
    NotYet("Llama 3.1 8B, 8 and 128 H100, compiled", f"{TITAN_H100}, Tables 1 and 3", "6,667; 6,514 tokens/s", COMPILE),
    NotYet("the same, float8", f"{TITAN_H100}, Tables 1 and 3", "8,532; 8,380 tokens/s", f"float8; {COMPILE}"),
    NotYet("Llama 3.1 8B, sequences to 262,144", f"{TITAN_H100}, Table 2", "3,890 to 548 tokens/s", "context; float8"),
    NotYet("Llama 3.1 70B, 256 H100", f"{TITAN_H100}, Table 4", "829 tokens/s; 876", "float8; asynchronous TP"),
    NotYet(
        "Llama 3.1 405B, 512 H100", f"{TITAN_H100}, Tables 5 and 6", "100; 128; 16 to 76 tokens/s", "float8; context"
    ),
    NotYet(
        "175B and 530B, interleaved three times",
        f"{SELECTIVE}, Table 5",
        "18.13 and 13.75 s; 49.05 and 37.83 s",
        "not tried yet: interleaving beside `recompute` and `sp`",
    ),
)
