"""What compiling costs: seconds of each pass, peak memory and lines of text, against layers and devices.

    python bench/compile.py [--layers 4 8 16 32] [--out bench/results/compile.json]

The model is Llama in the configuration of Llama-3-8B, on the meta device, with a batch of 128 sequences of 4096 tokens,
under `tp=8` and `dp=128,tp=8`: 8 and 1024 devices. Every measurement has a process of its own, so that peak memory is
its own and nothing is warm. Nothing is judged here.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from bench.machine import machine
from weft.compile import compile_program

ROOT = Path(__file__).parents[1]
BATCH, LENGTH = 128, 4096
"""Rows, divisible by the largest degree of data parallelism, and tokens of each."""
PLANS = ("tp=8", "dp=128,tp=8")
LIMIT = 240
"""Seconds after which a measurement is given up; that is told, too."""
RESULT = ROOT / "bench" / "results" / "compile.json"


def llama(layers: int, batch: int = BATCH) -> tuple[Any, Any]:
    """The module without weights, and an example."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
    )
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    ids = torch.zeros(batch, LENGTH, dtype=torch.int64)
    return module, {"input_ids": ids, "labels": ids}


def measure(layers: int, plan: str) -> dict[str, Any]:
    """Compile once, in this process."""
    start = time.perf_counter()
    module, example = llama(layers)
    built = time.perf_counter() - start
    before, busy = peak_memory(), time.process_time()
    compiled = compile_program(module, example, plan)
    return {
        "layers": layers,
        "plan": plan,
        "devices": compiled.devices,
        "operators": len(compiled.graph.ops),
        "seconds": dict(compiled.timings),
        "total": sum(compiled.timings.values()),
        "processor_time": time.process_time() - busy,
        "build": built,
        "peak_memory": peak_memory(),
        "memory_before": before,
        "files": len(compiled.files),
        "lines": sum(text.count(b"\n") for name, text in compiled.files.items() if name.endswith(".py")),
    }


def peak_memory() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_own_process(layers: int, plan: str) -> dict[str, Any]:
    argv = [sys.executable, __file__, "--one", str(layers), plan]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        print(f"{layers:3d} layers, {plan:12s} more than {LIMIT} s", flush=True)
        return {"layers": layers, "plan": plan, "longer_than": LIMIT}
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    passes = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["seconds"].items())
    print(
        f"{layers:3d} layers, {plan:12s} {found['total']:6.1f} s ({passes}; "
        f"processor {found['processor_time']:.1f}), {found['peak_memory'] / 2**30:.2f} GiB, {found['lines']} lines",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--one", nargs=2, metavar=("LAYERS", "PLAN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(int(options.one[0]), options.one[1])))
        return
    before = machine(transformers=transformers.__version__)
    runs = {(layers, plan): in_own_process(layers, plan) for layers in options.layers for plan in PLANS}
    ratios = {}
    for layers in options.layers:
        few, many = (runs[layers, plan].get("total") for plan in PLANS)
        ratios[layers] = many / few if few and many else None
        print(f"{layers:3d} layers, 1024 devices against 8: {ratios[layers] or float('nan'):.2f} times the seconds")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": before, "runs": list(runs.values()), "ratio_1024_devices": ratios}
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
