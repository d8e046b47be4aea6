"""Share: all that one rank needs to train for two steps, and that training.

In: a rank's Script and its parts of the tensors. Out: what it computed, by the interpreter of Scripts, which can tell
what every op made; the same training through generated code is `generated.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from weft.ir.graph import Graph
from weft.runtime.interpret import Rank
from weft.runtime.random import Stream
from weft.runtime.script import Script
from weft.runtime.several import with_empties
from weft.runtime.transfers import take
from weft.runtime.transport import Transport
from weft.verify.compare import Noise, Sample, noise_in
from weft.verify.model_file import Optimizer
from weft.verify.precision import Float64Mode
from weft.verify.reference import NUM_STEPS


@dataclass(frozen=True)
class Whole:
    """Whole tensors before the first step, by tensor name of the Graph."""

    state: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    trained: tuple[str, ...]
    """Trained parameters, in the order of `module.parameters()`."""
    names: Mapping[str, str]
    """The name under which the reference knows each parameter and buffer."""

    def every(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors with their names in the Graph."""
        yield from self.state.items()
        yield from self.inputs.items()


@dataclass(frozen=True)
class Share:
    """One rank's part of a comparison.

    Args:
        state, inputs: its parts of parameters, buffers and constants, and of the batch.
        dtypes: of all tensors that no op makes, whether or not the rank holds a part.
        trained: parameters in the order of `module.parameters()`; dims: how many dims they have.
        kept: tensors to report in the end.
        wide: in float64 throughout.
        noise: per step, its parts of what the updates take as zero, by tensor name; none if empty.
    """

    script: Script
    state: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    trained: tuple[str, ...]
    dims: frozenset[int]
    kept: frozenset[str]
    loss: str
    seed: int
    wide: bool
    noise: tuple[Mapping[str, Noise], ...] = ()


@dataclass(frozen=True)
class Local:
    """What one rank computed."""

    losses: tuple[torch.Tensor, ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    weights: Mapping[str, torch.Tensor]


def make_shares(
    whole: Whole,
    scripts: Sequence[Script],
    graph: Graph,
    *,
    seed: int,
    wide: bool,
    reference: Sample | None = None,
) -> Iterator[Share]:
    """One Share per rank, with copies of the parts that it stores.

    Args:
        reference: what the eager module computed, if the updates are to take its rounding as zero too.
    """
    noise = () if reference is None else tuple(map(noise_in, reference.gradients))
    dtypes = {name: tensor.dtype for name, tensor in graph.tensors.items() if name not in graph.producers}
    for mine in scripts:
        yield Share(
            script=mine,
            state=parts_of(whole.state, mine),
            inputs=parts_of(whole.inputs, mine),
            dtypes=dtypes,
            trained=whole.trained,
            dims=frozenset(whole.state[name].dim() for name in whole.trained),
            kept=frozenset(whole.names),
            loss=str(graph.loss),
            seed=seed,
            wide=wide,
            noise=tuple(_noise_of(step, whole.names, mine) for step in noise),
        )


def _noise_of(noise: Mapping[str, Noise], names: Mapping[str, str], mine: Script) -> dict[str, Noise]:
    """This rank's parts of the noise, by tensor name of the Graph."""
    found = {}
    for tensor, name in names.items():
        if name in noise and tensor in mine.stored:
            where = take(noise[name].where, mine.stored[tensor]).clone()
            if bool(where.any()):
                found[tensor] = Noise(where, noise[name].below)
    return found


def parts_of(whole: Mapping[str, torch.Tensor], mine: Script) -> dict[str, torch.Tensor]:
    """This rank's own copies of its parts."""
    return {
        name: take(tensor, mine.stored[name]).clone(memory_format=torch.contiguous_format)
        for name, tensor in whole.items()
        if name in mine.stored
    }


def train(share: Share, transport: Transport, optimizer: Optimizer) -> Local:
    """Two optimizer steps of one rank over the parts that it stores."""
    with Float64Mode() if share.wide else nullcontext():
        return _train(share, transport, optimizer)


def _train(share: Share, transport: Transport, optimizer: Optimizer) -> Local:
    state = dict(share.state)
    trained = {name: nn.Parameter(state[name]) for name in share.trained if name in state}
    state.update({name: parameter.data for name, parameter in trained.items()})
    update = optimizer(with_empties(list(trained.values()), share.dims)) if trained else None
    # the state is read anew at every forward
    runner = Rank(share.script, transport, state=state, dtypes=share.dtypes)
    losses, gradients = [], []
    for step in range(NUM_STEPS):
        # an op may write to its input: each step has its own
        inputs = {name: tensor.clone() for name, tensor in share.inputs.items()}
        outputs = runner.forward(inputs, Stream(share.seed, step, 0))
        losses.append(outputs[share.loss].clone())
        found = runner.backward()
        noise = share.noise[step] if share.noise else {}
        for name, parameter in trained.items():
            parameter.grad = noise[name].silence(found[name]) if name in noise and name in found else found.get(name)
        gradients.append({name: gradient.clone() for name, gradient in found.items()})
        if update is not None:
            update.step()
        state.update(runner.updates())
        state.update({name: parameter.data for name, parameter in trained.items()})
    kept = {name: tensor.detach().clone() for name, tensor in state.items() if name in share.kept}
    return Local(losses=tuple(losses), gradients=tuple(gradients), weights=kept)
