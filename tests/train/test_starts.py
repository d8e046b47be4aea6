"""Large starts: modules on the meta device, weight files of which each rank reads its own ranges."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import weft
from tests.parts import parts
from tests.train.test_initialise import IDS, gpt2, llama
from weft.cli import main
from weft.compile import compile_subject, weight_files
from weft.compile.model_file import Subject, load_model_file
from weft.errors import RunError
from weft.runtime.layout.execute import take
from weft.runtime.links.fake_transport import FakeTransport
from weft.runtime.start.initialise import Start, build
from weft.train.memory.limit import PROCESS, tell_scarce
from weft.train.opened import open_rank
from weft.train.starting import values_of
from weft.train.weights import copy_part


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("scale", torch.full((8,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) * self.scale).square().mean()


class Plain(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 2.0))


BATCH = (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),)


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


def begun(model, plan: str = "dp=2,zero=3", batch=BATCH, **options) -> dict[str, torch.Tensor]:
    return weft.parallelize(model, batch, plan, emulate=True, cache=None, **options).state_dict()


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(IDS["vocab_size"], (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def same(found, expected) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_meta_module_starts_from_weights(tmp_path: Path) -> None:
    state = build(Plain, 1).state_dict()
    save_file(state, tmp_path / "all.safetensors")
    meta = on_meta(Plain)
    for source in (state, tmp_path / "all.safetensors"):
        same(begun(meta, weights=source), state)
    assert all(tensor.is_meta for tensor in meta.state_dict().values()), "the user's module is not touched"


def test_a_meta_module_without_values_is_refused() -> None:
    with pytest.raises(RunError, match=r"up\.weight, .*on the meta device") as caught:
        begun(on_meta(Net))
    assert "weights=" in caught.value.remedy and "function" in caught.value.remedy
    with pytest.raises(RunError, match="on the meta device"):
        begun(lambda: on_meta(Net))
    with pytest.raises(RunError, match="scale: on the meta device"):
        begun(on_meta(Net), weights=build(Net, 1).state_dict())


def reset(module: Net) -> None:
    for part in (module.up, module.down):
        part.reset_parameters()
    module.scale.fill_(2.0)


def test_a_function_gives_a_meta_module_its_values() -> None:
    found = begun(on_meta(Net), init=reset, seed=7)
    same(found, build(Net, 7).state_dict())
    loss = weft.parallelize(on_meta(Net), BATCH, "tp=2", init=reset, seed=7, emulate=True, cache=None)(*BATCH)
    assert loss.item() == pytest.approx(build(Net, 7)(*BATCH).item(), rel=1e-5), "the buffer has its values too"
    state = build(Net, 1).state_dict()
    same(begun(on_meta(Net), weights=state, init=reset), state)


@pytest.mark.parametrize(
    ("init", "said"),
    [
        (lambda module: module.up.reset_parameters(), r"init leaves down\.weight, down\.bias, scale without"),
        (lambda module: module.missing(), "init cannot be recorded: AttributeError"),
        (lambda module: nn.init.normal_(module.up.weight).sum().item(), "init cannot be recorded: it calls"),
    ],
)
def test_a_function_that_does_not_do_is_refused(init, said: str) -> None:
    with pytest.raises(RunError, match=said):
        begun(on_meta(Net), init=init)


def test_a_function_for_a_module_with_values_is_refused() -> None:
    with pytest.raises(RunError, match="the module has its values"):
        begun(Net(), init=reset)


@pytest.mark.parametrize(
    ("make", "plan"), [(llama, "dp=2,zero=3"), (gpt2, "pp=2,microbatches=2")], ids=["llama", "gpt2"]
)
def test_hugging_face_on_meta(make, plan: str) -> None:
    meta = on_meta(make)
    kind = type(meta)
    found = begun(meta, plan, tokens(), init=kind.init_weights, seed=3)

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            module = make()
        for part in module.modules():
            part._is_hf_initialized = False
        module.init_weights()
        return module

    same(found, build(made, 3).state_dict())


def test_hugging_face_on_meta_with_weights_lacks_what_is_not_saved() -> None:
    state = build(llama, 1).state_dict()
    with pytest.raises(RunError, match=r"inv_freq: on the meta device|inv_freq, .*: on the meta device"):
        begun(on_meta(llama), "dp=2,zero=3", tokens(), weights=state)
    same(begun(llama, "dp=2,zero=3", tokens(), weights=state), state)


class Shards:
    """A model's weights in two files with an index."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, build(Plain, 1).state_dict()
        names = list(self.state)
        self.map = {name: f"part{number % 2}.safetensors" for number, name in enumerate(names)}
        for file in ("part0.safetensors", "part1.safetensors"):
            save_file({name: self.state[name] for name in names if self.map[name] == file}, folder / file)
        self.index = folder / "model.safetensors.index.json"
        self.write()

    def write(self) -> None:
        self.index.write_text(json.dumps({"weight_map": self.map}))


