"""The roofline: what it grows with, which rates it takes, and that every operator has a family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cost.recorded import record
from weft.cost.compute.device import Device
from weft.cost.compute.families import ACCELERATOR, FIXED, PROCESSOR, family_of
from weft.cost.compute.kernel import Kernel
from weft.cost.compute.roofline import Roofline, product_sizes

RATES = {"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12}
FAST = Device("some accelerator", "cuda", 80 << 30, RATES, 2e12, 5e-6)
SLOW = Device("some processor", "cpu", 1 << 34, {"float32": 1e11}, 2e10, 2e-6)


def product(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> Kernel:
    a, b = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(k, n, dtype=dtype, device="meta")
    (found,) = record(lambda: a @ b)
    return found


def attention(causal: bool) -> list[Kernel]:
    q = torch.zeros(1, 2, 64, 16, requires_grad=True)

    def run() -> None:
        F.scaled_dot_product_attention(q, q, q, is_causal=causal).backward(torch.ones(1, 2, 64, 16))

    return [one for one in record(run) if one.flops]


@pytest.mark.parametrize("device", [FAST, SLOW])
def test_never_faster_than_the_device(device: Device) -> None:
    times = Roofline(device)
    for size in (1, 7, 64, 100, 1000, 4096):
        kernel = product(size, size, size)
        assert times.seconds(kernel) > kernel.flops / device.flops["float32"]
        assert times.seconds(kernel) > kernel.bytes / device.bandwidth


@pytest.mark.parametrize("device", [FAST, SLOW])
def test_more_takes_longer(device: Device) -> None:
    times = [Roofline(device).seconds(product(1 << step, 512, 512)) for step in range(4, 14)]
    assert times == sorted(times)
    # small products reach less
    small, large = product(16, 16, 16), product(4096, 4096, 4096)
    rates = [one.flops / Roofline(device).seconds(one) for one in (small, large)]
    assert rates[0] < rates[1] / 2
    assert device.flops["float32"] * 0.7 < rates[1] < device.flops["float32"]


def test_tiles_and_thin_products() -> None:
    times = Roofline(FAST)
    assert times.seconds(product(4096, 4096 + 8, 4096)) > 1.01 * times.seconds(product(4096, 4096, 4096))
    whole, thin = product(4096, 4096, 4096), product(4096, 4096 * 256, 16)
    assert whole.flops == thin.flops and times.seconds(thin) > times.seconds(whole)


def test_rates_of_dtypes() -> None:
    times, precise = Roofline(FAST), Roofline(FAST, tf32=True)
    assert times.rate("float32") == RATES["float32"] and precise.rate("float32") == RATES["tf32"]
    assert times.rate("float32", "convolution") == RATES["tf32"]
    assert times.rate("float16") == times.rate("bfloat16") == RATES["bfloat16"]
    assert times.rate("float8_e4m3fn") == RATES["bfloat16"]
    assert times.rate("float64") == RATES["float32"] / 2
    assert times.rate("int64") == RATES["float32"]
    assert Roofline(SLOW).rate("bfloat16") == Roofline(SLOW, tf32=True).rate("float32") == 1e11
    assert Roofline(replace(FAST, flops={"float16": 1e14})).rate("float32") == 1e14
    kernel = product(4096, 4096, 4096)
    assert times.seconds(product(4096, 4096, 4096, torch.bfloat16)) < precise.seconds(kernel) < times.seconds(kernel)


def test_what_takes_nothing_takes_the_least_there_is() -> None:
    (kernel,) = record(lambda: torch.zeros(()))
    assert Roofline(FAST).seconds(kernel) == pytest.approx(FIXED, rel=0.01)
    assert Roofline(SLOW).seconds(kernel) == pytest.approx(SLOW.launch, rel=0.01)


def test_causal_attention_computes_half() -> None:
    for causal, whole in zip(attention(True), attention(False), strict=True):
        large = [replace(one, flops=one.flops * 10**9) for one in (causal, whole)]
        assert Roofline(FAST).seconds(large[0]) == pytest.approx(Roofline(FAST).seconds(large[1]) / 2, rel=0.01)


def test_sizes_of_products() -> None:
    def of(run) -> tuple[int, int, int] | None:
        return product_sizes(next(one for one in record(run) if family_of(one.op) == "product"))

    def made(*sizes: int) -> Tensor:
        return torch.empty(sizes)

    assert of(lambda: made(3, 4) @ made(4, 5)) == (3, 5, 4)
    assert of(lambda: F.linear(made(3, 4), made(5, 4), made(5))) == (3, 5, 4)
    assert of(lambda: torch.addmm(made(3, 5), made(3, 4), made(4, 5))) == (3, 5, 4)
    assert of(lambda: made(2, 3, 4) @ made(2, 4, 5)) == (3, 5, 4)
    assert of(lambda: made(3, 4) @ made(4)) is None


def test_families() -> None:
    assert set(ACCELERATOR) == set(PROCESSOR)
    wanted = {
        "product": ("mm", "addmm", "bmm", "baddbmm", "linear", "mv"),
        "convolution": ("convolution", "convolution_backward"),
        "attention": ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention"),
        "attention backward": ("_scaled_dot_product_efficient_attention_backward",),
        "normalisation": ("native_layer_norm", "native_batch_norm", "_fused_rms_norm", "native_group_norm"),
        "normalisation backward": ("native_layer_norm_backward", "_fused_rms_norm_backward"),
        "reduction": ("_softmax", "_log_softmax_backward_data", "sum", "mean", "linalg_vector_norm"),
        "elementwise": ("add", "add_", "mul", "gelu", "gelu_backward", "exp", "pow", "where", "threshold_backward"),
        "copy": ("copy_", "_to_copy", "clone", "cat", "fill_", "zeros", "ones_like"),
        "index": ("embedding", "index", "gather", "scatter_add", "nll_loss_forward", "index_put_"),
        "index backward": ("embedding_dense_backward", "nll_loss_backward"),
        "optimizer": ("_fused_adamw_", "_foreach_add_", "_foreach_norm", "_amp_foreach_non_finite_check_and_unscale_"),
    }
    found = {name: {op: family_of(op) for op in ops} for name, ops in wanted.items()}
    assert found == {name: dict.fromkeys(ops, name) for name, ops in wanted.items()}
