"""Inbox: what has been posted for a rank and was not yet taken. The bookkeeping of every mailbox.

In: posts, by sender and tag. Out: for each request the first post of that sender under that tag. What a rank posts for
itself travels by no mailbox: `OwnPosts` keeps it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Inbox(Generic[T]):
    """The posts for one rank."""

    def __init__(self) -> None:
        self._posts: dict[tuple[int, Hashable], deque[T]] = {}
        self.counts: Counter[int] = Counter()
        """How many have come from each sender so far."""

    def put(self, sender: int, tag: Hashable, post: T) -> None:
        self._posts.setdefault((sender, tag), deque()).append(post)
        self.counts[sender] += 1

    def has(self, sender: int, tag: Hashable) -> bool:
        return (sender, tag) in self._posts

    def pop(self, sender: int, tag: Hashable) -> T:
        """The first post under a tag, which must be there."""
        waiting = self._posts[sender, tag]
        found = waiting.popleft()
        if not waiting:
            del self._posts[sender, tag]
        return found


class OwnPosts:
    """What a rank has posted for itself."""

    def __init__(self) -> None:
        self._posts = Inbox[list[Tensor]]()

    def leave(self, tag: str, tensors: Sequence[Tensor]) -> None:
        """Keep copies."""
        copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        self._posts.put(0, tag, copies)

    def fetch(self, tag: str) -> list[Tensor]:
        """What was left under a tag."""
        assert self._posts.has(0, tag), f"a rank takes {tag} from itself before it posts it"
        return self._posts.pop(0, tag)