def test_an_index_or_its_folder(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    for source in (shards.index, tmp_path, str(tmp_path)):
        same(begun(on_meta(Plain), weights=source), shards.state)


def test_dtypes_are_converted_within_their_kind(tmp_path: Path) -> None:
    state = build(Plain, 1).state_dict()
    save_file({name: tensor.bfloat16() for name, tensor in state.items()}, tmp_path / "half.safetensors")
    found = begun(on_meta(Plain), weights=tmp_path / "half.safetensors")
    same(found, {name: tensor.bfloat16().float() for name, tensor in state.items()})
    save_file({**state, "scale": torch.full((8,), 2)}, tmp_path / "mixed.safetensors")
    with pytest.raises(RunError, match="scale is int64, planned as float32"):
        begun(on_meta(Plain), weights=tmp_path / "mixed.safetensors")


def cut_short(shards: Shards) -> None:
    path = shards.folder / "part1.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def lose_a_shard(shards: Shards) -> None:
    (shards.folder / "part1.safetensors").unlink()


def lie_in_the_index(shards: Shards) -> None:
    shards.map["up.weight"], shards.map["up.bias"] = shards.map["up.bias"], shards.map["up.weight"]
    shards.write()


def forget_in_the_index(shards: Shards) -> None:
    del shards.map["up.weight"]
    shards.write()


def spoil_the_index(shards: Shards) -> None:
    shards.index.write_text("{")


def say_it_twice(shards: Shards) -> None:
    shards.index.unlink()
    save_file({"up.weight": shards.state["up.weight"]}, shards.folder / "part2.safetensors")


def not_safetensors(shards: Shards) -> None:
    shards.index.unlink()
    (shards.folder / "part2.safetensors").write_text("nothing of the kind")


def of_another_shape(shards: Shards) -> None:
    shards.index.unlink()
    path = shards.folder / shards.map["up.weight"]
    save_file({**load_file(path), "up.weight": torch.zeros(3, 3)}, path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut_short, r"part1\.safetensors is cut short"),
        (lose_a_shard, r"names part1\.safetensors, which is not there"),
        (lie_in_the_index, r"part\d\.safetensors has no \S+, which its index says"),
        (forget_in_the_index, r"no values for up\.weight"),
        (spoil_the_index, "is no index of weights"),
        (say_it_twice, r"up\.weight is in part\d\.safetensors and in part2\.safetensors"),
        (not_safetensors, r"part2\.safetensors is cut short, or no safetensors file"),
        (of_another_shape, r"up\.weight has shape \[3, 3\], planned as \[32, 8\]"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_bad_files_are_named(tmp_path: Path, spoil, said: str) -> None:
    shards = Shards(tmp_path)
    spoil(shards)
    with pytest.raises(RunError, match=said):
        weight = tmp_path if spoil is not forget_in_the_index else shards.index
        begun(on_meta(Plain), "tp=2", weights=weight)


def test_a_bad_state_dict_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    torch.save(build(Plain, 1).state_dict(), path)
    same(begun(on_meta(Plain), weights=path), build(Plain, 1).state_dict())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(RunError, match=r"saved\.pt cannot be read as a state dict"):
        begun(on_meta(Plain), weights=path)


class Counts:
    """A whole tensor that counts what is read of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.reads = tensor, list[int]()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self, index) -> torch.Tensor:
        found = self.tensor[tuple(slice(*one) for (one,) in index)].clone()
        self.reads.append(found.nbytes)
        return found


def test_parts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.train.weights.PIECE", 1000)
    whole = Counts(torch.randn(100, 40))
    index = (((50, 75), (0, 10)), ((10, 20), (30, 40)))
    part = torch.empty(35, 20)
    copy_part(whole, index, part)
    rows = torch.cat([torch.arange(50, 75), torch.arange(10)])
    columns = torch.cat([torch.arange(10, 20), torch.arange(30, 40)])
    assert torch.equal(part, whole.tensor[rows][:, columns])
    assert sum(whole.reads) == part.nbytes and max(whole.reads) <= 1000
    copy_part(whole, ((), ((0, 40),)), torch.empty(0, 40))


def test_only_local_ranges_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = build(Plain, 1).state_dict()
    save_file(state, tmp_path / "all.safetensors")
    reads, read = list[int](), weight_files.Entry.read

    def counted(self, index):
        found = read(self, index)
        reads.append(found.nbytes)
        return found

    monkeypatch.setattr(weight_files.Entry, "read", counted)
    begun(on_meta(Plain), "dp=4,zero=3", weights=tmp_path / "all.safetensors")
    whole = sum(tensor.nbytes for tensor in state.values())
    # each of four ranks reads its quarter, and the buffer whole
    assert sum(reads) == whole + 3 * state["scale"].nbytes


LARGE = """
import sys
import resource
import torch
from torch import nn

import weft
from weft.runtime.links.fake_transport import FakeTransport

WIDTH, DEPTH = 1024, 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(how):
    from weft.compile import compile_program
    from weft.train.opened import open_rank
    from weft.train.starting import started, values_of
    from weft.compile.model_file import Subject, load_model_file

    init = how if how in ("exact", "counter") else "exact"
    if how == "whole":
        start = started(Net(), 0)
    elif how == "files":
        with torch.device("meta"):
            start = started(Net(), 0, weights=sys.argv[2])
    else:
        start = started(Net, 0, init)
    files = compile_program(start.module, (torch.zeros(4, WIDTH),), "dp=4,zero=3").files
    values = sys.argv[2] if how == "files" else values_of(start, init)
    before = peak()
    module = open_rank(files, FakeTransport(1, 4), values)
    print(peak() - before, sum(one.nbytes for one in module.parameters()), 4 * DEPTH * WIDTH**2)


main(sys.argv[1])
"""


@pytest.mark.parametrize("how", ["exact", *(pytest.param(how, marks=pytest.mark.full) for how in ("counter", "files"))])
def test_a_rank_holds_its_parts_and_one_tensor(how: str, tmp_path: Path) -> None:
    script, weights = tmp_path / "large.py", tmp_path / "large.safetensors"
    script.write_text(LARGE)
    if how == "files":
        save_file({f"layers.{layer}.weight": torch.zeros(1024, 1024) for layer in range(16)}, weights)
    said = subprocess.run(
        [sys.executable, str(script), how, str(weights)], capture_output=True, text=True, check=True
    ).stdout.split()
    more, parts, whole = map(int, said[-3:])
    assert parts == whole // 4
    largest, slack = whole // 16, 6 << 20
    # a file is mapped: what was read of it may stay until the memory is wanted
    mapped = parts if how == "files" else 0
    assert more <= parts + largest + mapped + slack < whole


def test_the_command_takes_weights_and_init(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\nfrom tests.train.test_starts import Plain as Net\n"
        "def model():\n    return Net()\n"
        "def example():\n    return (torch.ones(4, 8),)\n"
    )
    state = build(Plain, 9).state_dict()
    save_file(state, tmp_path / "all.safetensors")
    command = ["train", str(tmp_path / "net.py"), "--plan", "dp=1", "--steps", "1", "--cache", str(tmp_path), "--json"]

    def loss(*more: str) -> float:
        assert main([*command, *more]) == 0
        return float(json.loads(capsys.readouterr().out.strip().splitlines()[-1])["loss_from"])

    module = build(Plain, 0)
    assert loss() == pytest.approx(module(torch.ones(4, 8)).item(), rel=1e-5)
    module.load_state_dict(state)
    assert loss("--weights", str(tmp_path / "all.safetensors")) == pytest.approx(
        module(torch.ones(4, 8)).item(), rel=1e-5
    )
    assert loss("--init", "counter") != pytest.approx(loss(), rel=1e-3)
    assert main([*command, "--weights", str(tmp_path / "absent.safetensors")]) == 2


def test_processes_that_will_not_fit_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(Plain(), BATCH)
    compiled, said = compile_subject(subject, "dp=2"), list[str]()
    monkeypatch.setattr("weft.train.memory.limit.available", lambda: 64 << 30)
    tell_scarce(compiled, subject, 4, said.append)
    monkeypatch.setattr("weft.train.memory.limit.available", lambda: 4 * PROCESS + (20 << 10))
    tell_scarce(compiled, subject, 4, said.append)
    (text,) = said
    assert "4 processes will need" in text and "parameters 2.156 KiB" in text and "zero=3" in text


def test_a_hugging_face_folder_is_read_in_ranges(tmp_path: Path) -> None:
    model = build(llama, 4)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    subject = load_model_file(f"hf:{tmp_path}", hollow=0)
    assert subject.weights == str(tmp_path) and subject.record is not None
    files = compile_subject(subject, "dp=2,zero=3").files
    own = values_of(Start(subject.model, subject.record))
    for rank in range(2):
        found = open_rank(files, FakeTransport(rank, 2), subject.weights, otherwise=own).program
        for name, index in found.stored.items():
            if name in model.state_dict():
                assert torch.equal(parts(found.part(name)), take(model.state_dict()[name], index)), name
    # what transformers would have to rename is left to it
    index = next(tmp_path.glob("*.json.index.json"), tmp_path / "model.safetensors.index.json")
    index.unlink()
    renamed = {name.replace("model.", "", 1): tensor for name, tensor in model.state_dict().items()}
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_model_file(f"hf:{tmp_path}", hollow=0).record is None
