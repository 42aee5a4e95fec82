"""The body of a worker process: ticket → read → transform → collate → publish.

    wait for the bell ──▶ WORK ──▶ fetch and collate into the slot ──fits──▶ describe, copy the rest ──▶ reply BATCH
                           │                                     └─too small─▶ reply NEED, wait for REGRANT ─┘
                           └─ the dataset raised ──▶ the pickled error into the slot ──▶ reply FAILED

The worker writes only into the slot of the ticket at hand, and replies to each WORK exactly once with BATCH, FAILED,
EXHAUSTED or VOID. It never touches CUDA, holds no lock that others wait for, and leaves when told, or when the life
line ends.
"""

from __future__ import annotations

import itertools
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import IterDataPipe
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.dataloader import _DatasetKind

from .collate import SlotWriter
from .describe import BatchDescription
from .failure import WorkerFailure
from .fetch import Fetcher
from .gathering import Gatherer
from .identity import seed_data_pipes, take_identity
from .layout import align
from .mailbox import (
    BATCH,
    COUNT,
    EXHAUSTED,
    FAILED,
    INT64,
    KEPT,
    NEED,
    PICKLED,
    REGRANT,
    RESUME,
    RESUMED,
    STOP,
    VOID,
    WORK,
    Inbox,
    Outbox,
    Reply,
    Ticket,
)
from .orders import WorkerOrders

IDLE_S = 1.0
"""Longest sleep of an idle worker; a ticket or the end of the life line wakes it long before."""
_LAYOUTS = 64
"""Layouts that a worker gives a number to; batches of still other layouts carry theirs each time."""


class _Left(Exception):
    """The worker was told to stop, or its main process is gone."""


class _Refused(Exception):
    """The main process has no larger slot for this batch; it knows why and tells the user."""


