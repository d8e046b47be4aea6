"""Numbers: small names for transfers, which are large values.

In: transfers. Out: a number, the same for equal ones. To compare or hash them costs more than most of what is asked
about them, so that is done once for each object; whoever asks often should ask with the same one.
"""

from __future__ import annotations

from weft.runtime.layout.transfer import Transfer

Transfers = tuple[Transfer, ...]


class Numbers:
    """The transfers that were seen so far."""

    def __init__(self) -> None:
        self._by_value: dict[Transfers, int] = {}
        self._by_identity: dict[int, tuple[Transfers, int]] = {}
        """It holds them: no other object gets their identity."""

    def of(self, transfers: Transfers) -> int:
        found = self._by_identity.get(id(transfers))
        if found is not None:
            return found[1]
        number = self._by_value.setdefault(transfers, len(self._by_value))
        self._by_identity[id(transfers)] = transfers, number
        return number
