"""Where a rank's parts come from: modules, state dicts, files; only its own ranges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.train.eager import gpt
from weft.capture import capture
from weft.compile import compile_program
from weft.errors import RunError
from weft.lower.script import scripts
from weft.runtime.initialise import build, replay, stored_parts
from weft.runtime.transfers import take
from weft.train.weights import load_parts


@pytest.fixture(scope="module")
def cut():
    module, batch = gpt()
    program = compile_program(module, batch, "tp=2").program
    return module, program.graph, scripts(program)[1].stored


def expected(cut):
    module, graph, stored = cut
    whole = module.state_dict()
    return {
        held.tensor: take(whole[held.names[0]], stored[held.tensor]) for held in (*graph.parameters, *graph.buffers)
    }


def test_every_source_gives_the_same_parts(cut, tmp_path: Path) -> None:
    module, graph, stored = cut
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.save(state, tmp_path / "saved.pt")
    names = list(state)
    files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    save_file({name: state[name] for name in names[::2]}, files[0])
    save_file({name: state[name] for name in names[1::2]}, files[1])
    wanted = expected(cut)
    assert any(tuple(part.shape) != graph.tensors[name].sizes for name, part in wanted.items())
    for source in (module, state, tmp_path / "saved.pt", files):
        found = load_parts(source, graph, stored)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_parts_keep_nothing_of_the_whole(cut) -> None:
    module, graph, stored = cut
    for part in load_parts(module, graph, stored).values():
        assert part.untyped_storage().nbytes() == part.nbytes


def test_missing_and_misshapen_weights_are_refused(cut) -> None:
    module, graph, stored = cut
    state = dict(module.state_dict())
    last = next(reversed(state.pop("transformer.ln_f.weight").shape))
    with pytest.raises(RunError, match=r"no values for transformer\.ln_f\.weight"):
        load_parts(state, graph, stored)
    state["transformer.ln_f.weight"] = torch.zeros(last + 1)
    with pytest.raises(RunError, match=rf"\[{last + 1}\], planned as \[{last}\]"):
        load_parts(state, graph, stored)
    with pytest.raises(RunError, match="no file"):
        load_parts("absent.safetensors", graph, stored)


def test_one_of_two_tied_names_is_enough(cut) -> None:
    module, graph, stored = cut
    state = dict(module.state_dict())
    del state["lm_head.weight"]
    assert load_parts(state, graph, stored).keys() == expected(cut).keys()


def test_intervals_in_any_order() -> None:
    whole = torch.arange(12).reshape(3, 4)
    index = (((2, 3), (0, 1)), ((1, 3),))
    assert stored_parts({"w": whole}, {"w": index})["w"].tolist() == [[9, 10], [1, 2]]


def test_replay_gives_what_the_seed_would() -> None:
    def make() -> nn.Module:
        return nn.Linear(4, 6)

    index = {"weight": (((1, 3), (5, 6)), ((0, 4),)), "bias": (((0, 6),),)}
    found = replay(make, 5, index)
    torch.manual_seed(5)
    whole = make()
    assert torch.equal(found["weight"], whole.weight[[1, 2, 5]]) and torch.equal(found["bias"], whole.bias)
    assert torch.equal(build(make, 5).weight, whole.weight)


def test_dtypes_are_the_graphs() -> None:
    module = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Flatten(0), nn.Linear(4, 1, dtype=torch.float64))
    graph = capture(module, torch.zeros(2, 2, dtype=torch.float64))
    whole = {name: tensor.float() for name, tensor in module.state_dict().items()}
    every = {p.tensor: tuple(((0, n),) for n in graph.tensors[p.tensor].sizes) for p in graph.parameters}
    assert {part.dtype for part in load_parts(whole, graph, every).values()} == {torch.float64}