class Worker:
    """One worker process. ``run`` returns when it shall leave."""

    def __init__(self, orders: WorkerOrders) -> None:
        self._orders = orders
        self._memory = orders.segment.memory
        self._address = orders.segment.address
        self._inbox = Inbox(self._memory, orders.tickets_at, orders.capacity, orders.ticket_bell)
        self._outbox = Outbox(self._memory, orders.replies_at, orders.capacity, orders.reply_bell)
        self._waiting: deque[Ticket] = deque()
        self._populated: set[tuple[int, int]] = set()
        self._layout_numbers: dict[Any, int] = {}
        self._row_layout_numbers: dict[int, int] = {}
        self._numbers = itertools.count()
        self._seen: set[Any] = set()
        self._recipe = orders.recipe
        self._fetcher: Fetcher | None = None
        self._gatherer: Gatherer | None = None
        self._broken: WorkerFailure | None = None
        self._exhausted = False
        self._epoch = self._memory[orders.epoch_at : orders.epoch_at + 8].view(np.int64)

    # --- the life of the process
    # ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until told to stop."""
        orders = self._orders
        for fd in orders.inherited_fds:
            os.close(fd)
        orders.life_line.arm()
        orders.witness.enlist(orders.worker)
        try:
            self._set_up()
            while True:
                ticket = self._next_ticket()
                if ticket.kind == RESUME:
                    self._resume(ticket)
                elif ticket.kind == WORK:
                    self._work(ticket)
        except (_Left, KeyboardInterrupt):
            # The main process gets the KeyboardInterrupt too and tells about it, once.
            pass
        finally:
            orders.life_line.disarm()

    def _set_up(self) -> None:
        """Seed, tell the dataset who it is, call worker_init_fn: all as torch's workers do."""
        orders = self._orders
        take_identity(orders)
        try:
            if orders.worker_init_fn is not None:
                orders.worker_init_fn(orders.worker)
            self._prepare()
        except Exception as error:  # noqa: BLE001 - the user's code; told with every batch
            self._broken = WorkerFailure.of(error, self._where())

    def _prepare(self) -> None:
        self._gatherer = Gatherer.of(self._recipe, self._memory)
        if self._fetcher is None:
            self._fetcher = Fetcher(self._recipe, redirecting=True)
            # Where the user's own code calls default_collate in this worker, its results are born in the slot too.
            default_collate_fn_map.update(self._fetcher.table)
        else:
            self._fetcher.renew()
        self._exhausted = False

    def _resume(self, ticket: Ticket) -> None:
        """Begin a new epoch with the same dataset copy and the same random state, as torch's persistent workers do."""
        # Replies of the last epoch may have been dropped unread, and the layouts in them with their numbers.
        self._layout_numbers.clear()
        self._row_layout_numbers.clear()
        self._seen.clear()
        if isinstance(self._recipe.dataset, IterDataPipe):
            seed_data_pipes(self._recipe.dataset, ticket.index_count)
        if self._broken is None:
            try:
                self._prepare()
            except Exception as error:  # noqa: BLE001 - as above
                self._broken = WorkerFailure.of(error, self._where())
        self._outbox.send(Reply(RESUMED, ticket.batch, -1, -1, 0, 0, 0, 0))

    def _next_ticket(self) -> Ticket:
        return self._waiting.popleft() if self._waiting else self._receive()

    def _receive(self) -> Ticket:
        """Wait for a message. Raises _Left on STOP and when the main process is gone."""
        line = self._orders.life_line.fd
        while True:
            message = self._inbox.receive()
            if message is not None:
                if message[0] == STOP:
                    raise _Left
                return Ticket(*message)
            if line in self._inbox.bell.wait(IDLE_S, (line,)):
                raise _Left

    # --- one batch
    # -----------------------------------------------------------------------------------------------------

    def _work(self, ticket: Ticket) -> None:
        if self._exhausted or ticket.epoch < self._epoch[0]:
            self._answer(ticket, VOID)
            return
        place = (ticket.offset, ticket.nbytes)
        if place not in self._populated:
            self._populate(place)
        try:
            self._make(ticket)
        except _Refused:
            self._answer(ticket, VOID)

    def _answer(self, ticket: Ticket, kind: int) -> None:
        self._outbox.send(Reply(kind, ticket.batch, ticket.slot, -1, 0, 0, 0, 0))

    def _make(self, ticket: Ticket) -> None:
        """Make one batch, or report why not. Raises _Refused if the slot was too small and there is no other."""
        if self._broken is None and self._gatherer is not None and ticket.index_kind == INT64:
            failure = self._guarded(self._gather, self._gatherer, ticket)
            if failure is not None:
                self._send_failure(ticket, failure, 0)
            return
        indices, start = self._indices(ticket)
        memory = self._memory[ticket.offset : ticket.offset + ticket.nbytes]
        writer = SlotWriter(memory, self._address + ticket.offset, 0, ticket.nbytes, start)
        made = self._guarded(self._fetch, indices, writer)
        if made is None:
            self._exhausted = True
            self._answer(ticket, EXHAUSTED)
            return
        # The batch is gone, its bytes are not. If something else still looks at them, this slot is not ours any more.
        alive = weakref.ref(memory)
        del memory, writer
        kept = 0 if alive() is None else KEPT
        if kept and self._fetcher is not None:
            self._fetcher.stop_redirecting()
        if isinstance(made, BatchDescription):
            self._publish(ticket, made, kept)
        else:
            self._send_failure(ticket, made, kept)

    def _guarded(self, make: Callable[..., Any], *args: Any) -> Any:
        """Return what ``make`` returns, or the WorkerFailure that it raised; None for the end of an iterable
        dataset."""
        try:
            if self._broken is not None:
                return self._broken
            return make(*args)
        except (_Left, _Refused, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the user's code; it travels to the main process
            if isinstance(error, StopIteration) and self._recipe.dataset_kind == _DatasetKind.Iterable:
                return None
            return WorkerFailure.of(error, self._where())

    def _populate(self, place: tuple[int, int]) -> None:
        """Map a slot's pages before its first use; the slots of a loader are few, so this is done a few times in
        all."""
        offset, nbytes = place
        if len(self._populated) > 4096:  # slots come and go with ragged giants
            self._populated.clear()
        self._orders.segment.populate(offset, nbytes)
        self._populated.add(place)

    def _where(self) -> str:
        where = f"in DataLoader worker process {self._orders.worker}"
        if self._fetcher is None or self._fetcher.failed_index is None:
            return where
        return f"{where}, at dataset index {self._fetcher.failed_index!r}"

    def _gather(self, gatherer: Gatherer, ticket: Ticket) -> None:
        rows, start = ticket.index_count, ticket.offset
        indices = self._memory[start : start + 8 * rows].view(np.int64)
        rows_at, root = gatherer.layout(rows, align(8 * rows))
        number = self._row_layout_numbers.get(rows, -1)
        blob = pickle.dumps(root, pickle.HIGHEST_PROTOCOL) if number < 0 else b""
        need = align(rows_at.end) + len(blob)
        if need > ticket.nbytes:
            indices = indices.copy()
            ticket = self._ask_for(need, ticket)
        gatherer.gather(indices, rows_at, ticket.offset)
        if blob and len(self._row_layout_numbers) < _LAYOUTS:
            number = self._row_layout_numbers[rows] = next(self._numbers)
        self._send_batch(ticket, number, blob, rows_at.end, 0)

    def _fetch(self, indices: Any, writer: SlotWriter) -> BatchDescription:
        """Fetch and collate, and return the description; keeps no reference to the batch or the slot."""
        assert self._fetcher is not None
        description = BatchDescription(self._fetcher.fetch(indices, writer), writer)
        self._fetcher.learn(description.arrived, description.copied_bytes)
        writer.born.clear()
        description.leave()
        return description

    def _publish(self, ticket: Ticket, description: BatchDescription, kept: int) -> None:
        """Copy what was not born in the slot, write the layout, and reply; in a larger slot if this one is too
        small."""
        blob = b""
        key: Any = description.root
        if description.has_values:
            key = blob = pickle.dumps(description.root, pickle.HIGHEST_PROTOCOL)
        number = self._layout_numbers.get(key)
        if number is not None:
            blob = b""
        elif not blob:
            blob = pickle.dumps(description.root, pickle.HIGHEST_PROTOCOL)
        need = align(description.end) + len(blob)
        saved = None
        if need > ticket.nbytes:
            stop = min(description.born_until(), ticket.nbytes)
            saved = self._memory[ticket.offset : ticket.offset + stop].copy()
            ticket, kept = self._ask_for(need, ticket, kept), 0
        description.move_to(SlotWriter(self._memory, self._address, ticket.offset, ticket.nbytes), saved)
        description.copy_pending()
        if number is None:
            number = self._number_of(key, len(blob))
        self._send_batch(ticket, number, blob, description.end, description.copied_bytes, kept)

    def _number_of(self, key: Any, nbytes: int) -> int:
        """Return a number for a layout that was seen before, else -1: most layouts with strings in them never come
        again."""
        if key in self._seen and len(self._layout_numbers) < _LAYOUTS:
            return self._layout_numbers.setdefault(key, next(self._numbers))
        if len(self._seen) >= _LAYOUTS:
            self._seen.clear()
        if nbytes <= 1 << 16:
            self._seen.add(key)
        return -1

    def _send_batch(self, ticket: Ticket, number: int, blob: bytes, end: int, copied: int, kept: int = 0) -> None:
        """Publish a batch whose payload ends at ``end``; ``blob`` is its layout, empty if the receiver has it."""
        at = align(end)
        if blob:
            self._write(ticket, at, blob)
        self._outbox.send(Reply(BATCH | kept, ticket.batch, ticket.slot, number, at, len(blob), max(end, 1), copied))

    def _write(self, ticket: Ticket, at: int, blob: bytes) -> None:
        start = ticket.offset + at
        self._memory[start : start + len(blob)] = np.frombuffer(blob, np.uint8)

    def _indices(self, ticket: Ticket) -> tuple[Any, int]:
        """Return a ticket's indices as torch's samplers gave them, and the first offset behind them."""
        kind, count, start = ticket.index_kind, ticket.index_count, ticket.offset
        if kind == INT64:
            return self._memory[start : start + 8 * count].view(np.int64).tolist(), 8 * count
        if kind == PICKLED:
            return pickle.loads(self._memory[start : start + count].data), count
        return ([None] * count if kind == COUNT else None), 0

    def _ask_for(self, need: int, ticket: Ticket, kept: int = 0) -> Ticket:
        """Ask for a slot of ``need`` bytes in place of this ticket's and return the ticket with the new one."""
        self._outbox.send(Reply(NEED | kept, ticket.batch, ticket.slot, -1, 0, 0, need, 0))
        while True:
            answer = self._receive()
            if answer.kind != REGRANT:
                self._waiting.append(answer)
                continue
            if answer.nbytes == 0:
                raise _Refused
            self._populate((answer.offset, answer.nbytes))
            return ticket._replace(slot=answer.slot, offset=answer.offset, nbytes=answer.nbytes)

    def _send_failure(self, ticket: Ticket, failure: WorkerFailure, kept: int) -> None:
        blob = failure.to_bytes()
        if kept or len(blob) > ticket.nbytes:  # the error must not be written where somebody still looks
            ticket, kept = self._ask_for(len(blob), ticket, kept), 0
        self._write(ticket, 0, blob)
        self._outbox.send(Reply(FAILED, ticket.batch, ticket.slot, -1, 0, len(blob), 0, 0))


def worker_main(orders: WorkerOrders) -> None:
    """Entry point of a worker process."""
    Worker(orders).run()
