"""Channel: the collectives of one lane of a process, all carried by one uneven exchange of bytes.

In: tensors and the ranks of a group. Out: the members' tensors, or their sum. How each kind is carried:

    all_to_all      one exchange of everything packed
    all_gather      one exchange, the same tensor to everybody
    all_reduce      two members or little data: everybody's tensor to everybody, added locally in group order;
                    else each member gets its chunk of all tensors, adds it up in group order, and sends it to all;
                    large tensors in blocks, so that one is under way while another is added up (sums.py)
    reduce_scatter  one exchange, then added locally in group order

So sums do not depend on the backend: they are the emulator's, bit for bit, unless the backend sums natively. Every wait
ends: by the result, by time, because another rank failed, or because nothing can come any more. With `check` every call
is preceded by a small exchange of fixed size in which members make sure that they mean the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from weft.runtime.boxes import LARGE, Boxes, Passage
from weft.runtime.far_letters import FarLetters
from weft.runtime.groups import Group, Groups
from weft.runtime.letters import Letters
from weft.runtime.shared_sums import SharedSums
from weft.runtime.signature import NUMBERS, Signature, Words, difference, from_json
from weft.runtime.sums import add_up, combine
from weft.runtime.transport import CollectiveMismatch
from weft.runtime.watch import PeerLost, Watch
from weft.runtime.wire import NOTHING, Want, as_bytes, as_it_lies, num_bytes, pack, unpack

LOOK = timedelta(seconds=0.1)
"""Between two looks at whether a wait is in vain."""
LETTERS = "letters"
"""The lane of what one rank leaves for another."""
KEPT = 64 << 20
"""Bytes of a buffer that is kept for the next call."""


PIECE = 1 << 20
"""Bytes that travel at a time: a longer message takes no more memory on its way."""

Looked = tuple[list[Tensor], Callable[[], None]]


class Channel:
    """Collectives in the order in which they are called here. For one thread at a time.

    Args:
        timeout: seconds that one collective may take.
    """

    def __init__(
        self, groups: Groups, watch: Watch, device: torch.device, *, lane: str, timeout: float, check: bool
    ) -> None:
        self._groups, self._watch, self._device, self._lane = groups, watch, device, lane
        self.timeout, self.check = timeout, check
        self.rank = groups.rank
        self._numbers: dict[Group, int] = {}
        self._scratch: dict[str, Tensor] = {}
        self._boxes: dict[Group, Boxes | None] = {}
        self._letters: Letters | FarLetters | None = None
        self._awaited: tuple[int, str] | None = None
        """Of whom which letter."""
        self._since = 0.0
        self._shared: dict[Group, SharedSums] = {}

    def number(self, group: Group) -> int:
        """How many calls the rank has made in this group before."""
        return self._numbers.get(group, 0)

    @torch.no_grad()
    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], wants: Mapping[int, Sequence[Want]], signature: Signature
    ) -> dict[int, list[Tensor]]:
        """Everybody's tensors to everybody."""
        members = sorted(signature.group)
        with self._entered(signature):
            mine = [sends.get(peer, ()) if peer != self.rank else () for peer in members]
            wanted = [wants.get(peer, ()) if peer != self.rank else () for peer in members]
            found = dict(zip(members, self._exchanged(mine, wanted, signature), strict=True))
        if self.rank in wants:
            found[self.rank] = [tensor.detach().clone() for tensor in sends.get(self.rank, ())]
        return {peer: found[peer] for peer in wants}

    @torch.no_grad()
    def gather(self, tensor: Tensor, signature: Signature) -> list[Tensor]:
        """Everybody's tensor, in group order."""
        with self._entered(signature):
            return self._gather(tensor, signature.group)

    @torch.no_grad()
    def reduce(self, tensor: Tensor, op: str, signature: Signature, *, in_place: bool = False) -> Tensor:
        """The sum of everybody's tensor. `in_place`: in the tensor itself, if it is contiguous."""
        group, backend = signature.group, self._groups.backend
        with self._entered(signature):
            source = tensor.detach().contiguous()
            total = source if in_place and source.data_ptr() == tensor.data_ptr() else torch.empty_like(source)
            if backend.sums_natively(tensor.dtype, op):
                total.copy_(source)
                self.wait(backend.start_sum(self._groups.get(group, self._lane), total, op))
            else:
                add_up(self, source.view(-1), total.view(-1), group, op)
        return total

    @torch.no_grad()
    def reduce_shared(self, flat: Tensor, op: str, signature: Signature) -> Tensor:
        """The sum of everybody's tensor, in the memory that `shared_sums` lent for it."""
        group = signature.group
        with self._entered(signature):
            members = sorted(group)
            self._shared[tuple(members)].add_up(flat, [members.index(peer) for peer in group], op)
        return flat

    def run_shared(self, work: Callable[[SharedSums, Sequence[int]], None], signature: Signature) -> None:
        """What all members do with memory that `shared_sums` lent, given their positions in group order."""
        members = tuple(sorted(signature.group))
        with self._entered(signature):
            work(self._shared[members], [members.index(peer) for peer in signature.group])

    def shared_sums(self, group: Group) -> SharedSums | None:
        """Memory in which these ranks can add up; None if they are not on one host. At first use all of them ask."""
        boxes = self._boxes_of(group) if len(group) > 1 else None
        if boxes is None:
            return None
        members = tuple(sorted(group))
        if members not in self._shared:
            self._shared[members] = SharedSums(boxes)
        return self._shared[members]

    @torch.no_grad()
    def reduce_scatter(self, parts: Sequence[Tensor], op: str, signature: Signature) -> Tensor:
        """The sum of everybody's part for this rank; `parts` are in group order and alike."""
        group = signature.group
        own = parts[group.index(self.rank)]
        by_rank = dict(zip(group, parts, strict=True))
        with self._entered(signature):
            others = [peer for peer in sorted(group) if peer != self.rank]
            boxes = self._boxes_of(group) if others else None
            if boxes is not None and max(part.nbytes for part in parts) < LARGE:
                sent = {peer: by_rank[peer] for peer in others}
                small = self._pass_small(boxes, group, sent, dict.fromkeys(others, _want(own)))
                return combine([small.get(peer, own.detach()) for peer in group], op)
            flat, _ = pack([(by_rank[peer],) for peer in others], self._device, self.scratch)
            sizes = [by_rank[peer].nbytes if peer != self.rank else 0 for peer in sorted(group)]
            wanted = [own.nbytes if peer != self.rank else 0 for peer in sorted(group)]
            came = self.scratch("came", sum(wanted))
            self.begin_carry(came, flat, wanted, sizes, group)()
        found = dict(zip(others, came.view(own.dtype).view(len(others), *own.shape), strict=True))
        return combine([found.get(peer, own.detach()) for peer in group], op)

    def letters(self, num_ranks: int) -> Letters | FarLetters:
        """Letters between all ranks of the job. At first use all of them ask."""
        if self._letters is None:
            pipes = self._groups.pipes(tuple(range(num_ranks)), LETTERS, self._watch.check)
            if pipes is None:
                heads, ways = self._groups.letters(num_ranks, LETTERS)
                self._letters = FarLetters(self.rank, heads, ways, self._device, self._look)
            else:
                self._letters = Letters(pipes, Boxes(self.rank, num_ranks, pipes, self._look), self._look)
        return self._letters

    def post(self, peer: int, tag: str, tensors: Sequence[Tensor], num_ranks: int) -> None:
        """Leave tensors for a rank."""
        self.letters(num_ranks).post(peer, tag, tensors)
        self._watch.posted(self._lane, peer)

    def take(self, peer: int, tag: str, wants: Sequence[Want], num_ranks: int) -> list[Tensor]:
        """What a rank leaves under a tag."""
        self._watch.check()
        self._since, self._awaited = time.monotonic(), (peer, tag)
        self._tell_letter()
        found = self.letters(num_ranks).take(peer, tag, wants)
        self._awaited = None
        self.end()
        return found

    def _tell_letter(self) -> None:
        if self._awaited is not None:
            peer, tag = self._awaited
            came = 0 if self._letters is None else self._letters.num_came(peer)
            self._watch.enter_letter(self._lane, peer, came, f"wait for {tag}")

    def barrier(self, signature: Signature) -> None:
        """Wait for all members."""
        with self._entered(signature):
            self._gather(torch.zeros(1, dtype=torch.uint8, device=self._device), signature.group)

    def _gather(self, tensor: Tensor, group: Group) -> list[Tensor]:
        boxes = self._boxes_of(group) if len(group) > 1 else None
        if boxes is not None and tensor.nbytes < LARGE:
            others = [peer for peer in group if peer != self.rank]
            found = self._pass_small(boxes, group, dict.fromkeys(others, tensor), dict.fromkeys(others, _want(tensor)))
            found[self.rank] = tensor.detach().clone(memory_format=torch.contiguous_format)
            return [found[peer] for peer in group]
        flat, members = as_bytes(tensor), sorted(group)
        sizes = [0 if peer == self.rank else flat.numel() for peer in members]
        came = self._carry(flat, sizes, sizes, group, same=True)
        want = _want(tensor)
        parts = unpack(came, [() if peer == self.rank else (want,) for peer in members])
        by_rank = {peer: tensors[0] for peer, tensors in zip(members, parts, strict=True) if tensors}
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        return [by_rank.get(peer, own) for peer in group]

    def _pass_small(
        self, boxes: Boxes, group: Group, mine: Mapping[int, Tensor], wants: Mapping[int, Want]
    ) -> dict[int, Tensor]:
        """A tensor for each of some members, and one of each of some; all are small, and their time is the calls'."""
        members = sorted(group)
        came = {peer: torch.empty(shape, dtype=dtype, device=self._device) for peer, (shape, dtype) in wants.items()}
        sent = [as_it_lies(mine[peer]) if peer in mine else NOTHING for peer in members]
        boxes.pass_small(sent, [came.get(peer, NOTHING) for peer in members])
        return came

    def _exchanged(
        self, mine: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Want]], signature: Signature
    ) -> list[list[Tensor]]:
        """Tensors for each member, and of each; ranks ascending."""
        group = signature.group
        boxes = self._boxes_of(group) if len(group) > 1 else None
        single = all(len(one) <= 1 for one in (*mine, *wanted))
        sizes = [num_bytes(one) for one in wanted]
        if boxes is not None and single and max(0, *sizes, *(one[0].nbytes for one in mine if one)) < LARGE:
            members = sorted(group)
            sent = {peer: one[0] for peer, one in zip(members, mine, strict=True) if one}
            found = self._pass_small(boxes, group, sent, {p: w[0] for p, w in zip(members, wanted, strict=True) if w})
            return [[found[peer]] if peer in found else [] for peer in members]
        mixed = len({dtype for want in wanted for _, dtype in want}) > 1
        if boxes is None or mixed or not single:
            flat, lengths = pack(mine, self._device, self.scratch)
            return unpack(self._carry(flat, lengths, sizes, group), wanted)
        # single tensors go into the boxes from where they lie
        outgoing = [as_bytes(one[0]) if one else NOTHING for one in mine]
        same = len({(one.data_ptr(), one.numel()) for one in outgoing if one.numel()}) == 1
        # what is gathered comes with a hole for the rank's own, so that it need not be put together elsewhere
        hole = max(one.numel() for one in outgoing) if same and signature.kind == "all_gather" else 0
        position = sorted(group).index(self.rank)
        came = torch.empty(sum(sizes) + hole, dtype=torch.uint8, device=self._device)
        parts = list(came.split([*sizes[:position], hole, *sizes[position + 1 :]]))
        parts[position] = NOTHING
        _in_pieces(boxes, outgoing, parts, same=same)()
        return [unpack(part, [want])[0] for part, want in zip(parts, wanted, strict=True)]

    def _carry(self, flat: Tensor, sizes: list[int], wanted: list[int], group: Group, *, same: bool = False) -> Tensor:
        """One exchange of bytes; sizes per member, ranks ascending. What comes is new memory."""
        came = torch.empty(sum(wanted), dtype=torch.uint8, device=self._device)
        self.begin_carry(came, flat, wanted, sizes, group, same=same)()
        return came

    def begin_carry(
        self, came: Tensor, flat: Tensor, wanted: list[int], sizes: list[int], group: Group, *, same: bool = False
    ) -> Callable[[], None]:
        """Begin one exchange of bytes; what is returned waits for its end.

        Args:
            same: `flat` is one message, for every member that something is for.
        """
        if len(group) == 1:
            came.copy_(flat[: came.numel()])
            return lambda: None
        boxes = self._boxes_of(group)
        if boxes is not None:
            outgoing = [flat[:size] for size in sizes] if same else list(flat.split(sizes))
            return _in_pieces(boxes, outgoing, list(came.split(wanted)), same=same)
        sent = _repeated(flat, sizes) if same else flat
        work = self._groups.get(group, self._lane).alltoall_base(came, sent, wanted, sizes)
        return lambda: self.wait(work)

    def begin_look(self, flat: Tensor, sizes: list[int], group: Group) -> Callable[[], Looked]:
        """Begin to send one message to all other members, of which something of the same size comes.

        What is returned waits for its end, and gives what came from each, ranks ascending, and a function to be called
        after the last look at it."""
        boxes = self._boxes_of(group) if len(group) > 1 else None
        if boxes is not None:
            passage = boxes.begin([flat[:size] for size in sizes], sizes, same=True)
            return lambda: boxes.look(passage)
        came = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        end = self.begin_carry(came, flat, sizes, sizes, group, same=True)

        def look() -> Looked:
            end()
            return list(came.split(sizes)), lambda: None

        return look

    def open(self, group: Group) -> None:
        """Make the way to the members of a group, who all do so."""
        if len(group) > 1 and self._boxes_of(group) is None:
            self._groups.get(group, self._lane)

    def _boxes_of(self, group: Group) -> Boxes | None:
        """Pipes and shared memory with these ranks, if there can be; made at first use, by all of them."""
        members = tuple(sorted(group))
        if members not in self._boxes:
            pipes = self._groups.pipes(members, self._lane, self._look_up)
            position = members.index(self.rank)
            self._boxes[members] = None if pipes is None else Boxes(position, len(members), pipes, self._look)
        return self._boxes[members]

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
        if not self._groups.backend.host_waits:
            work.wait()
            return
        self._since = time.monotonic()
        while True:
            with suppress(RuntimeError):
                work.wait(LOOK)
                return
            if work.is_completed():
                # it may have ended well just after the look was over: only a second look tells
                _settle(work)
                return
            self._look()

    def _look_up(self) -> None:
        """Raises if there is nothing to wait for."""
        self._watch.check()
        if self._letters is not None:
            # somebody may wait for a letter that did not fit into its pipe, and this rank for him
            self._letters.push()

    def _look(self) -> None:
        """Raises if there is nothing to wait for, or no time left to."""
        self._look_up()
        self._tell_letter()
        if time.monotonic() > self._since + self.timeout:
            what = "a collective" if self._awaited is None else "{1} from rank {0}".format(*self._awaited)
            message = f"rank {self.rank} waited {self.timeout:g} s for {what}"
            raise CollectiveMismatch(message, rank=self.rank, waits=self._watch.waits())

    def _entered(self, signature: Signature) -> _Entered:
        group = signature.group
        self._watch.check()
        if self.rank not in group:
            message = f"rank {self.rank} entered a collective of group {group}, which it is not in"
            raise CollectiveMismatch(message, rank=self.rank, waits={self.rank: f"is in {signature}"})
        self._numbers[group] = signature.number + 1
        return _Entered(self, signature)

    def begin(self, signature: Signature) -> None:
        """Before a call's own bytes: tell the watch, and agree with the members if calls are checked."""
        self._since = time.monotonic()
        self._watch.enter(self._lane, signature.group, signature.number, signature)
        if not self.check:
            return
        members, words = sorted(signature.group), signature.words
        mine = torch.tensor([words.numbers(peer) for peer in members], dtype=torch.int64, device=self._device)
        each = [NUMBERS * mine.itemsize] * len(members)
        theirs = self._carry(as_bytes(mine), each, each, signature.group).view(torch.int64).view(-1, NUMBERS).tolist()
        apart = [p for p, found in zip(members, theirs, strict=True) if p != self.rank and not words.fits(p, found)]
        if apart:
            self._refuse(words, apart[0])

    def _refuse(self, mine: Words, other: int) -> None:
        """Find out what the other meant, and raise."""
        self._watch.say(f"clash/{self.rank}", json.dumps(mine.as_json()))
        heard = self._watch.hear(f"clash/{other}")
        message = f"ranks {self.rank} and {other} entered different collectives, in {mine.where}"
        if heard:
            message = difference(self.rank, mine, other, from_json(json.loads(heard)))
        raise CollectiveMismatch(message, rank=self.rank, waits=self._watch.waits())

    def memory(self) -> list[Tensor]:
        """What is held for what travels; gradients that are summed where they lie are among it."""
        boxes = [one for each in filter(None, self._boxes.values()) for one in each.memory()]
        sums = [one for each in self._shared.values() for one in each.memory()]
        letters = self._letters.memory() if isinstance(self._letters, Letters) else []
        return [*self._scratch.values(), *boxes, *sums, *letters]

    def close(self) -> None:
        """There will be no further call."""
        if self._letters is not None:
            self._letters.close()
            self._letters = None
        for shared in self._shared.values():
            shared.close()
        for boxes in filter(None, self._boxes.values()):
            boxes.close()
        self._shared, self._boxes = {}, {}

    def end(self) -> None:
        """After a call."""
        self._watch.leave(self._lane)


class _Entered:
    """A call from its entry to its result. If it fails the call stays entered: that is what the rank was doing."""

    def __init__(self, channel: Channel, signature: Signature) -> None:
        self._channel, self._signature = channel, signature

    def __enter__(self) -> None:
        self._channel.begin(self._signature)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._channel.end()


def _in_pieces(boxes: Boxes, outgoing: list[Tensor], incoming: list[Tensor], *, same: bool) -> Callable[[], None]:
    """Begin an exchange in which long messages travel in pieces, one under way while another is taken out.

    Members need not agree on how many there are: each pair has as many as its message is long."""
    longest = max(tensor.numel() for tensor in (*outgoing, *incoming))

    def begun(start: int) -> Passage:
        some = [tensor[start : start + PIECE] for tensor in incoming]
        sent = [tensor[start : start + PIECE] for tensor in outgoing]
        return boxes.begin(sent, [tensor.numel() for tensor in some], some, same=same)

    first = begun(0)

    def end() -> None:
        last = first
        for start in range(PIECE, longest, PIECE):
            following = begun(start)
            boxes.finish(last)
            last = following
        boxes.finish(last)

    return end


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


def _want(tensor: Tensor) -> Want:
    return tuple(tensor.shape), tensor.dtype
