"""A worker's finished work on its way to the main process: into the slot, into a larger one, or through it in pieces.

    fits                ──▶ slot ──▶ BATCH
    too small           ──▶ NEED n bytes ──▶ REGRANT a larger slot ──▶ BATCH
    no larger slot now  ──▶ NEED n bytes ──▶ REGRANT a smaller slot ──▶ PIECE, REGRANT, PIECE, ... ──▶ BATCH

So a batch that the arena may hold always arrives, whoever holds its memory at the moment. A batch's layout is sent once
and known by a number from then on.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from .badsamples import BadSample, Flaws
from .collate import Memory, SlotWriter
from .describe import BatchDescription
from .failure import WorkerFailure
from .gathering import Gatherer, GatherPlan
from .layout import align
from .mailbox import BATCH, FAILED, NEED, PIECE, SKIPPED, Outbox, Reply, Ticket
from .segment import Segment

_LAYOUTS = 64
"""Layouts that a worker gives a number to; batches of still other layouts carry theirs each time."""
_REMEMBERED = 1 << 16
"""Bytes; layouts longer than this are not expected to come again."""

Fill = Callable[[Memory, int], None]
"""Writes a payload into memory, beginning at an offset."""


class Refused(Exception):
    """The main process has no slot for this batch; it knows why and tells the user."""


class Publisher:
    """Writes results and replies for one worker. ``next_grant`` waits for the answer to NEED or PIECE."""

    def __init__(self, segment: Segment, outbox: Outbox, next_grant: Callable[[], Ticket]) -> None:
        self._segment = segment
        self._memory = segment.memory
        self._outbox = outbox
        self._next_grant = next_grant
        self._populated: set[tuple[int, int]] = set()
        self._numbers = itertools.count()
        self._layouts: dict[Any, int] = {}
        self._seen: set[Any] = set()

    def forget_layouts(self) -> None:
        """Send every layout anew: replies that carried them may have been dropped."""
        self._layouts.clear()
        self._seen.clear()

    def populate(self, ticket: Ticket) -> None:
        """Map a slot's pages before its first use; a loader has few slots, so this happens a few times in all."""
        place = (ticket.offset, ticket.nbytes)
        if place not in self._populated:
            if len(self._populated) > 4096:  # slots come and go with ragged giants
                self._populated.clear()
            self._segment.populate(*place, threads=1)  # the other CPUs have workers of their own
            self._populated.add(place)

    def answer(self, ticket: Ticket, kind: int) -> None:
        """Reply that needs no bytes: VOID, EXHAUSTED."""
        self._outbox.send(Reply(kind, ticket.batch, ticket.slot, -1, 0, 0, 0, 0))

    def batch(self, ticket: Ticket, description: BatchDescription, kept: int, bad: tuple[BadSample, ...] = ()) -> None:
        """Publish a described batch: copy what was not born in the slot, write the layout, reply. Raises Refused.

        ``bad``: samples that were left out or replaced.
        """
        key: Any = description.root
        blob = b""
        if bad:
            key = blob = pickle.dumps(Flaws(description.root, bad), pickle.HIGHEST_PROTOCOL)
        elif description.has_values:  # equal is not the same then: 1 and True
            key = blob = pickle.dumps(description.root, pickle.HIGHEST_PROTOCOL)
        number = self._layouts.get(key)
        if number is not None:
            blob = b""
        else:
            blob = blob or pickle.dumps(description.root, pickle.HIGHEST_PROTOCOL)
            number = self._number_of(key, len(blob))
        saved = None
        if align(description.end) + len(blob) > ticket.nbytes:
            stop = min(description.born_until(), ticket.nbytes)
            saved = self._memory[ticket.offset : ticket.offset + stop].copy()

        def fill(memory: Memory, origin: int) -> None:
            description.move_to(SlotWriter(memory, 0, origin, 0), saved)
            description.copy_pending()

        self._batch(ticket, description.end, fill, blob, number, description.copied_bytes, kept)

    def gathered(self, ticket: Ticket, gatherer: Gatherer, plan: GatherPlan) -> None:
        """Gather a planned batch and publish it. Raises Refused, and IndexError before anything is sent."""
        number = self._layouts.get(plan.key, -1) if plan.key is not None else -1
        blob = pickle.dumps(plan.root, pickle.HIGHEST_PROTOCOL) if number < 0 else b""
        if align(plan.end) + len(blob) > ticket.nbytes:
            plan = plan._replace(rows=plan.rows.copy())  # they lie in the slot that is given up
        if blob and plan.key is not None and len(self._layouts) < _LAYOUTS:
            number = self._layouts[plan.key] = next(self._numbers)

        def fill(memory: Memory, origin: int) -> None:
            gatherer.gather(plan, memory, origin)

        self._batch(ticket, plan.end, fill, blob, number, 0, 0)

    def failure(self, ticket: Ticket, failure: WorkerFailure, kept: int) -> None:
        """Publish an exception. Raises Refused."""
        self._put_blob(ticket, FAILED, failure.to_bytes(), kept)

    def skipped(self, ticket: Ticket, bad: tuple[BadSample, ...], kept: int) -> None:
        """Publish that no sample of a batch can be had. Raises Refused."""
        self._put_blob(ticket, SKIPPED, pickle.dumps(bad), kept)

    def _put_blob(self, ticket: Ticket, kind: int, pickled: bytes, kept: int) -> None:
        blob = np.frombuffer(pickled, np.uint8)

        def fill(memory: Memory, origin: int) -> None:
            memory[origin : origin + len(blob)] = blob

        # Where somebody still looks nothing may be written: such a slot counts as one without room.
        self._put(ticket, len(blob), fill, Reply(kind, ticket.batch, 0, -1, 0, len(blob), 0, 0), kept, not kept)

    def _number_of(self, key: Any, nbytes: int) -> int:
        """Return a number for a layout that was seen before, else -1: most layouts with strings in them never
        return."""
        if key in self._seen and len(self._layouts) < _LAYOUTS:
            return self._layouts.setdefault(key, next(self._numbers))
        if len(self._seen) >= _LAYOUTS:
            self._seen.clear()
        if nbytes <= _REMEMBERED:
            self._seen.add(key)
        return -1

    def _batch(self, ticket: Ticket, end: int, fill: Fill, blob: bytes, number: int, copied: int, kept: int) -> None:
        """Publish a batch whose payload ends at ``end``; ``blob`` is its layout, empty if the receiver has it."""
        at = align(end)

        def fill_all(memory: Memory, origin: int) -> None:
            fill(memory, origin)
            if blob:
                memory[origin + at : origin + at + len(blob)] = np.frombuffer(blob, np.uint8)

        reply = Reply(BATCH, ticket.batch, 0, number, at, len(blob), max(end, 1), copied)
        self._put(ticket, at + len(blob), fill_all, reply, kept, True)

    def _put(self, ticket: Ticket, nbytes: int, fill: Fill, reply: Reply, kept: int, here: bool) -> None:
        """Let ``fill`` write ``nbytes`` where there is room (``here``: in the ticket's own slot), then reply."""
        if here and nbytes <= ticket.nbytes:
            fill(self._memory, ticket.offset)
            self._outbox.send(reply._replace(kind=reply.kind | kept, slot=ticket.slot))
            return
        self._outbox.send(Reply(NEED | kept, ticket.batch, ticket.slot, -1, 0, 0, nbytes, 0))
        ticket = self._granted()
        if nbytes <= ticket.nbytes:
            self.populate(ticket)
            fill(self._memory, ticket.offset)
        else:
            ticket = self._send_pieces(ticket, nbytes, fill)
        self._outbox.send(reply._replace(slot=ticket.slot))

    def _granted(self) -> Ticket:
        ticket = self._next_grant()
        if not ticket.nbytes:
            raise Refused
        return ticket

    def _send_pieces(self, ticket: Ticket, nbytes: int, fill: Fill) -> Ticket:
        """Send all but the last piece of a payload through a slot that is too small; leave the last one in it."""
        heap = np.zeros(nbytes, np.uint8)
        fill(heap, 0)
        start = 0
        while True:
            piece = heap[start : start + ticket.nbytes]
            self._memory[ticket.offset : ticket.offset + len(piece)] = piece
            start += len(piece)
            if start == nbytes:
                return ticket
            self._outbox.send(Reply(PIECE, ticket.batch, ticket.slot, -1, 0, 0, len(piece), 0))
            ticket = self._granted()
