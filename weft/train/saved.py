"""Saved runs: the model's own state dict, the optimizer's state by parameter name, and how far the run was.

In: a rank's module and optimizer. Out: a folder (`compile/saved_folder.py`), and from it the same on other ranks: under
the same plan bit for bit, under another to rounding. Promised: a folder gets its name when all of it is written, and
`latest.json` changes after that, so that a run that is killed leaves the old state; files that are cut short or
something else are errors.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.compile.saved_folder import FORMAT, GIVE, LATEST, MODEL, OPTIMIZER, TRAINING, newest, read_json
from weft.errors import RunError
from weft.ir.graph import Graph
from weft.runtime.program.batch import dtype_name
from weft.runtime.program.stored import shapes_of
from weft.runtime.start.initialise import Whole, part_of
from weft.runtime.training.full_state import full_state
from weft.runtime.training.parallel import Parallel
from weft.runtime.training.shard_owners import ShardOwners, exchange, gather, tell_all
from weft.train.weights import copy_part, listed, open_weights

PARTIAL = ".partial-"


@dataclass(frozen=True)
class Progress:
    """How far a run was.

    Args:
        optimizer: its class.
        rates: the schedule of the learning rate, in words.
        values: of its state what is no tensor, by parameter and key.
        scaler: the state of the loss scale, if there is one.
        groups: the settings of each group of the optimizer, its rate among them.
        extra: what the user saves besides.
        states: the extra states of the model's modules.
    """

    step: int
    seed: int
    optimizer: str
    alphabet: str = ""
    rates: str = ""
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scaler: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[str, Any] = field(default_factory=dict)
    format: str = FORMAT


@dataclass(frozen=True)
class Saved:
    """A run on disk."""

    folder: Path
    progress: Progress

    @property
    def model(self) -> Path:
        return self.folder / MODEL


# Writing.


def save(directory: str | Path, module: Parallel, optimizer: Any, progress: Progress) -> None:
    """Write the state of a run. All ranks of replica 0 call this at the same place; rank 0 writes."""
    program, directory = module.masters, Path(directory)
    extra = plain_values(
        module.extra_states(),
        "the extra state",
        "plain values in get_extra_state(); or save full_state_dict() yourself",
    )
    tensors = full_state(program, rank0_only=True)
    states, values = _gather_optimizer(module, optimizer, exchange(program))
    if program.transport.rank == 0:
        _write(directory, tensors, states, replace(progress, values=values, states=extra))


def _gather_optimizer(
    module: Parallel, optimizer: Any, holdings: ShardOwners
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The state of the optimizer, by parameter and key: tensors, on rank 0, and plain values."""
    program = module.masters
    held = {} if optimizer is None else optimizer.state
    mine = {name: dict(held.get(parameter, {})) for name, parameter in program.trained()}
    told = tell_all(program.transport, {name: _described(program.part(name), state) for name, state in mine.items()})
    shapes, tensors, values = shapes_of(program), dict[str, Tensor](), dict[str, dict[str, Any]]()
    for name in program.trained_parts():
        first = next((rank for rank, one in enumerate(told) if one.get(name)), None)
        for key, (kind, value, dtype) in (told[first][name] if first is not None else {}).items():
            if kind == "value":
                values.setdefault(name, {})[key] = value
                continue
            assert first is not None
            whole = tuple(((0, size),) for size in value)
            holders = holdings.holders(name) if kind == "part" else [(first, whole)]
            shape = shapes[name].shape if kind == "part" else value
            state = mine.get(name, {}).get(key)
            found = gather(program.transport, state, holders, shape, getattr(torch, dtype))
            if found is not None:
                tensors[f"{name}/{key}"] = found
    return tensors, values


def _described(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, tuple[str, Any, str]]:
    """For each key: a part as the parameter is one, a tensor of its own shape, or a plain value."""
    found: dict[str, tuple[str, Any, str]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            kind = "part" if value.shape == parameter.shape else "own"
            found[key] = kind, list(value.shape), dtype_name(value.dtype)
        else:
            found[key] = "value", value, ""
    return found


def _write(directory: Path, tensors: dict[str, Tensor], states: dict[str, Tensor], progress: Progress) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob(f"{PARTIAL}*"):
        shutil.rmtree(stale)
    before = newest(directory) if (directory / LATEST).is_file() else None
    name = f"step-{progress.step}"
    if (directory / name).exists():
        name += "-again" if before is None or before.name != f"{name}-again" else "-anew"
        shutil.rmtree(directory / name, ignore_errors=True)
    partial = directory / f"{PARTIAL}{name}"
    partial.mkdir()
    write = importlib.import_module("safetensors.torch").save_file
    # the format has no tensor of two names
    first: dict[int, str] = {}
    alone = {name for name, one in tensors.items() if first.setdefault(id(one), name) == name}
    write(
        {name: one if name in alone else one.clone() for name, one in tensors.items()},
        partial / MODEL,
        metadata={"format": "pt"},
    )
    write(states, partial / OPTIMIZER)
    (partial / TRAINING).write_text(json.dumps(asdict(progress)), encoding="utf-8")
    partial.rename(directory / name)
    pointer = directory / f"{PARTIAL}latest"
    pointer.write_text(json.dumps({"format": FORMAT, "folder": name}), encoding="utf-8")
    pointer.replace(directory / LATEST)
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)


