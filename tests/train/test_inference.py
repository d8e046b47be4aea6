"""Evaluation: eval(), no_grad, logits in place of a loss, generate() of Hugging Face models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.train.ranks import on_ranks
from weft.errors import RunError

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, ROWS = 40, 12, 2


class Image(nn.Module):
    """Dropout and batch norm, which behave otherwise in evaluation; a part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.dropout(F.relu(self.norm(self.up(x))), 0.5, self.training))
        return found


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_dropout_and_batch_norm_in_evaluation(plan: str) -> None:
    torch.manual_seed(0)
    eager = Image().double()
    mine: Any = weft.parallelize(copy.deepcopy(eager), torch.zeros(8, 6).double(), plan, emulate=True, cache=None)
    x = torch.randn(8, 6, dtype=torch.float64)
    for model in (eager, mine):
        model(x)  # running statistics move
        model.eval()
    with torch.no_grad():
        found, wanted = mine(x), eager(x)
    assert not found.requires_grad
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    # with gradients too: they are those of the very same weights
    for model in (eager, mine):
        model(x).square().sum().backward()
    weights = {name: held for rank in mine.ranks for name, held in rank.named_parameters()}
    assert all(held.grad is not None for held in weights.values())
    if plan == "dp=2":
        torch.testing.assert_close(weights["down.weight"].grad, eager.down.weight.grad, rtol=1e-12, atol=1e-13)
    mine.train()
    assert mine(x).shape == (8, 4)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2"])
@pytest.mark.parametrize("inside", ["train", "eval", "made"])
def test_first_in_inference_mode(plan: str, inside: str) -> None:
    """What a call, and what makes a program, keeps can be trained and evaluated with gradients afterwards."""
    torch.manual_seed(0)
    model, x = Image().double(), torch.randn(8, 6, dtype=torch.float64)
    eager = copy.deepcopy(model)

    def work(module: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        found, optimizer = list[Tensor](), torch.optim.SGD(module.parameters(), lr=0.1)
        with torch.inference_mode():
            if inside == "train":
                module(x)
            found.append(module.eval()(x) if inside == "eval" else torch.zeros(()))
            module.eval()
        found.append(module(x))
        found[-1].square().sum().backward()
        optimizer.step()
        module.train()
        # no dropout
        module(torch.zeros_like(x)).sum().backward()
        optimizer.step()
        return [one.detach().clone() for one in (*found, module.eval()(x))], [one.grad for one in module.parameters()]

    wanted, gradients = work(eager)
    for found, mine in on_ranks(model, (x,), plan, work, outputs="any"):
        torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-10, atol=1e-12)
        assert all(one is None or not one.is_inference() for one in mine) and len(mine) == len(gradients)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=WORDS, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).double()


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).double()


def tokens(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(1, WORDS, (rows, length), generator=torch.Generator().manual_seed(rows * length))


def drawn(model: nn.Module, plan: str, **settings: Any) -> Any:
    ids = tokens()
    return weft.parallelize(model, {"input_ids": ids, "labels": ids}, plan, emulate=True, cache=None, **settings)


@pytest.mark.parametrize(("make", "plan"), [(gpt2, "dp=2"), (llama, "tp=2,megatron"), (llama, "pp=2,microbatches=2")])
def test_logits_and_generated_tokens(make: Any, plan: str) -> None:
    eager = make()
    mine = drawn(copy.deepcopy(eager), plan)
    with pytest.raises(RunError, match="training mode"):
        mine.generate(tokens(1, 3))
    eager.eval()
    mine.eval()
    ids = tokens()
    with torch.no_grad():
        loss, wanted = mine(input_ids=ids, labels=ids).loss, eager(input_ids=ids, labels=ids)
        found = mine(input_ids=ids, use_cache=False)
    # the model makes its loss in float32: that of two halves is rounded once more
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-6 if "pp" in plan else 1e-12, atol=1e-13)
    assert type(found) is type(wanted)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-12, atol=1e-13)
    for prompt in (tokens(1, 4), tokens(3, 5)):
        wanted = eager.generate(prompt, max_new_tokens=5, do_sample=False)
        assert torch.equal(mine.generate(prompt, max_new_tokens=5, do_sample=False), wanted)
    padded = {"attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), "max_new_tokens": 5}
    assert torch.equal(mine.generate(tokens(2, 4), **padded), eager.generate(tokens(2, 4), **padded))
    with pytest.raises(RunError, match="13 tokens, the example 12"):
        mine.generate(tokens(1, 12), max_new_tokens=5, min_new_tokens=5)


def test_all_outputs_of_a_model_with_a_loss() -> None:
    eager = gpt2().eval()
    with pytest.warns(UserWarning, match="returns a DynamicCache"):
        mine = drawn(copy.deepcopy(eager), "dp=2,tp=2", outputs="all")
    ids = tokens()
    found, wanted = mine(input_ids=ids, labels=ids), eager(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-12, atol=1e-13)
    for model, out in ((mine, found), (eager, wanted)):
        (out.loss + out.logits.square().mean()).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    state, before = mine.state_dict(), gpt2().state_dict()
    for name, tensor in eager.state_dict().items():
        # the library computes its loss in float32
        torch.testing.assert_close(state[name] - before[name], tensor - before[name], rtol=1e-4, atol=1e-8)


def test_a_model_without_labels_is_a_part_like_any_other() -> None:
    eager = llama()
    example = {"input_ids": tokens(), "use_cache": False}
    mine = weft.parallelize(copy.deepcopy(eager), example, "tp=2", emulate=True, cache=None)
    torch.testing.assert_close(mine(**example).logits, eager(**example).logits, rtol=1e-12, atol=1e-13)


def test_evaluation_by_another_plan_of_storage() -> None:
    """What is stored follows the plan of training, whatever the ops of another program would ask for."""
    ids = tokens()
    mine = weft.parallelize(gpt2(), {"input_ids": ids, "labels": ids}, "dp=2,zero=3", emulate=True, cache=None)
    mine.eval()
    with torch.no_grad():
        found = mine(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, gpt2().eval()(input_ids=ids).logits, rtol=1e-12, atol=1e-13)


def test_other_calls_are_refused() -> None:
    mine = drawn(gpt2(), "dp=2")
    ids = tokens()
    with pytest.raises(RunError, match="another form"):
        mine(input_ids=ids)
    mine.eval()
    with pytest.raises(RunError, match="by keyword"):
        mine(ids, attention_mask=torch.ones_like(ids))
    with pytest.raises(RunError, match="of the batch is"):
        mine(input_ids=ids[:, :5], labels=ids[:, :5])
