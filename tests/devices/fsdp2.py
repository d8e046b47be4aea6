"""The collectives of a step of torch's FSDP2 by block, over its fake process group: a script of its own process.

In: a model file such as `deep_llama.py`. Out: a line of JSON: how often each operator of torch.distributed was called
in the second and in the third step of rank 0 of two, each layer and the rest fully sharded. The tensors lie on the CPU;
what is received is of any content.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from weft.compile.model_file import load_model_file

RANKS = 2


class Issued(TorchDispatchMode):
    """Counts calls of torch.distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def main(file: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    subject, mesh = load_model_file(file), init_device_mesh("cpu", (RANKS,))
    module, batch = subject.model, {name: one[: len(one) // RANKS] for name, one in subject.example.items()}
    for layer in module.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(module, mesh=mesh)
    optimizer, steps = torch.optim.AdamW(module.parameters(), lr=1e-3), []
    for _ in range(3):
        with Issued() as issued:
            optimizer.zero_grad()
            module(**batch).loss.backward()
            optimizer.step()
        steps.append(issued.calls)
    print(json.dumps(steps[1:]))


if __name__ == "__main__":
    main(sys.argv[1])
