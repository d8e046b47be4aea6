"""What the generated program costs: one device against the eager module, `dp=2` against torch's DDP.

    python bench/overhead.py [--repeats 9] [--out bench/results/overhead.json]

A GPT of 6 layers trains with fused AdamW, one thread per process; on one device some other models do too. Both sides
take a step in turn, in the same run, on the same batch; medians and their ratio are told, below 1 where Weft is faster;
the ratio of processor time is less disturbed by whatever else the machine does. Against DDP the batch is varied: the
fewer rows, the more of a step is communication; each side has processes of its own, as it comes (`bench/turns.py`).
DDP runs as its constructor leaves it, and with gradients that lie in its buckets, which saves it a copy; beside them
runs the eager module on its share of the batch, which sends nothing: what no way to train it can go below by sending
better. Where tensors come to lie differs from process to process, and with it the time of a step, by some percent: so
several processes measure, one after the other, and medians of theirs are told. Nothing is judged here.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from bench.gpt import GPT, SIZES, example, model
from bench.machine import machine
from bench.turns import Side, Step, Taken, in_turn, over_rounds, take_turns, torch_group
from weft.compile import compile_program
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.single_rank import SingleRank
from weft.runtime.training.step import call
from weft.train.opened import open_rank

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "overhead.json"
BATCHES = (2, 4, 8)
WARM_UP = 3
PROCESSES = 3
ENOUGH = 6.0
"""Seconds of steps of both sides in a process, at least."""


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 64)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


Subject = tuple[Callable[[], nn.Module], Any]
"""A function that makes a module, and its batch."""


def subjects() -> dict[str, Subject]:
    """What runs on one device; those of transformers without dropout, which draws other numbers in eager mode."""
    small = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 4096}
    llama = LlamaConfig(**small, num_key_value_heads=2, intermediate_size=704, use_cache=False)
    bert = BertConfig(**small, intermediate_size=1024, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    gpt2 = GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=4096, **quiet)
    vit = ViTConfig(num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024, image_size=64)
    torch.manual_seed(1)
    tokens = {"input_ids": (ids := torch.randint(4096, (4, SIZES.length))), "labels": ids.clone()}
    images = {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(2, (16,))}
    numbers = (torch.randn(64, 512), torch.randn(64, 64))
    return {
        "gpt": (model, example()),
        "mlp": (seeded(Perceptron), numbers),
        "llama": (seeded(lambda: LlamaForCausalLM(llama)), tokens),
        "gpt2": (seeded(lambda: GPT2LMHeadModel(gpt2)), tokens),
        "bert": (seeded(lambda: BertForMaskedLM(bert)), tokens),
        "vit": (seeded(lambda: ViTForImageClassification(vit)), images),
    }


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make().train()

    return made


def stepper(module: nn.Module, batch: Any) -> Step:
    """A function that takes one optimizer step and returns the loss."""
    # fused: the plain one takes as long as the backward here, on both sides, and hides what is compared
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(call(module, batch))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def loss_of(output: Any) -> Tensor:
    """The loss itself, or that of a Hugging Face output."""
    found: Tensor = output if isinstance(output, Tensor) else output.loss
    return found


def alternate(ours: Step, theirs: Step, repeats: int, meet: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Seconds of both sides, step by step in turn; losses must stay together."""
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    cpu: dict[str, list[float]] = {"ours": [], "theirs": []}
    losses: dict[str, list[float]] = {"ours": [], "theirs": []}
    for repeat in range(WARM_UP + repeats):
        sides = [("ours", ours), ("theirs", theirs)]
        for name, step in sides if repeat % 2 else reversed(sides):
            meet()
            start, busy = time.perf_counter(), time.process_time()
            losses[name].append(step())
            times[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - busy)
    assert max(abs(a - b) for a, b in zip(losses["ours"], losses["theirs"], strict=True)) < 0.05, losses
    wall, busy_time = ({name: found[WARM_UP:] for name, found in one.items()} for one in (times, cpu))
    return {
        "ours": statistics.median(wall["ours"]),
        "theirs": statistics.median(wall["theirs"]),
        "ratio": statistics.median(wall["ours"]) / statistics.median(wall["theirs"]),
        "ratio_of_minima": min(wall["ours"]) / min(wall["theirs"]),
        "ratio_of_cpu_time": statistics.median(busy_time["ours"]) / statistics.median(busy_time["theirs"]),
    }


