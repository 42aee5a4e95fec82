"""``on_worker_death="restart"``: a new worker takes over what a dead one had not finished.

    worker w dies ──▶ its replies that are there are kept ──▶ new process, number w, empty rings ──▶ its open tickets
                                                              again, in their order, into their slots

The epoch's batches are those of an undisturbed run. Batches go to the same worker number in the same order; the
successor is seeded as the first one was, worker_init_fn is called, and then Python's, NumPy's and torch's global random
generators are set to where they stood behind the last batch that was told of (randomstates.py). What else the dataset
keeps and changes itself (a counter, a generator of its own) begins anew in the new worker's copy, as after
worker_init_fn; a transform that draws from such a generator draws other numbers than in an undisturbed run.

Bounded: deaths in a row without one finished ticket are no accident. A successor asks for the samples of the batch that
was fatal one by one first, and says beforehand which (worker.py), so that its own death names the sample. If three have
died, and the last two at one sample, this is avoided from then on if bad samples are, else WorkerDied names it.
"""

from __future__ import annotations

from collections import deque

from .badsamples import RAISE, Avoid
from .delivery import Counters
from .dispatch import Dispatcher
from .errors import WorkerDied
from .mailbox import BATCH, EXHAUSTED, FAILED, KEPT, RESUME, RESUMED, SKIPPED, VOID, Ticket
from .pool import NOWHERE, Pool
from .replies import Replies
from .tickets import Task

DEATHS = 3
"""So many deaths in a row at one batch, the last two at one sample, and the sample is to blame."""
DEATHS_IN_ALL = 8
"""So many deaths in a row at one batch, wherever in it, are told."""
_TERMINAL = frozenset((BATCH, FAILED, SKIPPED, EXHAUSTED, VOID))


class Reviver:
    """Gives the dead workers of one pool successors. ``resumes_owed`` counts the answers to RESUME that each worker has
    not given."""

    dispatcher: Dispatcher
    """That of the epoch which the open tickets are of."""

    def __init__(
        self,
        pool: Pool,
        tasks: dict[int, Task],
        counters: Counters,
        on_bad_sample: str,
        resumes_owed: list[int],
    ) -> None:
        self._pool = pool
        self._tasks = tasks
        self._counters = counters
        self._on_bad_sample = on_bad_sample
        self._resumes_owed = resumes_owed
        # Of each worker: at which ticket it died last, how often in a row there, and at which sample.
        self._deaths: dict[int, tuple[int, int, int]] = {}

    def revive(self, worker: int, replies: Replies) -> None:
        """Start a successor and send it the open tickets. Raises WorkerDied after too many deaths at one place.

        May be repeated if it was interrupted.
        """
        death = replies.death_of(worker)
        answered = self._keep_replies(worker, replies)
        mine = sorted(b for b, task in self._tasks.items() if task.worker == worker and b not in answered)
        # A ticket without a slot was refused one: its worker had nothing to do but to say VOID.
        refused = [batch for batch in mine if self._tasks[batch].slot is None]
        open_ = [batch for batch in mine if self._tasks[batch].slot is not None]
        dispatcher = self.dispatcher
        redo = dispatcher.label(open_[0] if open_ else dispatcher.sent)
        place, deaths, last_position = self._deaths.get(worker, (redo, 0, NOWHERE))
        deaths, position = deaths + 1 if place == redo else 1, self._pool.position(worker)
        if deaths >= DEATHS_IN_ALL or (deaths >= DEATHS and position == last_position != NOWHERE):
            self._blame(death, self._tasks[open_[0]] if open_ else None, deaths)
            deaths = 0
        self._pool.restart(worker, redo=redo, probing=bool(open_))
        for _ in range(self._resumes_owed[worker] - self._resumes_kept(worker, replies)):
            self._pool.outboxes[worker].send(Ticket(RESUME, 0, -1, 0, 0, 0, 0, 0))
        for batch in refused:
            replies.early.setdefault(worker, deque()).append((VOID, batch, -1, -1, 0, 0, 0, 0))
        for batch in open_:
            if not dispatcher.send_again(batch, self._tasks[batch]):  # its indices grew by what is to be avoided
                raise self._error(death, self._tasks[batch].shown_indices(), DEATHS)
        self._deaths[worker] = redo, deaths, position
        self._counters.restarts += 1

    def _keep_replies(self, worker: int, replies: Replies) -> set[int]:
        """Put what the dead worker has answered for good where it is read first; return the batches."""
        early = replies.early.get(worker, deque())
        while (message := self._pool.inboxes[worker].receive()) is not None:
            if message[0] == RESUMED or message[0] & ~KEPT in _TERMINAL:
                early.append(message)
                replies.early[worker] = early
        return {message[1] for message in early if message[0] != RESUMED}

    @staticmethod
    def _resumes_kept(worker: int, replies: Replies) -> int:
        return sum(message[0] == RESUMED for message in replies.early.get(worker, ()))

    def _blame(self, death: WorkerDied, task: Task | None, deaths: int) -> None:
        """Make a ticket avoid the sample that its workers died at, or raise WorkerDied, which names it."""
        position = self._pool.position(death.worker)
        if task is None or position == NOWHERE:
            raise self._error(death, death.indices, deaths)
        if self._on_bad_sample == RAISE:
            raise self._error(death, (task.shown_indices()[position],), deaths)
        indices, why = task.indices if isinstance(task.indices, Avoid) else (task.indices, {})
        reason = f"WorkerDied: {deaths} workers in a row, the last one {death.end}"
        task.indices = Avoid(indices, {**why, position: reason})

    @staticmethod
    def _error(death: WorkerDied, indices: tuple[object, ...], deaths: int) -> WorkerDied:
        return WorkerDied(death.worker, death.pid, death.exitcode, indices, death.oom_kills, deaths)
