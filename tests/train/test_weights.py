"""Where a rank's parts come from: modules, state dicts, files; only its own ranges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.train.eager import gpt
from weft.compile import compile_program
from weft.errors import RunError
from weft.runtime.layout.execute import take
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.replicas import Replica
from weft.runtime.start.initialise import begin, build, part_of
from weft.runtime.start.replaying import replay
from weft.train.opened import open_flow
from weft.train.weights import fill_all, sample_hash


@pytest.fixture(scope="module")
def cut():
    """A module, and an empty program of the second of two ranks."""
    module, batch = gpt()
    files = compile_program(module, batch, "tp=2").files
    return module, run_ranks(2, lambda transport: open_flow(files, Replica(transport, 2)).program)[1]


def check(cut, source) -> None:
    module, program = cut
    with torch.no_grad():
        for tensor in program.state_dict().values():
            tensor.zero_()
    fill_all([program], source)
    whole = module.state_dict()
    for name, tensor in program.state_dict().items():
        assert torch.equal(tensor, take(whole[name], program.stored[name]))


def test_every_source_gives_the_same_parts(cut, tmp_path: Path) -> None:
    module, program = cut
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert any(part.shape != state[name].shape for name, part in program.state_dict().items())
    torch.save(state, tmp_path / "saved.pt")
    names = list(state)
    files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    save_file({name: state[name] for name in names[::2]}, files[0])
    save_file({name: state[name] for name in names[1::2]}, files[1])
    for source in (module, state, tmp_path / "saved.pt", files):
        check(cut, source)


def test_missing_and_misshapen_weights_are_refused(cut) -> None:
    module, program = cut
    state = dict(module.state_dict())
    last = next(reversed(state.pop("transformer.ln_f.weight").shape))
    with pytest.raises(RunError, match=r"no values for transformer\.ln_f\.weight"):
        fill_all([program], state)
    state["transformer.ln_f.weight"] = torch.zeros(last + 1)
    with pytest.raises(RunError, match=rf"\[{last + 1}\], planned as \[{last}\]"):
        fill_all([program], state)
    with pytest.raises(RunError, match="no file"):
        fill_all([program], "absent.safetensors")


def test_unknown_weights_are_named(cut) -> None:
    module, program = cut
    state = {**module.state_dict(), **{f"other{i}": torch.zeros(1) for i in range(10)}}
    with pytest.raises(RunError, match=r"no other0, other1.* and 2 more"):
        fill_all([program], state, known=frozenset(module.state_dict()))


def test_a_folder_with_an_index(cut, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in cut[0].state_dict().items()}
    names = list(state)
    save_file({name: state[name] for name in names[::2]}, tmp_path / "one.safetensors")
    save_file({name: state[name] for name in names[1::2]}, tmp_path / "two.safetensors")
    check(cut, tmp_path)
    wrong = {name: torch.full_like(tensor, 7) for name, tensor in state.items()}
    save_file(wrong, tmp_path / "stale.safetensors")
    index = {name: f"{'one' if i % 2 == 0 else 'two'}.safetensors" for i, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    check(cut, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"no \.safetensors files"):
        fill_all([cut[1]], tmp_path / "empty")


def test_one_of_two_tied_names_is_enough(cut) -> None:
    state = dict(cut[0].state_dict())
    del state["transformer.wte.weight"]
    check(cut, state)


def test_parts_keep_nothing_of_the_whole() -> None:
    whole = torch.arange(12).reshape(3, 4)
    part = part_of(whole, (((0, 2),), ((0, 4),)))
    assert part.untyped_storage().nbytes() == part.nbytes


def test_modules_of_different_seeds_have_different_samples() -> None:
    found = [sample_hash(build(lambda: nn.Linear(300, 300), seed)) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_intervals_in_any_order() -> None:
    whole = torch.arange(12).reshape(3, 4)
    index = (((2, 3), (0, 1)), ((1, 3),))
    assert part_of(whole, index).tolist() == [[9, 10], [1, 2]]


def test_replay_gives_what_the_seed_would() -> None:
    def make() -> nn.Module:
        return nn.Linear(4, 6)

    record, found = begin(make, 5).record, dict[str, torch.Tensor]()
    assert record is not None
    replay(record, list(record.tensors), lambda name, tensor: found.update({name: tensor.clone()}))
    torch.manual_seed(5)
    whole = make()
    assert torch.equal(found["weight"], whole.weight) and torch.equal(found["bias"], whole.bias)
    assert torch.equal(build(make, 5).weight, whole.weight)
