"""Which call carries a gather: all members decide alike, whatever each of them sees of it."""

from __future__ import annotations

import pytest
import torch

from tests.devices.in_process import Recorder, run_ranks
from tests.devices.stream_order import faults
from weft.runtime.layout.cuts import Cut, Place
from weft.runtime.layout.execute import execute
from weft.runtime.layout.moves import all_gather
from weft.runtime.layout.transfer import Index, Piece, Transfer
from weft.runtime.links.emulator import run_ranks as emulated
from weft.runtime.links.transport import Transport

GROUP = (0, 1, 2)
PAIR: Index = (((0, 2),),)
ENDS: Index = (((0, 1), (3, 4)),)


def irregular(rank: int, sent: dict[tuple[int, int], list[Index]]) -> Transfer:
    """A gather from a program's tables: what each sends each, laid end to end by sender."""
    receives, at = [], 0
    for peer in GROUP:
        for _ in sent.get((peer, rank), ()):
            receives.append(Piece(peer, 0, (((at, at + 2),),)))
            at += 2
    sends = [Piece(peer, 0, index) for peer in GROUP for index in sent.get((rank, peer), ())]
    return Transfer("all_gather", GROUP, tuple(sends), tuple(receives), ((at,),))


PAIRS = {(sender, taker): [PAIR] for sender in GROUP for taker in GROUP}
IRREGULAR = {
    "a member cuts what it sends out of two places": PAIRS | {(1, taker): [ENDS] for taker in GROUP},
    "two members have more for each other": PAIRS | {(1, 2): [PAIR, ENDS], (2, 1): [ENDS, PAIR]},
    "two members have nothing for each other": PAIRS | {(1, 2): [], (2, 1): []},
    "only one takes": {(sender, 0): [PAIR] for sender in GROUP},
}


@pytest.mark.parametrize("name", IRREGULAR)
def test_members_who_see_different_things_make_one_call(name: str) -> None:
    def body(transport: Transport) -> list[float]:
        mine = torch.arange(4.0) + 10 * transport.rank
        transfer = irregular(transport.rank, IRREGULAR[name])
        return execute(transfer, [mine], transport, dtype=mine.dtype)[0].tolist()

    recorder = Recorder()
    assert run_ranks(3, body, recorder=recorder) == emulated(3, body)
    assert not faults(recorder.histories)


@pytest.mark.parametrize(("cut", "of", "kind"), [(Cut("x"), None, "all_gather"), (Cut("x"), 7, "all_to_all")])
def test_even_parts_are_gathered_by_the_backend(cut: Cut, of: int | None, kind: str) -> None:
    def body(transport: Transport) -> list[float]:
        place = Place((("x", 3),), transport.rank)
        ((start, stop),) = cut.ranges(of or 6, place)
        mine = torch.arange(float(start), stop)
        transfer = all_gather(0, cut, of=of).transfer(tuple(mine.shape), place)
        return execute(transfer, [mine], transport, dtype=mine.dtype)[0].tolist()

    recorder = Recorder()
    assert run_ranks(3, body, recorder=recorder) == [list(map(float, range(of or 6)))] * 3
    assert {event.kind for events in recorder.histories for event in events} == {kind}
