"""Step time: state stored in parts, ours against torch's (`bench/sharded.py`).

    python bench/state.py [--repeats 15] [--ranks 2 4] [--batch 8] [--out bench/results/state.json]

Each side has processes of its own, as it comes, and they take steps in turn (`bench/turns.py`), on the same batch and
from the same weights; medians and their ratio are told, below 1 where Weft is faster. Nothing is judged here, except
that losses stay together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpt import example, model
from bench.overhead import tell
from bench.sharded import PEERS, compare_all, ours, theirs
from bench.turns import Side, Taken, in_turn, take_turns, torch_group
from weft.compile import compile_program
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.processes import ProcessTransport

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "state.json"


def one_side(transport: ProcessTransport, payload: dict[str, Any]) -> Taken:
    """One process of a side."""
    with torch_group(transport, payload["meeting"]):
        batch = example(payload["batch"])
        files, name = payload["files"], payload["name"]
        step = ours(transport, files, batch) if files is not None else theirs(name, batch, hollow=False)
        return take_turns(transport.rank, payload, step)


def compare(name: str, ranks: int, batch: int, repeats: int) -> dict[str, Any]:
    """Both sides of a stage on so many ranks."""
    files = compile_program(model(), example(batch), f"dp={ranks},{name}").files

    def side(files: Any) -> Side:
        pool = Pool(ranks, preload=("bench.state",), gives_back=files is not None)
        return Side(pool, "bench.state:one_side", {"files": files, "name": name, "batch": batch})

    return in_turn(side(files), side(None), repeats)


def say(name: str, ranks: int, found: dict[str, Any]) -> None:
    tell(f"{name} on {ranks} ranks, theirs {PEERS[name]}", found)


if __name__ == "__main__":
    compare_all(__doc__, RESULT, 15, compare, say)
