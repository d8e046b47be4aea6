"""Inbox: what has been posted for a rank and was not yet taken. The bookkeeping of every mailbox.

In: posts, by sender and tag. Out: for each request the first post of that sender under that tag.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

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