def check_target(directory: str | Path) -> None:
    """Refuse to save where something else lies, before anything is trained."""
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file", remedy="give a directory for --save")
    if path.is_dir() and any(path.iterdir()) and not (path / LATEST).is_file():
        raise RunError(
            f"{path} holds something else than a saved run",
            place=str(path),
            remedy="give a directory that is empty or not there",
        )


def plain_values(extra: Mapping[str, Any], what: str, remedy: str) -> Mapping[str, Any]:
    """Values that JSON gives back as they are; others are refused."""
    for name, value in extra.items():
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            text = ""
        if not text or not _same(json.loads(text), value):
            raise RunError(
                f"{what} {name} cannot be saved: a {type(value).__name__} that is no plain value", remedy=remedy
            )
    return extra


def _same(read: Any, given: Any) -> bool:
    """True if a value comes back as it was; a tuple comes back as a list."""
    if isinstance(given, dict):
        return isinstance(read, dict) and read.keys() == given.keys() and all(_same(read[k], given[k]) for k in given)
    if isinstance(given, list | tuple):
        return len(read) == len(given) and all(map(_same, read, given))
    return str(read) == str(given)


# Reading.


def open_saved(directory: str | Path) -> Saved:
    """The newest state of a run."""
    directory = Path(directory)
    if not (directory / LATEST).is_file():
        raise RunError(f"no saved run in {str(directory)!r}", remedy=GIVE)
    folder = newest(directory)
    found = read_json(folder / TRAINING)
    try:
        progress = Progress(**found)
    except TypeError:
        raise RunError(f"{folder / TRAINING} says something else than a saved run", remedy=GIVE) from None
    for name in (MODEL, OPTIMIZER):
        _tensors(folder / name)
    return Saved(folder.resolve(), progress)


def _tensors(path: Path) -> Mapping[str, Tensor | Whole]:
    if not path.is_file():
        raise RunError(f"the saved run lacks {path.name}", place=str(path.parent), remedy=GIVE)
    return open_weights(path)


def check_model(saved: Saved, held: Mapping[tuple[str, ...], Sequence[int]]) -> None:
    """Refuse a run of another model. `held`: the shape of each tensor, by all of its names."""
    whole = _tensors(saved.model)
    missing = [names[0] for names in held if not any(name in whole for name in names)]
    wrong = [
        f"{name} has shape {list(whole[name].shape)}, the model's has {list(shape)}"
        for names, shape in held.items()
        for name in names
        if name in whole and tuple(whole[name].shape) != tuple(shape)
    ]
    known = {name for names in held for name in names}
    unknown = [name for name in whole if name not in known]
    if missing or wrong or unknown:
        what = f"it has no {listed(missing)}" if missing else "; ".join(wrong[:3])
        what = what or f"the model has no {listed(unknown)}"
        raise RunError(f"the saved run is of another model: {what}", place=str(saved.folder), remedy=GIVE)


def check_saved(saved: Saved, graph: Graph, **asked: Any) -> None:
    """Refuse a run of another model, or of which something else is not as asked: optimizer, seed, alphabet."""
    held = {one.names: graph.tensors[one.tensor].sizes for one in graph.parameters}
    held.update({one.names: graph.tensors[one.tensor].sizes for one in graph.buffers if one.persistent})
    check_model(saved, held)
    for name, mine in asked.items():
        theirs = getattr(saved.progress, name)
        if mine != theirs:
            raise RunError(
                f"the saved run had the {name} {theirs!r}, this one has {mine!r}",
                place=str(saved.folder),
                remedy="resume with the model file, --data, --lr and --seed of the saved run",
            )


@torch.no_grad()
def restore_model(saved: Saved, module: Parallel) -> None:
    """Give a rank its parts of the weights."""
    module.check_extra_states(saved.progress.states)
    whole, program = _tensors(saved.model), module.masters
    shapes = shapes_of(program)
    held = [(name, one, program.stored[name]) for name, one in program.held() if shapes[name].persistent]
    held += [(copy.name, copy.other, copy.index) for copy in program.apart.values()]
    for name, one, index in held:
        found = next(each for each in shapes[name].names if each in whole)
        copy_part(whole[found], index, one)


def restore(saved: Saved, module: Parallel, optimizer: Any) -> None:
    """Give an optimizer this rank's parts of its state, and the module its step."""
    program, whole = module.masters, _tensors(saved.folder / OPTIMIZER)
    shapes = shapes_of(program)
    held = [(name, parameter, program.stored[name]) for name, parameter in program.trained()]
    held += [(copy.name, copy.other, copy.index) for copy in program.apart.values()]
    trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for name, parameter, index in held:
        if id(parameter) not in trained:
            continue
        optimizer.state.pop(parameter, None)
        for full in (one for one in whole if one.rpartition("/")[0] == name):
            key, entry = full.rpartition("/")[2], whole[full]
            like_it = tuple(entry.shape) == shapes[name].shape
            if like_it and not parameter.numel():
                found = torch.zeros_like(parameter)
            else:
                all_of_it = tuple(((0, size),) for size in entry.shape)
                found = part_of(entry, index if like_it else all_of_it, name)
            found = found.to(parameter.device) if like_it else found
            optimizer.state[parameter][key] = found.clone()
        if values := saved.progress.values.get(name):
            optimizer.state[parameter].update(values)
    module.step = saved.progress.step