def one_device(name: str, repeats: int) -> dict[str, Any]:
    """One process's measurement of a model."""
    torch.set_num_threads(1)
    make, batch = subjects()[name]
    files = compile_program(make(), batch, "dp=1").files
    ours, theirs = stepper(open_rank(files, SingleRank(), make()), batch), stepper(make(), batch)
    for step in (ours, theirs):
        step()
    start = time.perf_counter()
    ours(), theirs()
    # short steps take more of them for a median that stays
    many = math.ceil(ENOUGH / (time.perf_counter() - start))
    return alternate(ours, theirs, max(repeats, many))


def in_processes(name: str, repeats: int) -> dict[str, Any]:
    """Medians over processes, one after the other."""
    found: list[dict[str, Any]] = []
    for _ in range(PROCESSES):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(one_device, name, repeats).result())
    medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
    return {**medians, "ratios": [one["ratio"] for one in found]}


def on_two(transport: ProcessTransport, payload: dict[str, Any]) -> Taken:
    """One process of two of a side."""
    with torch_group(transport, payload["meeting"]):
        batch = example(payload["batch"])
        if payload["files"] is not None:
            step = stepper(open_rank(payload["files"], transport, model()), batch)
        else:
            share = tuple(tensor.chunk(transport.num_ranks)[transport.rank] for tensor in batch)
            step = averaged(stepper(PEERS[payload["peer"]](model()), share), transport.num_ranks)
        return take_turns(transport.rank, payload, step)


PEERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "theirs": DistributedDataParallel,
    "bucket_views": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "nothing_sent": lambda module: module,
}


def averaged(step: Step, num_ranks: int) -> Step:
    """The loss of the whole batch from that of the shares; not part of what DDP does, and next to nothing."""

    def whole() -> float:
        loss = torch.tensor(step())
        dist.all_reduce(loss)
        return loss.item() / num_ranks

    return whole


def two_processes(batch: int, repeats: int) -> dict[str, Any]:
    files = compile_program(model(), example(batch), "dp=2").files

    def side(files: Any, peer: str = "") -> Side:
        pool = Pool(2, preload=("bench.overhead",), gives_back=files is not None)
        payload = {"files": files, "peer": peer, "batch": batch}
        return Side(pool, "bench.overhead:on_two", payload, same=peer != "nothing_sent")

    def one_round() -> dict[str, float]:
        return in_turn(side(files), repeats=repeats, **{peer: side(None, peer) for peer in PEERS})

    return over_rounds([one_round() for _ in range(PROCESSES)])


def tell(name: str, found: dict[str, Any]) -> None:
    ours, theirs, ratio, busy = (found[key] for key in ("ours", "theirs", "ratio", "ratio_of_cpu_time"))
    text = f"{name}: ours {ours * 1e3:.0f} ms, theirs {theirs * 1e3:.0f} ms, ratio {ratio:.3f}"
    print(f"{text} (of processor time: {busy:.3f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "machine": machine(),
        "model": asdict(SIZES),
        "parameters": sum(p.numel() for p in GPT().parameters()),
    }
    found["one_device"] = {}
    for name in subjects():
        found["one_device"][name] = in_processes(name, options.repeats)
        tell(f"one device, {name}", found["one_device"][name])
    found["dp2"] = {}
    for batch in BATCHES:
        result = found["dp2"][f"batch {batch}"] = two_processes(batch, options.repeats)
        tell(f"dp=2 against DDP, batch {batch}", result)
        views, nothing = result["ratio_to_bucket_views"], result["ratio_to_nothing_sent"]
        print(f"  to DDP with gradients in its buckets {views:.3f}, to eager shares that send nothing {nothing:.3f}")
        memory = [result[f"peak_memory_of_{side}"] / 2**20 for side in ("ours", "theirs", "bucket_views")]
        print("  peak memory: ours {:.0f} MiB, DDP {:.0f} and {:.0f} MiB".format(*memory), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
