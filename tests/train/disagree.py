"""What ranks of processes do that do not do the same; each writes down what it met."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.train.eager import adamw
from weft.errors import WeftError
from weft.runtime.links.processes import ProcessTransport
from weft.train.opened import open_rank


class Over(Exception):
    pass


def goes_on_after_an_error(transport: ProcessTransport, given: tuple[Any, Any, Any, str, str]) -> None:
    """Rank 1 does something else in one step, catches what that raises, and takes the next batch."""
    files, model, batch, what, folder = given
    parallel = open_rank(files, transport, model)
    optimizer, found = adamw(parallel), []

    def prepare() -> None:
        if transport.rank == 1 and step == 1 and what == "raises":
            raise ValueError("of the user's own")
        if transport.rank == 1 and step == 1 and what == "edits":
            for one in parallel.parameters():
                if one.grad is not None:
                    one.grad.mul_(0.5)

    for step in range(3):
        fed = (
            {name: one[:, :-1] for name, one in batch.items()}
            if (what, step, transport.rank) == ("shape", 1, 1)
            else batch
        )
        start = time.monotonic()
        try:
            parallel.train_step(fed, optimizer, prepare=prepare)
        except Exception as error:  # noqa: BLE001 - it is what is looked at
            found.append(f"{step} {isinstance(error, WeftError)} {time.monotonic() - start < 10} {error}")
    Path(folder, str(transport.rank)).write_text("\n".join(found))
    # a process that has gone is noticed before what it said is read
    time.sleep(1.0)
    raise Over


def edits_some(transport: ProcessTransport, given: tuple[Any, Any, Any, bool]) -> dict[str, Any]:
    """Every rank changes the gradient of one parameter alone, in place or by another one; what comes of it."""
    files, model, batch, in_place = given
    parallel = open_rank(files, transport, model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel.forward_backward(batch)
        halve(dict(parallel.named_parameters()), step, in_place)
        optimizer.step()
    return parallel.full_state_dict()


def halve(parameters: dict[str, Any], step: int, in_place: bool) -> None:
    """Each parameter in its turn."""
    one = parameters[list(parameters)[step]]
    if in_place:
        one.grad.mul_(0.5)
    else:
        one.grad = one.grad * 0.5


def leaves_out(transport: ProcessTransport, given: tuple[Any, Any, Any, str, str]) -> None:
    """Rank 1 leaves out what follows the forward, or the update, of one step, and goes on; until all are told."""
    files, model, batch, what, folder = given
    parallel = open_rank(files, transport, model)
    optimizer, start = adamw(parallel), time.monotonic()
    told = "nothing"
    for step in range(1000):
        try:
            optimizer.zero_grad()
            loss = parallel(**batch)
            if (transport.rank, step, what) == (1, 3, "backward"):
                continue
            loss.backward()
            if (transport.rank, step, what) == (1, 3, "update"):
                continue
            optimizer.step()
            time.sleep(0.01)
        except WeftError as error:
            told = f"{time.monotonic() - start < 10} {error}"
            break
    Path(folder, str(transport.rank)).write_text(told)
    time.sleep(1.0)
    raise Over


def errors_of_all(transport: ProcessTransport, given: tuple[Any, Any, Any]) -> list[str]:
    """Every rank is refused the same, and goes on; the first batches of evaluation differ."""
    files, model, batch = given
    parallel = open_rank(files, transport, model, make_files=lambda wanted: files)
    optimizer, found = adamw(parallel), []
    other = {name: one + transport.rank for name, one in batch.items()}
    for fed in (batch, {name: one[:, :-1] for name, one in batch.items()}, batch):
        try:
            parallel.train_step(fed, optimizer)
        except WeftError as error:
            found.append(error.message)
    with torch.no_grad():
        try:
            parallel.eval()(**other)
        except WeftError as error:
            found.append(error.message)
        parallel(**batch)
    return found


def replicas(transport: ProcessTransport, given: tuple[Any, Any, Any, bool]) -> list[str]:
    """What is warned of while two replicas train, on the same batches or on their own."""
    files, model, batch, alike = given
    parallel = open_rank(files, transport, model)
    optimizer = adamw(parallel)
    fed = batch if alike else {name: one + transport.rank for name, one in batch.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            parallel.train_step(fed, optimizer)
    return [str(one.message) for one in caught]


def none_at_first(transport: ProcessTransport, given: tuple[Any, Any, Any]) -> dict[str, Any]:
    """The second replica has no batch in the first step; the weights after two."""
    files, model, batch = given
    parallel = open_rank(files, transport, model)
    optimizer = adamw(parallel)
    parallel.train_step(None if parallel.replica else batch, optimizer)
    parallel.train_step(batch, optimizer)
    return parallel.local_state_dict()


def drifts(transport: ProcessTransport, given: tuple[Any, Any, Any]) -> list[str]:
    """Rank 1 scales a weight after a step in which ranks compare, and all evaluate and save."""
    files, model, batch = given
    parallel = open_rank(files, transport, model, make_files=lambda wanted: files)
    optimizer, found = adamw(parallel), []
    for _ in range(6):
        parallel.train_step(batch, optimizer)
    next(iter(parallel.parameters())).data.mul_(1.0 + 0.1 * transport.rank)
    for call in (lambda: parallel.eval()(**batch), parallel.full_state_dict):
        try:
            call()
        except WeftError as error:
            found.append(error.message)
    return found
