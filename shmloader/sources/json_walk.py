"""A large JSON file, read a piece at a time: the members of the object at its top, the items of arrays one by one.

    {"info": {...}, "images": [{...}, {...}], ...}   ->   ("info", {...}), ("images", {...}), ("images", {...}), ...

Half a gigabyte of annotations would take several as Python objects at once. Here one item exists at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

BLOCK = 1 << 20  # characters read at a time
_DELIMITERS = frozenset(",:]} \t\r\n")


class NotJson(ValueError):
    """The text is no JSON object; says where and why. Internal: the source adds the file."""


class JsonWalk:
    """Iterates over (key, value) of a JSON object; of a value that is an array, over (key, item) for each item.

    ``keys`` are the keys met so far, also those of empty arrays. Raises NotJson.
    """

    def __init__(self, file: TextIO) -> None:
        self.keys: list[str] = []
        self._file = file
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._before = 0
        self._ended = False

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        try:
            yield from self._members()
        except json.JSONDecodeError as fault:
            raise NotJson(f"{fault.msg} at character {self._before + fault.pos:,}") from fault
        except UnicodeDecodeError as fault:
            raise NotJson(f"it is not encoded in UTF-8: {fault}") from fault
        except RecursionError as fault:
            raise NotJson("its values are nested too deeply") from fault

    def _members(self) -> Iterator[tuple[str, Any]]:
        self._expect("{")
        if self._next() == "}":
            self._at += 1
        else:
            while True:
                key = self._value()
                if not isinstance(key, str):
                    raise self._fault("expected a key")
                self.keys.append(key)
                self._expect(":")
                if self._next() == "[":
                    self._at += 1
                    for item in self._items():
                        yield key, item
                else:
                    yield key, self._value()
                if self._expect(",}") == "}":
                    break
        if self._next():
            raise self._fault("expected the end")

    def _items(self) -> Iterator[Any]:
        if self._next() == "]":
            self._at += 1
            return
        while True:
            yield self._value()
            if self._expect(",]") == "]":
                return

    def _more(self) -> None:
        # As much again as a value has already: one that is very long is then not tried over and over.
        block = self._file.read(max(BLOCK, len(self._text) - self._at))
        self._before += self._at
        self._text = self._text[self._at :] + block
        self._at = 0
        self._ended = not block

    def _next(self) -> str:
        """Return the next character that is no blank, without taking it; empty at the end."""
        while True:
            while self._at < len(self._text):
                character = self._text[self._at]
                if character not in " \t\r\n":
                    return character
                self._at += 1
            if self._ended:
                return ""
            self._more()

    def _expect(self, characters: str) -> str:
        found = self._next()
        if not found or found not in characters:
            raise self._fault(f"expected {' or '.join(map(repr, characters))}")
        self._at += 1
        return found

    def _fault(self, what: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(what, self._text, self._at)

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                if self._ended:
                    raise
            else:
                # A number that ends where the text does may go on in the next block; so may "1e+" and "1.".
                if self._ended or self._text[end : end + 1] in _DELIMITERS or len(self._text) - end > 2:
                    self._at = end
                    return value
            self._more()
