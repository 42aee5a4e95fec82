"""The body of a worker process: ticket → read → transform → collate → publish.

    wait for the bell ──▶ WORK ──▶ fetch and collate into the slot ──fits──▶ describe, copy the rest ──▶ reply BATCH
                           │                                     └─too small─▶ reply NEED, wait for REGRANT ─┘
                           └─ the dataset raised ──▶ the pickled error into the slot ──▶ reply FAILED

The worker writes only into the slot of the ticket at hand, and replies to each WORK exactly once with BATCH, FAILED,
SKIPPED, EXHAUSTED or VOID. It never touches CUDA, holds no lock that others wait for, and leaves when told, or when the
life line ends.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import IterDataPipe
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.dataloader import _DatasetKind

from .badsamples import RAISE, Avoid, BadSample
from .collate import SlotWriter
from .describe import BatchDescription
from .failure import WorkerFailure, clear_frames
from .fetch import Fetcher, NothingLeft
from .gathering import Gatherer
from .identity import seed_data_pipes, take_identity
from .interrupts import ignore_sigint
from .layout import align
from .mailbox import (
    COUNT,
    EXHAUSTED,
    INT64,
    KEPT,
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
    label_of,
)
from .orders import WorkerOrders
from .publisher import Publisher, Refused
from .randomstates import STATES_BYTES, RandomStates, current_states, set_states

IDLE_S = 1.0
"""Longest sleep of an idle worker; a ticket or the end of the life line wakes it long before."""


class _Left(Exception):
    """The worker was told to stop, or its main process is gone."""


class Worker:
    """One worker process. ``run`` returns when it shall leave."""

    def __init__(self, orders: WorkerOrders) -> None:
        self._orders = orders
        self._memory = orders.segment.memory
        self._address = orders.segment.address
        self._inbox = Inbox(self._memory, orders.tickets_at, orders.capacity, orders.ticket_bell)
        self._outbox = Outbox(self._memory, orders.replies_at, orders.capacity, orders.reply_bell)
        self._waiting: deque[Ticket] = deque()
        self._publisher = Publisher(orders.segment, self._outbox, self._next_grant)
        self._recipe = orders.recipe
        self._fetcher: Fetcher | None = None
        self._gatherer: Gatherer | None = None
        self._broken: WorkerFailure | None = None
        self._exhausted = False
        self._epoch = self._memory[orders.epoch_at : orders.epoch_at + 8].view(np.int64)
        self._position = self._memory[orders.position_at : orders.position_at + 8].view(np.int64)
        self._probing = orders.probing
        self._states: RandomStates | None = None
        if orders.states_at is not None:
            self._states = RandomStates(self._memory[orders.states_at : orders.states_at + STATES_BYTES])

    # --- the life of the process

    def run(self) -> None:
        """Work until told to stop."""
        orders = self._orders
        ignore_sigint()
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
        except _Left:
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
        if self._states is not None and orders.redo:
            self._states.restore(before=orders.redo)

    def _prepare(self) -> None:
        if self._fetcher is None:
            self._fetcher = Fetcher(self._recipe, redirecting=True)
            # Where the user's own code calls default_collate in this worker, its results are born in the slot too.
            default_collate_fn_map.update(self._fetcher.table)
        else:
            self._fetcher.renew()
        self._gatherer = Gatherer.of(self._recipe)
        self._exhausted = False

    def _resume(self, ticket: Ticket) -> None:
        """Begin a new epoch with the same dataset copy and the same random state, as torch's persistent workers do."""
        # Replies of the last epoch may have been dropped unread, and the layouts in them with their numbers.
        self._publisher.forget_layouts()
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

    def _next_grant(self) -> Ticket:
        """Wait for the answer to NEED or PIECE; other messages wait for their turn."""
        while True:
            answer = self._receive()
            if answer.kind == REGRANT:
                return answer
            self._waiting.append(answer)

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

    def _work(self, ticket: Ticket) -> None:
        if self._exhausted or ticket.epoch < self._epoch[0]:
            self._publisher.answer(ticket, VOID)
            return
        self._publisher.populate(ticket)
        try:
            self._make(ticket)
        except Refused:
            self._publisher.answer(ticket, VOID)

    def _make(self, ticket: Ticket) -> None:
        """Make one batch, or report why not. Raises Refused."""
        if self._probing:
            self._probe(self._indices(ticket)[0])
        if self._broken is None and self._gatherer is not None and ticket.index_kind == INT64:
            failure = self._guarded(self._gather, self._gatherer, ticket)
            if failure is None:
                return
            if self._recipe.on_bad_sample == RAISE:
                self._publisher.failure(ticket, failure, 0)
                return
        indices, start = self._indices(ticket)
        memory = self._orders.segment.view(ticket.offset, ticket.nbytes)
        writer = SlotWriter(memory, self._address + ticket.offset, 0, ticket.nbytes, start)
        made = self._guarded(self._fetch, indices, writer)
        if self._states is not None:
            self._states.save(label_of(ticket.epoch, ticket.batch))
        if made is None:
            self._exhausted = True
            self._publisher.answer(ticket, EXHAUSTED)
            return
        # The batch is gone, its bytes are not. If something else still looks at them, this slot is not ours any more.
        if self._fetcher is not None:
            self._fetcher.forget()
        alive = weakref.ref(memory)
        del memory, writer
        kept = 0 if alive() is None else KEPT
        if kept and self._fetcher is not None:
            self._fetcher.stop_redirecting()
        if isinstance(made, BatchDescription):
            self._publisher.batch(ticket, made, kept, tuple(self._fetcher.bad) if self._fetcher is not None else ())
        elif isinstance(made, WorkerFailure):
            self._publisher.failure(ticket, made, kept)
        else:
            self._publisher.skipped(ticket, made, kept)

    def _probe(self, indices: Any) -> None:
        """Ask for the samples of a batch one by one, and say beforehand at which one: it was fatal."""
        self._probing = False
        indices, why = indices if isinstance(indices, Avoid) else (indices, {})
        before = current_states()
        for position, index in enumerate(indices if self._recipe.auto_collation else [indices]):
            if position not in why:
                self._position[0] = position
                with contextlib.suppress(Exception):  # it is asked for again, and told then
                    self._recipe.dataset[index]
        self._position[0] = -1
        set_states(before)

    def _guarded(self, make: Callable[..., Any], *args: Any) -> Any:
        """Return what ``make`` returns, or the WorkerFailure that it raised; None for the end of an iterable
        dataset."""
        try:
            if self._broken is not None:
                return self._broken
            return make(*args)
        except (_Left, Refused, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the user's code; it travels to the main process
            if isinstance(error, StopIteration) and self._recipe.dataset_kind == _DatasetKind.Iterable:
                return None
            failure = WorkerFailure.of(error, self._where())
            clear_frames(error)
            return failure

    def _where(self) -> str:
        where = f"in DataLoader worker process {self._orders.worker}"
        if self._fetcher is None or self._fetcher.failed_index is None:
            return where
        return f"{where}, at dataset index {self._fetcher.failed_index!r}"

    def _gather(self, gatherer: Gatherer, ticket: Ticket) -> None:
        """Make a batch without asking for samples: read the indices, gather the columns, reply."""
        count, start = ticket.index_count, ticket.offset
        indices = self._memory[start : start + 8 * count].view(np.int64)
        self._publisher.gathered(ticket, gatherer, gatherer.plan(indices, align(8 * count)))

    def _fetch(self, indices: Any, writer: SlotWriter) -> BatchDescription | tuple[BadSample, ...]:
        """Fetch and collate, and return the description; keeps no reference to the batch or the slot.

        A tuple: all samples are bad and left out.
        """
        assert self._fetcher is not None
        try:
            batch = self._fetcher.fetch(indices, writer)
        except NothingLeft:
            return tuple(self._fetcher.bad)
        description = BatchDescription(batch, writer)
        del batch
        self._fetcher.learn(description.arrived, description.copied_bytes)
        writer.born.clear()
        description.leave()
        return description

    def _indices(self, ticket: Ticket) -> tuple[Any, int]:
        """Return a ticket's indices as torch's samplers gave them, and the first offset behind them."""
        kind, count, start = ticket.index_kind, ticket.index_count, ticket.offset
        if kind == INT64:
            return self._memory[start : start + 8 * count].view(np.int64).tolist(), 8 * count
        if kind == PICKLED:
            return pickle.loads(self._memory[start : start + count].data), count
        return ([None] * count if kind == COUNT else None), 0


def worker_main(orders: WorkerOrders) -> None:
    """Entry point of a worker process."""
    # What was inherited by fork is not garbage; a collection that walks it would copy every page of it.
    gc.freeze()
    Worker(orders).run()
