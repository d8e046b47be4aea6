"""Exact initialisation of what a function makes: the same bits, one whole parameter at a time."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from tests.models import GPT, GPTConfig, gpt_example
from weft.runtime.start.initialise import begin, build, module_tensors, part_of
from weft.runtime.start.record import At
from weft.runtime.start.recording import Unrecordable, record_module
from weft.runtime.start.replaying import replay

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
IDS = {"vocab_size": 1500, "bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, **IDS))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **IDS))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **IDS))


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=32, patch_size=8))


class Odd(nn.Module):
    """Everything that constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.padded = nn.Embedding(50, 300, padding_idx=3)
        self.changed = nn.Linear(300, 300)
        self.changed.weight.data = torch.randn(300, 300) * 0.1
        torch.manual_seed(7)
        self.seeded = nn.Linear(300, 300)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            self.aside = nn.Linear(300, 300)
        self.after = nn.Linear(300, 300)
        nn.init.orthogonal_(self.after.weight)
        nn.init.trunc_normal_(self.seeded.weight, std=0.5)
        self.sum = nn.Parameter(self.changed.weight.detach() + self.after.weight.detach().T)
        with torch.no_grad():
            self.sum[2].zero_()
        self.register_buffer("mask", torch.tril(torch.ones(400, 400)))
        self.plain = torch.rand(5)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.copies = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
        self.recurrent = nn.LSTM(8, 8, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(10, 10))
        self.tied = nn.Linear(300, 300, bias=False)
        self.tied.weight = self.changed.weight


def gpt() -> nn.Module:
    return GPT(GPTConfig())


@pytest.mark.parametrize("make", [gpt, gpt2, llama, bert, vit, Odd], ids=lambda make: make.__name__)
def test_same_bits_as_the_constructor(make) -> None:
    before = torch.get_rng_state()
    whole = module_tensors(build(make, 3))
    start = begin(make, 3)
    assert start.record is not None, start.reason
    assert any(isinstance(one, At) for one in start.record.tensors.values())
    found = {}
    replay(start.record, list(whole), lambda name, tensor: found.update({name: tensor.clone()}))
    assert found.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(found[name], whole[name])] == []
    for name, buffer in start.module.named_buffers():
        assert torch.equal(buffer, whole[name])
    assert torch.equal(torch.get_rng_state(), before)


def test_plain_attributes_have_their_values() -> None:
    assert torch.equal(begin(Odd, 3).module.plain, build(Odd, 3).plain)


def test_some_tensors_alone() -> None:
    whole, start = module_tensors(build(Odd, 3)), begin(Odd, 3)
    for name in ("aside.weight", "after.weight", "sum", "padded.weight", "mask"):
        found = {}
        replay(start.record, [name], lambda name, tensor, found=found: found.update({name: tensor.clone()}))
        assert torch.equal(found[name], whole[name])


def test_records_of_one_seed_are_alike() -> None:
    found = [record_module(Odd, seed).record.digest() for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


class Census(TorchDispatchMode):
    """The largest number of bytes, in all storages that operators touch while it is on, that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        for one in tree_leaves((args, kwargs, found)):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return found


@pytest.mark.parametrize("make", [gpt2, llama, bert], ids=lambda make: make.__name__)
def test_never_more_than_the_parts_and_one_whole_parameter(make) -> None:
    start = begin(make, 0)
    whole = {name: one for name, one in start.record.tensors.items() if isinstance(one, At)}
    index = {name: tuple(((0, -(-size // 4)),) for size in one.size) for name, one in whole.items()}
    parts = {}
    with Census() as census:
        replay(start.record, list(whole), lambda name, t: parts.update({name: part_of(t, index[name])}))
    total, largest = (
        sum(start.record.sizes[i] for i in {one.storage for one in whole.values()}),
        max(start.record.sizes),
    )
    kept = sum(part.nbytes for part in parts.values())
    assert largest <= census.peak <= kept + largest + (1 << 16) < total


def looks(what: str) -> nn.Module:
    made = nn.Linear(300, 300)
    match what:
        case "item":
            made.scale = made.weight.abs().max().item()
        case "numpy":
            made.copy = made.weight.detach().numpy() * 2
        case "tolist":
            made.copy = made.weight.tolist()
        case "generator":
            nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(1))
        case "branch":
            made.large = bool((made.weight > 0).all())
        case "swallowed":
            try:
                made.scale = made.weight.abs().max().item()
            except Exception:  # noqa: BLE001 - as users do
                made.scale = 0.0
    return made


@pytest.mark.parametrize("what", ["item", "numpy", "tolist", "generator", "branch", "swallowed"])
def test_looking_at_values_builds_whole(what: str) -> None:
    with pytest.raises(Unrecordable):
        record_module(lambda: looks(what), 0)
    start = begin(lambda: looks(what), 0)
    assert start.record is None and start.reason
    assert torch.equal(start.module.weight, build(lambda: looks(what), 0).weight)


def test_a_tensor_from_before_is_not_changed_in_secret() -> None:
    shared = nn.Linear(300, 300)

    def make() -> nn.Module:
        nn.init.normal_(shared.weight)
        return shared

    assert begin(make, 0).record is None


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_parallelize_starts_from_the_same_bits(plan: str) -> None:
    config = GPTConfig()
    module = weft.parallelize(gpt, gpt_example(config), plan, emulate=True, seed=5, cache=None)
    whole = build(gpt, 5).state_dict()
    found = module.state_dict()
    assert found.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(found[name], whole[name])] == []


def test_parallelize_says_when_it_builds_whole() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = looks("item")

        def forward(self, x):
            return self.inner(x).square().mean()

    with pytest.warns(UserWarning, match="built whole on every rank"):
        weft.parallelize(Loss, (torch.zeros(4, 300),), "dp=2", emulate=True, cache=None)
