"""Device batches: slots are copied by a stream of their own, ahead of the stream that computes.

    slot k+1, k+2 ──copies──▶ side stream ──event──▶ the consumer's stream waits, the host does not
         │                        │
         └── FREE again when ◀────┘ the event has passed

Up to ``ahead`` batches beyond the one that is handed out are on their way, as far as workers have them ready: nothing
is ever waited for that is not needed now. The device memory of a batch belongs to the side stream; the consumer's
stream is recorded in it, so that torch does not give it to a later copy while it is still computed with.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from .pinning import Copying, Engine, Event
from .slot import Slot

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


class _ByHand(TorchFunctionMode):
    """What a custom batch's own ``to`` moves is moved without waiting, and kept account of."""

    def __init__(self, device: torch.device, moved: list[torch.Tensor]) -> None:
        super().__init__()
        self._device, self._moved = device, moved

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.to, torch.Tensor.cuda) and not any(isinstance(value, bool) for value in args):
            kwargs.setdefault("non_blocking", True)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.device == self._device:
            self._moved.append(result)
        return result


class Mover:
    """Copies one batch to the engine's device by the current stream. Structures are built anew, of the same types.

    Tensors are copied. What has a ``to`` method is asked to move itself, as trainers do. Mappings, sequences, named
    tuples and dataclasses are walked; all else, NumPy arrays and strings among it, stays as it is.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._memo: dict[int, torch.Tensor] = {}
        self.moved: list[torch.Tensor] = []
        """All tensors on the device."""
        self.exact = True
        """Whether nothing in the moved batch can still look at host memory."""

    def move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, _PLAIN):
            return value
        if callable(getattr(type(value), "to", None)):
            self.exact = False
            with _ByHand(self._engine.device, self.moved):
                return value.to(self._engine.device)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            clone = copy.copy(value)
            for field in dataclasses.fields(value):
                if hasattr(value, field.name):  # declared with init=False, it may never have been set
                    object.__setattr__(clone, field.name, self.move(getattr(value, field.name)))
            return clone
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, tuple):
            items = [self.move(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, Sequence):
            return self._sequence(value)
        self.exact = False
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = self._memo.get(id(tensor))
        if moved is None:
            moved = self._engine.copy(tensor.detach()).requires_grad_(tensor.requires_grad)
            self._memo[id(tensor)] = moved
            self.moved.append(moved)
        return moved

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        items = {key: self.move(item) for key, item in value.items()}
        if type(value) is dict:
            return items
        try:
            if isinstance(value, MutableMapping):  # it may have attributes of its own
                clone = copy.copy(value)
                clone.update(items)
                return clone
            return type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            return items

    def _sequence(self, value: Sequence[Any]) -> Any:
        items = [self.move(item) for item in value]
        if type(value) is list:
            return items
        try:
            if isinstance(value, MutableSequence):
                clone = copy.copy(value)
                for place, item in enumerate(items):
                    clone[place] = item
                return clone
            return type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            return items


class _Ahead(NamedTuple):
    batch: Any
    event: Event
    tensors: list[torch.Tensor]


class Feed:
    """Turns the host batches of one pass into device batches.

    Knows the pass only while ``next`` runs, so that a pass that is dropped ends at once.
    """

    def __init__(self, copying: Copying, ahead: int) -> None:
        assert copying.engine is not None
        self._engine = copying.engine
        self._ahead = ahead
        if copying.side_stream is None:
            copying.side_stream = self._engine.open_stream()
            copying.streams.append(copying.side_stream)
        self._stream = copying.side_stream
        self._queue: deque[_Ahead] = deque()
        self._error: Exception | None = None

    def next(self, pull: Callable[[], tuple[Any, Slot | None]], ready: Callable[[], bool]) -> Any:
        """Return the next batch on the device, which the current stream may use at once. Never waits for the device.

        ``pull`` returns the next host batch and the slot that it is lent, or None if it is a copy; it may wait for
        workers and raises StopIteration at the end. ``ready`` tells whether ``pull`` would return at once. An error
        that came while batches were fetched ahead is raised in its turn.
        """
        queue = self._queue
        if not queue:
            error, self._error = self._error, None
            if error is not None:
                raise error
            queue.append(self._issue(*pull()))
        while len(queue) <= self._ahead and self._error is None and ready():
            try:
                queue.append(self._issue(*pull()))
            except Exception as error:  # noqa: BLE001 - in its turn
                self._error = error
        batch, event, tensors = queue.popleft()
        stream = self._engine.current_stream()
        self._engine.wait(stream, event)
        for tensor in tensors:
            self._engine.keep_for(tensor, stream)
        return batch

    def _issue(self, batch: Any, slot: Slot | None) -> _Ahead:
        """Give the copies of a batch to the side stream."""
        mover = Mover(self._engine)
        with self._engine.on(self._stream):
            moved = mover.move(batch)
        event = self._engine.record(self._stream)
        if slot is not None and mover.exact:
            slot.fence = (event,)  # all that will ever read it: no need to wait for what else the device does
        return _Ahead(moved, event, mover.moved)

    def clear(self) -> None:
        """Drop what is ahead: the pass begins anew or ends."""
        self._queue.clear()
        self._error = None
