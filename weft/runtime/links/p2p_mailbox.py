"""P2P mailbox: what one process posts for another, where they are not of one host, by the backend's point to point.

In: tensors, a rank and a tag. Out: at that rank, when it asks for the tag, the tensors. A message is a head of fixed
size, which tells its tag and its length, and a body. Messages of one rank for another travel in the order of posting;
those that come before they are asked for are kept. They travel by gloo: a thread for each rank that something is left
for, and one for each that something was asked of, send and receive them (gloo's point to point can be waited for, but
neither asked nor waited for with a limit: that would close all its connections).

Promised: nobody waits to send; a rank that is gone ends the wait for its messages at once.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from weft.runtime.links.inbox import Inbox
from weft.runtime.links.transport import Expected, PeerLost
from weft.runtime.links.wire import as_bytes, num_bytes, unpack

HEAD = struct.Struct("<16sqq")
"""Digest of the tag, bytes of the body, and whether it is a message or the word that no more will come."""
LAST = 5.0
"""Seconds that an ending rank waits for what it has posted to arrive."""
LOOK = 0.1
"""Seconds between two looks at whether a wait is in vain."""
HEADS, BODIES = 1, 2
"""Tags of gloo's."""


class P2PMailbox:
    """The messages of one rank. Calls are for one thread at a time.

    Args:
        heads: a gloo group of all ranks, for these messages alone.
        look: called while waiting; raises if that is in vain.
    """

    def __init__(self, rank: int, heads: Any, device: torch.device, look: Callable[[], None]) -> None:
        self._rank, self._heads, self._device, self._look = rank, heads, device, look
        self._changed = threading.Condition()
        self._inbox = Inbox[Tensor]()
        self._lost: dict[int, str | None] = {}
        """Of each rank that posts come from, why no more will come."""
        self._takers: dict[int, _Taker] = {}

    @torch.no_grad()
    def post(self, to: int, tag: str, tensors: Sequence[Tensor]) -> None:
        """Leave tensors for a rank."""
        parts = [as_bytes(tensor) for tensor in tensors]
        # always a copy: whoever posts may go on writing
        body = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=self._device)
        digest = _digest(tag)
        if to not in self._takers:
            self._takers[to] = _Taker(self._heads, self._rank, to)
        self._takers[to].put(HEAD.pack(digest, body.numel(), 1), body)

    @torch.no_grad()
    def take(self, sender: int, tag: str, wants: Sequence[Expected]) -> list[Tensor]:
        """What a rank left under a tag."""
        digest, size = _digest(tag), num_bytes(wants)
        body = self._wait(sender, digest)
        assert body.numel() == size, f"{tag} has {body.numel()} bytes, {size} were expected"
        return unpack(body, [wants])[0]

    def num_came(self, sender: int) -> int:
        """How many messages have come from a rank so far."""
        return self._inbox.counts[sender]

    def push(self) -> None:
        """Raise if something that was left cannot arrive any more."""
        for taker in self._takers.values():
            taker.check()

    def memory(self) -> list[Tensor]:
        """What is held for messages: nothing that is used again."""
        return []

    def close(self) -> None:
        """There will be no further message; wait a while for those under way."""
        until = time.monotonic() + LAST
        for taker in self._takers.values():
            taker.close()
        for taker in self._takers.values():
            taker.join(max(0.0, until - time.monotonic()))
        self._takers = {}

    def _wait(self, sender: int, digest: bytes) -> Tensor:
        if sender not in self._lost:
            self._lost[sender] = None
            name = f"rank {self._rank} receives from rank {sender}"
            threading.Thread(target=self._receive, args=(sender,), name=name, daemon=True).start()
        while True:
            with self._changed:
                if self._inbox.has(sender, digest):
                    return self._inbox.pop(sender, digest)
                lost = self._lost[sender]
                if lost is None and self._changed.wait(LOOK):
                    continue
            self._look()
            if lost is not None:
                raise PeerLost(f"rank {sender}, from which a message was to come, has gone: {lost}")

    def _receive(self, sender: int) -> None:
        """The life of a thread that receives from one rank."""
        head = torch.empty(HEAD.size, dtype=torch.uint8)
        try:
            while True:
                self._heads.recv([head], sender, HEADS).wait()
                digest, size, more = HEAD.unpack(bytes(head.tolist()))
                if not more:
                    break
                body = torch.empty(size, dtype=torch.uint8, device=self._device)
                if size:
                    self._heads.recv([body], sender, BODIES).wait()
                with self._changed:
                    self._inbox.put(sender, digest, body)
                    self._changed.notify_all()
            reason = "it has ended"
        except RuntimeError as error:
            reason = _reason(error)
        with self._changed:
            self._lost[sender] = reason
            self._changed.notify_all()


class _Taker:
    """A thread that sends to one rank."""

    def __init__(self, heads: Any, rank: int, to: int) -> None:
        self._heads, self._to = heads, to
        self._queue: SimpleQueue[tuple[bytes, Tensor | None]] = SimpleQueue()
        self._lost: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"rank {rank} sends to rank {to}", daemon=True)
        self._thread.start()

    def put(self, head: bytes, body: Tensor | None) -> None:
        self.check()
        self._queue.put((head, body))

    def check(self) -> None:
        if self._lost is not None:
            raise PeerLost(f"rank {self._to}, for which a message was left, has gone: {self._lost}")

    def close(self) -> None:
        """Say that no more will come."""
        self._queue.put((HEAD.pack(bytes(16), 0, 0), None))

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        more = True
        try:
            while more:
                head, body = self._queue.get()
                more = bool(HEAD.unpack(head)[2])
                self._heads.send([torch.frombuffer(bytearray(head), dtype=torch.uint8)], self._to, HEADS).wait()
                if body is not None and body.numel():
                    self._heads.send([body], self._to, BODIES).wait()
        except RuntimeError as error:
            self._lost = _reason(error)


def _digest(tag: str) -> bytes:
    return hashlib.blake2b(tag.encode(), digest_size=16).digest()


def _reason(error: RuntimeError) -> str:
    return str(error).partition(". This is typically")[0]
