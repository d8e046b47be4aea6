"""Channel: the collectives of one lane of a process, all carried by one uneven exchange of bytes.

In: tensors and the ranks of a group. Out: the members' tensors, or their sum. How each kind is carried:

    all_to_all      one exchange of everything packed; gathers are such
    all_reduce      two members or little data: everybody's tensor to everybody, added locally in group order;
                    else each member gets its chunk of all tensors, adds it up in group order, and sends it to all;
                    large tensors in blocks, so that one is under way while another is added up (sums.py)

So sums do not depend on the backend: they are the emulator's, bit for bit. Every wait
ends: by the result, by time, because another rank failed, or because nothing can come any more. With `check` every call
is preceded by a small exchange of fixed size in which members make sure that they mean the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.runtime.links.groups import Groups
from weft.runtime.links.p2p_mailbox import P2PMailbox
from weft.runtime.links.signature import EMPTY, NUMBERS, Signature, Words, difference
from weft.runtime.links.sums import add_up
from weft.runtime.links.transport import CollectiveMismatch, Expected, Expects, Group, PeerLost, Sends
from weft.runtime.links.wire import LARGE, NOTHING, as_bytes, as_it_lies, num_bytes, pack, unpack
from weft.runtime.watch.calls import Calls

if TYPE_CHECKING:
    from weft.runtime.shm.collectives import Work
    from weft.runtime.shm.mailbox import ShmMailbox
    from weft.runtime.shm.pool import SharedPool
    from weft.runtime.shm.segments import Segments

LOOK = timedelta(seconds=0.1)
"""Between two looks at whether a wait is in vain."""
MESSAGES = "messages"
"""The lane of what one rank leaves for another."""
KEPT = 64 << 20
"""Bytes of a buffer that is kept for the next call."""

Looked = tuple[list[Tensor], Callable[[], None]]


class Channel:
    """Collectives in the order in which they are called here. For one thread at a time."""

    def __init__(self, groups: Groups, calls: Calls, device: torch.device, *, lane: str, check: bool) -> None:
        self._groups, self._device, self._lane = groups, device, lane
        self._calls, self._watch = calls, calls.watch
        self.rank, self.check = groups.rank, check
        self._numbers: dict[Group, int] = {}
        self._scratch: dict[str, Tensor] = {}
        self._segments: dict[Group, Segments | None] = {}
        self._mailbox: ShmMailbox | P2PMailbox | None = None
        self._awaited: tuple[int, str] | None = None
        """Of whom which message."""
        self._pools: dict[Group, SharedPool] = {}

    @torch.no_grad()
    def exchange(self, sends: Sends, expects: Expects, group: Group, kind: str) -> dict[int, list[Tensor]]:
        """Everybody's tensors to everybody."""
        members = sorted(group)
        self._enter(kind, group, sends=sends, expects=expects)
        mine = [sends.get(peer, ()) if peer != self.rank else () for peer in members]
        wanted = [expects.get(peer, ()) if peer != self.rank else () for peer in members]
        found = dict(zip(members, self._exchanged(mine, wanted, group, kind), strict=True))
        self._leave()
        if self.rank in expects:
            found[self.rank] = [tensor.detach().clone() for tensor in sends.get(self.rank, ())]
        return {peer: found[peer] for peer in expects}

    @torch.no_grad()
    def reduce(self, tensor: Tensor, op: str, group: Group, *, in_place: bool = False) -> Tensor:
        """The sum of everybody's tensor. `in_place`: in the tensor itself, if it is contiguous."""
        self._enter(f"all_reduce({op})", group, alike=tensor)
        source = tensor.detach().contiguous()
        total = source if in_place and source.data_ptr() == tensor.data_ptr() else torch.empty_like(source)
        add_up(self, source.view(-1), total.view(-1), group, op)
        self._leave()
        return total

    def run_shared(self, work: Work, kind: str, alike: Tensor, group: Group) -> None:
        """What all members do with memory of their pools."""
        self._enter(kind, group, alike=alike)
        members = sorted(group)
        work([members.index(peer) for peer in group])
        self._leave()

    def pool(self, group: Group) -> SharedPool | None:
        """Memory that these ranks see; None if they are not on one host. At first use all of them ask."""
        segments = self._segments_of(group) if len(group) > 1 else None
        if segments is None:
            return None
        members = tuple(sorted(group))
        if members not in self._pools:
            from weft.runtime.shm.pool import SharedPool  # noqa: PLC0415 - loaded where it is used only

            self._pools[members] = SharedPool(segments)
        return self._pools[members]

    def mailbox(self) -> ShmMailbox | P2PMailbox:
        """The mailbox of all ranks of the job. At first use all of them ask."""
        if self._mailbox is None:
            num_ranks, messages = self._watch.num_ranks, None
            everybody = tuple(range(num_ranks))
            with self._calls.opening(self._lane, everybody):
                pipes = self._groups.pipes(everybody, MESSAGES, self._watch.check, self._calls.gone)
                if pipes is None:
                    messages = self._groups.messages(num_ranks, MESSAGES)
            if pipes is None:
                self._mailbox = P2PMailbox(self.rank, messages, self._device, self._look)
            else:
                from weft.runtime.shm.mailbox import ShmMailbox  # noqa: PLC0415 - loaded where it is used only
                from weft.runtime.shm.segments import Segments  # noqa: PLC0415

                segments = Segments(self.rank, num_ranks, pipes, self._look, most=math.inf)
                self._mailbox = ShmMailbox(pipes, segments, self._look)
        return self._mailbox

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor]) -> None:
        """Leave tensors for a rank."""
        self.mailbox().post(peer, tag, tensors)
        self._calls.posted(self._lane, peer)

    def take(self, peer: int, tag: str, wants: Sequence[Expected]) -> list[Tensor]:
        """What a rank leaves under a tag."""
        self._watch.check()
        self._awaited = peer, tag
        self._tell_message()
        found = self.mailbox().take(peer, tag, wants)
        self._awaited = None
        self._leave()
        return found

    def _tell_message(self) -> None:
        if self._awaited is not None:
            peer, tag = self._awaited
            came = 0 if self._mailbox is None else self._mailbox.num_came(peer)
            self._calls.enter_message(self._lane, peer, came, f"wait for {tag}")

    def _exchanged(
        self, mine: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Expected]], group: Group, kind: str
    ) -> list[list[Tensor]]:
        """Tensors for each member, and of each; ranks ascending."""
        segments = self._segments_of(group) if len(group) > 1 else None
        single = all(len(one) <= 1 for one in (*mine, *wanted))
        sizes = [num_bytes(one) for one in wanted]
        if segments is not None and single and max(0, *sizes, *(one[0].nbytes for one in mine if one)) < LARGE:
            # their time is the calls'
            found = [[torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in one] for one in wanted]
            sent = [as_it_lies(one[0]) if one else NOTHING for one in mine]
            segments.pass_small(sent, [one[0] if one else NOTHING for one in found])
            return found
        mixed = len({dtype for want in wanted for _, dtype in want}) > 1
        if segments is None or mixed or not single:
            flat, lengths = pack(mine, self._device, self.scratch)
            came = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            self.begin_carry(came, flat, sizes, lengths, group)()
            return unpack(came, wanted)
        # single tensors go into the segments from where they lie
        outgoing = [as_bytes(one[0]) if one else NOTHING for one in mine]
        same = len({(one.data_ptr(), one.numel()) for one in outgoing if one.numel()}) == 1
        # what is gathered comes with a hole for the rank's own, so that it need not be put together elsewhere
        hole = max(one.numel() for one in outgoing) if same and kind == "all_gather" else 0
        position = sorted(group).index(self.rank)
        came = torch.empty(sum(sizes) + hole, dtype=torch.uint8, device=self._device)
        parts = list(came.split([*sizes[:position], hole, *sizes[position + 1 :]]))
        parts[position] = NOTHING
        segments.carry(outgoing, parts, same=same)()
        return [unpack(part, [want])[0] for part, want in zip(parts, wanted, strict=True)]

    def begin_carry(
        self, came: Tensor, flat: Tensor, wanted: list[int], sizes: list[int], group: Group, *, same: bool = False
    ) -> Callable[[], None]:
        """Begin one exchange of bytes, sizes per member, ranks ascending; what is returned waits for its end.

        Args:
            same: `flat` is one message, for every member that something is for.
        """
        if len(group) == 1:
            came.copy_(flat[: came.numel()])
            return lambda: None
        segments = self._segments_of(group)
        if segments is not None:
            outgoing = [flat[:size] for size in sizes] if same else list(flat.split(sizes))
            return segments.carry(outgoing, list(came.split(wanted)), same=same)
        sent = _repeated(flat, sizes) if same else flat
        work = self._groups.get(group, self._lane).alltoall_base(came, sent, wanted, sizes)
        return lambda: self.wait(work)

    def begin_look(self, flat: Tensor, sizes: list[int], group: Group) -> Callable[[], Looked]:
        """Begin to send one message to all other members, of which something of the same size comes.

        What is returned waits for its end, and gives what came from each, ranks ascending, and a function to be called
        after the last look at it."""
        segments = self._segments_of(group) if len(group) > 1 else None
        if segments is not None:
            passage = segments.begin([flat[:size] for size in sizes], sizes, same=True)
            return lambda: segments.look(passage)
        came = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        end = self.begin_carry(came, flat, sizes, sizes, group, same=True)

        def look() -> Looked:
            end()
            return list(came.split(sizes)), lambda: None

        return look

    def open(self, group: Group) -> None:
        """Make the way to the members of a group, who all do so."""
        if len(group) > 1 and self._segments_of(group) is None:
            with self._calls.opening(self._lane, tuple(sorted(group))):
                self._groups.get(group, self._lane)

    def _segments_of(self, group: Group) -> Segments | None:
        """Pipes and shared memory with these ranks, if there can be; made at first use, by all of them."""
        members = tuple(sorted(group))
        if members not in self._segments:
            with self._calls.opening(self._lane, members):
                pipes = self._groups.pipes(members, self._lane, self._look, self._calls.gone)
            self._segments[members] = None
            if pipes is not None:
                from weft.runtime.shm.segments import Segments  # noqa: PLC0415 - loaded where it is used only

                self._segments[members] = Segments(members.index(self.rank), len(members), pipes, self._look)
        return self._segments[members]

    def scratch(self, name: str, size: int) -> Tensor:
        """Memory to be used again: new memory costs more than the bytes that travel through it."""
        if size > KEPT:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        held = self._scratch.get(name)
        if held is None or held.numel() < size:
            held = self._scratch[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return held[:size]

    def wait(self, work: Any) -> None:
        """Wait for the backend, looking up now and then."""
        while True:
            with suppress(RuntimeError):
                work.wait(LOOK)
                return
            if work.is_completed():
                # it may have ended well just after the look was over: only a second look tells
                _settle(work)
                return
            self._look()

    def _look(self) -> None:
        """Raises if there is nothing to wait for, or no time left to."""
        self._watch.check()
        if self._mailbox is not None:
            # somebody may wait for a message that did not fit into its pipe, and this rank for him
            self._mailbox.push()
        self._tell_message()

    def _enter(
        self, kind: str, group: Group, *, alike: Tensor | None = None, sends: Sends = EMPTY, expects: Expects = EMPTY
    ) -> None:
        """Before a call's own bytes: tell the watch, and agree with the members if calls are checked.

        If the call fails it stays entered: that is what the rank was doing."""
        number = self._numbers.get(group, 0)
        signature = Signature(kind, group, number, alike=alike, sends=sends, expects=expects)
        self._watch.check()
        if self.rank not in group:
            message = f"rank {self.rank} entered a collective of group {group}, which it is not in"
            raise CollectiveMismatch(message, rank=self.rank, waits={self.rank: f"is in {signature}"})
        self._numbers[group] = number + 1
        self._calls.enter(self._lane, group, number, signature)
        if self.check:
            self._agree(signature.words)

    def _leave(self) -> None:
        """After a call."""
        self._calls.leave(self._lane)

    def _agree(self, words: Words) -> None:
        """Make sure that all members mean the same."""
        members = sorted(words.group)
        mine = [[torch.tensor(words.numbers(peer), dtype=torch.int64, device=self._device)] for peer in members]
        wanted = [[((NUMBERS,), torch.int64)]] * len(members)
        for peer, (found,) in zip(members, self._exchanged(mine, wanted, words.group, "check"), strict=True):
            if peer != self.rank and not words.fits(peer, found.tolist()):
                self._refuse(words, peer)

    def _refuse(self, mine: Words, other: int) -> None:
        """Find out what the other meant, and raise."""
        self._watch.say(f"clash/{self.rank}", mine.to_json())
        heard = self._watch.hear(f"clash/{other}")
        message = f"ranks {self.rank} and {other} entered different collectives, in {mine.where}"
        if heard:
            message = difference(self.rank, mine, other, Words.from_json(heard)) or message
        raise CollectiveMismatch(message, rank=self.rank, waits=self._watch.waits())

    def memory(self) -> list[Tensor]:
        """What is held for what travels; gradients that are summed where they lie are among it."""
        segments = [one for each in filter(None, self._segments.values()) for one in each.memory()]
        sums = [one for each in self._pools.values() for one in each.memory()]
        messages = [] if self._mailbox is None else self._mailbox.memory()
        return [*self._scratch.values(), *segments, *sums, *messages]

    def close(self) -> None:
        """There will be no further call."""
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None
        for pool in self._pools.values():
            pool.close()
        for segments in filter(None, self._segments.values()):
            segments.close()
        self._pools, self._segments = {}, {}


def _repeated(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """One message for each member that something is for."""
    copies = sum(size > 0 for size in sizes)
    return flat if copies == 1 else flat.repeat(copies)


def _settle(work: Any) -> None:
    """The outcome of work that is over."""
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLost(str(error).partition(". This is typically")[0]) from error
