"""Collectives that fail, for the tests of `weft doctor`: functions that a process can find."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

from tests.devices.bodies import on_device
from weft.commands.trials import trial
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.transport import Transport


def wrong(transport: Transport, name: str) -> tuple[Tensor, float]:
    """Rank 1 gets another result than it should."""
    found, took = trial(transport, name)
    if transport.rank == 1:
        found[7] += 1
    return found, took


def deserted(transport: Transport, name: str) -> tuple[Tensor, float]:
    """Rank 1 comes, but not again, and is busy for long."""
    found = trial(transport, name)
    if transport.rank == 1 and name != "processes":
        time.sleep(600)
    return found if name == "processes" else trial(transport, name)


def endless(transport: Transport, name: str) -> tuple[Tensor, float]:
    """Nobody ends, and no transport keeps time."""
    if name != "processes":
        time.sleep(600)
    return torch.zeros(1), 0.0


def killed(transport: Transport, name: str) -> tuple[Tensor, float]:
    """A process goes away."""
    if transport.rank == 1:
        os.kill(os.getpid(), 9)
    return trial(transport, name)


def between_devices(transport: ProcessTransport, name: str) -> tuple[Tensor, float]:
    """As it is, on the transport of devices."""
    device = on_device(transport)
    found = trial(device, name)
    device.close()
    return found
