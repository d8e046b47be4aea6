"""generate(): the decoding of a Hugging Face model, with its forward run in parallel.

In: the original model (its weights are not used), the parallel one, the example it was made for. Out: a function that
takes the arguments of the model's own `generate()` and gives the same tokens. The decoding is the library's; each
forward is padded on the right to the rows and length of the example, so that one program serves all lengths. There is
no cache of keys and values: every token is computed from all that stand before it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.example import split_example
from weft.errors import RunError

PADDED = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
"""Arguments of a forward that have a row per text and a column per token."""
SETTLED = ("use_cache", "return_dict", "cache_position", "logits_to_keep", "past_key_values")
"""Arguments that change nothing where there is no cache and all logits are wanted."""


def generates(module: nn.Module) -> bool:
    """True for a model that has the library's generate()."""
    return hasattr(module, "generate") and hasattr(module, "prepare_inputs_for_generation")


class Generate:
    """`parallel.generate`.

    Args:
        make: gives the original model; asked for when text is first generated.
        parallel: is called in place of its forward.
        example: what the parallel model was made for.
    """

    def __init__(self, make: Callable[[], nn.Module], parallel: nn.Module, example: Any) -> None:
        self._make, self._parallel, self._example = make, parallel, example
        self._shell: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The library's generate(), without a cache. On several processes every rank calls it with the same."""
        if self._parallel.training:
            raise RunError("generate() of a model that is in training mode", remedy="call eval() first")
        if self._shell is None:
            self._shell = self._made()
        return self._shell.generate(*args, **{**kwargs, "use_cache": False})

    def _made(self) -> Any:
        """The original model with another forward: its decoding, settings and preparations are its own."""
        module = self._make()
        config: Any = module.config
        if config.is_encoder_decoder:
            raise RunError(
                f"{type(module).__name__} encodes before it decodes, which generate() cannot do in parallel",
                remedy="call its forward with a batch of its own, and decode in a loop of yours",
            )
        device = next((held.device for held in self._parallel.parameters()), torch.device("cpu"))
        kind: Any = type(type(module).__name__, (type(module),), {"device": property(lambda shell: device)})
        shell = kind.__new__(kind)
        shell.__dict__.update(module.__dict__)
        forward = Forward(self._parallel, module, *self._shape(module))
        shell.__dict__["forward"] = functools.wraps(module.forward)(forward)
        shell.__dict__["training"] = False
        return shell

    def _shape(self, module: nn.Module) -> tuple[int, int]:
        """Rows and length of the example."""
        args, kwargs = split_example(self._example)
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        tokens = bound.get("input_ids")
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            raise RunError("the example has no input_ids", remedy="give an example with input_ids [rows, tokens]")
        return int(tokens.shape[0]), int(tokens.shape[1])


class Forward:
    """The forward of a shell: rows in groups as large as the example's, padded to its length.

    Args:
        num_rows, length: of the example.
    """

    def __init__(self, parallel: nn.Module, module: nn.Module, num_rows: int, length: int) -> None:
        self._parallel, self._num_rows, self._length = parallel, num_rows, length
        self._signature = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        for name, one in self._signature.parameters.items():
            if one.kind is one.VAR_KEYWORD:
                given |= given.pop(name, {})
        inputs = self._inputs(given)
        rows, tokens = inputs["input_ids"].shape
        if tokens > self._length:
            raise RunError(
                f"the text has {tokens} tokens, the example {self._length}",
                remedy="give parallelize() an example as long as the longest text, or a smaller max_length",
            )
        settled = {"use_cache": False} if "use_cache" in self._signature.parameters else {}
        found = []
        for start in range(0, rows, self._num_rows):
            group = {name: self._padded(one[start : start + self._num_rows]) for name, one in inputs.items()}
            found.append(self._parallel(**group, **settled))
        output: Any = found[0]
        output.logits = torch.cat([one.logits for one in found])[:rows, :tokens]
        return output

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        for name, value in given.items():
            if name not in (*PADDED, *SETTLED) and value is not None and value is not False:
                raise RunError(f"generate() hands {name} to the forward", remedy=f"leave out what makes it need {name}")
        if given.get("past_key_values") is not None:
            raise RunError("generate() hands a cache to the forward", remedy="leave out past_key_values")
        inputs = {name: given[name] for name in PADDED if given.get(name) is not None}
        if "input_ids" not in inputs:
            raise RunError("generate() hands no input_ids to the forward", remedy="give token ids, not embeddings")
        if "attention_mask" not in inputs and "attention_mask" in self._signature.parameters:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        shape = inputs["input_ids"].shape
        return {name: one.expand(shape) for name, one in inputs.items()}

    def _padded(self, one: Tensor) -> Tensor:
        """As many rows and columns as the example has; what is added is not looked at."""
        rows, tokens = one.shape
        wide = torch.cat([one, one.new_zeros(rows, self._length - tokens)], dim=1)
        return torch.cat([wide, wide[:1].expand(self._num_rows - rows, -1)]) if rows < self._num_rows else wide
