"""Compares a user's script on processes with the same script in eager mode, in a second instead of a dozen.

    python -m tests.hunt.harness CASE.py ... [--plans dp=2 tp=2]

A case is a Python file:

    PLANS = ["dp=2", "tp=2"]           which plans it is run under; or --plans
    def make(): ...                    the model, seeded: the same on every rank
    def example(): ...                 the example of parallelize()
    SETTINGS = {"precision": None}     further arguments of parallelize(), if there are any
    def loop(model, is_parallel):      what the user does with it; yields or returns what is to be compared: numbers,
        ...                            tensors, lists and dicts of them

Every rank runs the whole loop on whole batches. What it gives is compared on every rank, and `full_state_dict()` after
it. Ranks are forked from one process that has loaded torch. A line for each case and plan:

    EQUAL; REFUSED (an error of Weft's, with its text); RAW (another error, where eager has none or another one);
    WRONG (other numbers, in silence); HANG
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.export
from torch.utils import _pytree as pytree

import weft
import weft.runtime.links.processes
import weft.train.api
import weft.train.emulated
from weft.errors import WeftError

RANKS, LIMIT, CLOSE = 2, 40.0, 1e-9
PLANS = ["dp=2", "tp=2"]


@dataclass(frozen=True)
class Outcome:
    """What one process found.

    Args:
        found: what the loop gave, and the state at the end. kind: of an error. text: of an error.
    """

    found: Any = None
    kind: str = ""
    text: str = ""


def loaded(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def ran(path: Path, plan: str | None) -> Outcome:
    """The case in this process: eager without a plan."""
    try:
        torch.manual_seed(0)
        case = loaded(path)
        model = case.make()
        if plan is not None:
            model = weft.parallelize(model, case.example(), plan, cache=None, **getattr(case, "SETTINGS", {}))
        told = case.loop(model, plan is not None)
        told = list(told) if isinstance(told, Iterator) else told
        state = model.full_state_dict() if plan is not None else model.state_dict()
        return Outcome((plain(told), plain(dict(state))))
    except WeftError as error:
        return Outcome(kind="weft", text=str(error))
    except BaseException as error:  # noqa: BLE001 - told to the process that compares
        return Outcome(kind=type(error).__name__, text="".join(traceback.format_exception(error))[-1500:])


def plain(found: Any) -> Any:
    """Without graphs and views, to be sent."""
    return pytree.tree_map(lambda one: one.detach().clone() if isinstance(one, torch.Tensor) else one, found)


def child(path: Path, plan: str | None, rank: int, port: int, out: str) -> None:
    os.setsid()
    if plan is not None:
        about = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
        os.environ.update({name: str(value) for name, value in about.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="hunt")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("default")
        outcome = ran(path, plan)
    torch.save((outcome.found, outcome.kind, outcome.text, said.getvalue()[-3000:]), f"{out}.part")
    Path(f"{out}.part").rename(out)
    # what a case leaves running does not keep the process
    time.sleep(0.3 if rank == 0 else 0)
    os._exit(0)


def outcomes(path: Path, plan: str | None) -> list[Outcome | None]:
    """Of each rank; None of one that does not end."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        outs = [f"{folder}/{rank}" for rank in range(1 if plan is None else RANKS)]
        started = [context.Process(target=child, args=(path, plan, at, port, out)) for at, out in enumerate(outs)]
        for one in started:
            one.start()
        until = time.monotonic() + LIMIT
        for one in started:
            one.join(max(0.0, until - time.monotonic()))
        for one in started:
            if one.is_alive():
                os.killpg(one.pid or 0, signal.SIGKILL)
                one.join()
        return [Outcome(*torch.load(out, weights_only=False)[:3]) if Path(out).exists() else None for out in outs]


def differs(mine: Any, eager: Any) -> str:
    """Where two results are not the same; "" if nowhere."""
    (ours, spec), (theirs, other) = pytree.tree_flatten_with_path(mine), pytree.tree_flatten_with_path(eager)
    if spec != other:
        return f"another form: {str(spec)[:200]} instead of {str(other)[:200]}"
    for (where, one), (_, wanted) in zip(ours, theirs, strict=True):
        if isinstance(wanted, float) and isinstance(one, float):
            same = math.isclose(one, wanted, rel_tol=CLOSE, abs_tol=CLOSE) or (math.isnan(one) and math.isnan(wanted))
            if not same:
                return f"{pytree.keystr(where)}: {one} instead of {wanted}"
        elif isinstance(wanted, torch.Tensor) and isinstance(one, torch.Tensor):
            close = CLOSE if wanted.dtype in (torch.float64, torch.complex128) else 1e-4
            same = one.shape == wanted.shape and one.dtype == wanted.dtype
            if not (same and torch.allclose(one, wanted, rtol=close, atol=close, equal_nan=True)):
                return f"{pytree.keystr(where)}: {str(one)[:120]} instead of {str(wanted)[:120]}"
        elif type(one) is not type(wanted) or one != wanted:
            return f"{pytree.keystr(where)}: {one!r:.120} instead of {wanted!r:.120}"
    return ""


def judged(eager: Outcome, found: list[Outcome | None]) -> tuple[str, str]:
    if None in found:
        return "HANG", f"ranks {[at for at, one in enumerate(found) if one is None]} after {LIMIT:g} s"
    ranks = [one for one in found if one is not None]
    for at, one in enumerate(ranks):
        if one.kind and one.kind not in ("weft", eager.kind):
            return "RAW", f"rank {at}: {one.text}"
    refused = [one for one in ranks if one.kind == "weft"]
    if len(refused) == len(ranks):
        return "REFUSED", refused[0].text
    if refused:
        return "RAW", f"only some ranks refuse: {refused[0].text}"
    if eager.kind:
        both = all(one.kind == eager.kind for one in ranks)
        return ("EQUAL", f"both raise {eager.kind}") if both else ("WRONG", f"eager raises: {eager.text[-400:]}")
    for at, one in enumerate(ranks):
        if where := differs(one.found, eager.found):
            return "WRONG", f"rank {at}: {where}"
    return "EQUAL", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, nargs="+")
    parser.add_argument("--plans", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    context = multiprocessing.get_context("fork")
    for path in options.cases:
        with context.Pool(1, maxtasksperchild=1) as pool:
            plans = options.plans or pool.apply(plans_of, (path,))
        eager = outcomes(path, None)[0] or Outcome(kind="hang")
        for plan in plans:
            kind, text = judged(eager, outcomes(path, plan))
            counts[kind] = counts.get(kind, 0) + 1
            short = text if kind in ("RAW", "WRONG", "HANG") else text.replace("\n", " ")[:300]
            print(f"{kind:8} {path.stem} {plan}: {short}", flush=True)
    print(counts)


def plans_of(path: Path) -> list[str]:
    try:
        return list(getattr(loaded(path), "PLANS", PLANS))
    except Exception as error:  # noqa: BLE001 - the case is wrong: it is told when it runs
        print(f"{path.stem} cannot be loaded: {error}", flush=True)
        return []


if __name__ == "__main__":
    main()
