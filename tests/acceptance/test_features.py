"""What users do to their models: freeze weights, checkpoint, load from a folder, bring their own attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.compile import compile_program
from weft.compile.model_file import load_model_file
from weft.ir.program import Recompute

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS, LENGTH, ROWS = 40, 8, 4
FULL = pytest.mark.full


def expect_equal(model: nn.Module, example: Any, plan: str) -> None:
    result = weft.verify(model, example, plan=plan)
    assert result.equal, str(result)


@pytest.mark.parametrize("plan", ["dp=2,tp=2", *(pytest.param(p, marks=FULL) for p in ("dp=2", "tp=2", "dp=2,zero=3"))])
def test_lora(plan: str) -> None:
    result = weft.verify(EXAMPLES / "lora.py", plan=plan)
    assert result.equal, str(result)


def test_frozen_weights_are_cut_and_have_no_gradient() -> None:
    subject = load_model_file(EXAMPLES / "lora.py")
    model = copy.deepcopy(subject.model)
    compiled = compile_program(model, subject.example, "dp=2,tp=2")
    assert compiled.program is not None
    names = {sync.parameter for sync in compiled.program.syncs}
    trained = {name for name, held in model.named_parameters() if held.requires_grad}
    assert names == trained and len(trained) == 16
    frozen = compiled.program.stored["blocks.0.up.base.weight"]
    assert any(table is not None and len(table) > 1 for table in frozen.ranges), "it is cut all the same"
    mine: Any = weft.parallelize(model, subject.example, "dp=2,tp=2", emulate=True, cache=None)
    mine(*subject.example).backward()
    for rank in mine.ranks:
        for name, held in rank.named_parameters():
            assert (held.grad is not None) == held.requires_grad == (name in trained), name


@pytest.mark.parametrize("plan", ["tp=2,megatron", pytest.param("dp=2", marks=FULL)])
def test_gradient_checkpointing(plan: str) -> None:
    subject = load_model_file(EXAMPLES / "checkpointed.py")
    compiled = compile_program(subject.model, subject.example, plan)
    assert sum(isinstance(step, Recompute) for step in compiled.program.steps) == 2
    assert compiled.files["program.py"].count(b"self.recompute(") == 1, "layers that are alike are one function"
    result = weft.verify(EXAMPLES / "checkpointed.py", plan=plan)
    assert result.equal, str(result)


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
        **changes,
    )
    return transformers.LlamaForCausalLM(config)


def example() -> dict[str, Tensor]:
    tokens = torch.randint(1, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def test_weights_of_a_local_folder(tmp_path: Path) -> None:
    saved = llama()
    with torch.no_grad():
        for held in saved.parameters():
            held.add_(0.01)
    saved.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    mine = weft.parallelize(loaded, example(), "dp=2,tp=2", emulate=True, cache=None)
    state = mine.state_dict()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(state[name], tensor), name
    torch.testing.assert_close(mine(**example()).loss, saved(**example()).loss, rtol=1e-5, atol=1e-6)
    expect_equal(loaded.train(), example(), "dp=2,tp=2")


def softcapped(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """An attention of the user's own: scores are bounded."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.tanh(query @ key.transpose(2, 3) * settings["scaling"] / 3) * 3
    above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(above, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


ATTENTION = {"sdpa": "dp=2", "eager": "tp=2", "softcapped": "dp=2,tp=2,megatron"}


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (kind, plan) if quick == plan else pytest.param(kind, plan, marks=FULL)
        for kind, quick in ATTENTION.items()
        for plan in ATTENTION.values()
    ],
)
def test_attention_functions(kind: str, plan: str) -> None:
    transformers.AttentionInterface.register("softcapped", softcapped)
    model = llama(attn_implementation=kind)
    assert model.config._attn_implementation == kind
    expect_equal(model, example(), plan)


class Mixing(nn.Module):
    """A model whose attention is a plain function that it was given."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend
        self.words, self.mix = nn.Embedding(WORDS, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (4, 4)).transpose(1, 2) for one in self.mix(self.words(input_ids)).chunk(3, -1))
        found, _ = self.attend(self, q, k, v, None, scaling=0.5)
        return nn.functional.cross_entropy(self.head(found.flatten(2)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("plan", ["tp=2", pytest.param("dp=2", marks=FULL)])
def test_a_function_of_the_users_own(plan: str) -> None:
    torch.manual_seed(0)
    expect_equal(Mixing(softcapped), example(), plan)
