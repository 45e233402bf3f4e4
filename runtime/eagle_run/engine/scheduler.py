"""Which sequences are decoded: a free slot takes the sequence that has waited longest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from eagle_run.decoding.config import SpeculativeConfig
from eagle_run.engine.sequence import Sequence


class Scheduler:
    """Sequences that wait, first come first served, and those that run, each in a slot.

    A round is of one tree for all slots, so sequences run side by side only with the same speculative
    config: one with another waits until the slots are empty, and so does what came after it.
    """

    def __init__(self, slots: int) -> None:
        self.slots: list[Sequence | None] = [None] * slots
        self.waiting: deque[Sequence] = deque()

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.slots if sequence is not None]

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting) or any(self.slots)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """That of what runs; None where nothing does."""
        return next((sequence.request.speculative for sequence in self.running), None)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Iterator[tuple[int, Sequence]]:
        """Moves waiting sequences into free slots; gives each with its slot, one after the other."""
        for slot, occupant in enumerate(self.slots):
            if not self.waiting:
                return
            if occupant is None and self.speculative in (None, self.waiting[0].request.speculative):
                sequence = self.slots[slot] = self.waiting.popleft()
                yield slot, sequence

    @property
    def can_schedule(self) -> bool:
        """Whether `schedule` would give anything."""
        if not self.waiting or all(self.slots):
            return False
        return self.speculative in (None, self.waiting[0].request.speculative)

    def remove(self, sequence: Sequence) -> int | None:
        """Takes a sequence out; its slot, or None if it was still waiting."""
        if sequence in self.slots:
            slot = self.slots.index(sequence)
            self.slots[slot] = None
            return slot
        self.waiting.remove(sequence)
        return None
