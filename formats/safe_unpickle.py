"""Reads other programs' pickles without executing anything in them.

A pickle is a program. This reader, which is written in Python, carries out only the instructions that build data. If the pickle names a
class or a function, the reader uses a stand-in that only stores its arguments. No module is imported, and no foreign code is called. In
`.metadata`, every name must be a known one.

The work of each permitted instruction is proportional to the bytes that it consumes. So a hostile file costs only time and memory in
proportion to its size. The reader refuses numbers as text, buffers whose size the file only states, copies, and keys whose hash takes
computation.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from ..resilience.errors import SnapshotError

MOST_BYTES = 1 << 30
"""Maximum bytes of a pickle: no checkpoint's description is larger."""


class Record:
    """Represents an object: its class, the arguments with which it was created, and its state."""

    named = ""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def field(self, name: str) -> Any:
        """Return the attribute `name` of the object. Raises SnapshotError if the object does not have it."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise SnapshotError(f"a {self.named} without {name!r}; it is damaged, or of another version")
        return self.state[name]


def stand_in(name: str) -> type[Record]:
    return type("Record", (Record,), {"named": name})


def empty_dict() -> dict[Any, Any]:
    """Return a stand-in for an OrderedDict, whose items come later in the pickle."""
    return {}


def read(
    data: bytes,
    where: str,
    known: Mapping[str, Any],
    lenient: bool = False,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the data in a pickle, without executing any of it.

    known: by "module.name", the stand-in for it: a Record type, a function of the arguments that copies nothing, or a value. lenient: use a
    stand-in for any other name instead of refusing it. persistent: a function that loads the objects to which the pickle only refers
    (torch's storages). Raises SnapshotError, with one sentence that begins with `where`, if the pickle does anything else.
    """
    try:
        return _Reader(data, known, lenient, persistent).load()
    except SnapshotError as error:
        raise SnapshotError(f"{where}: {error}; nothing in it was run") from None
    except Exception as error:  # a broken pickle can cause any exception
        raise SnapshotError(f"{where} is not readable as a pickle ({type(error).__name__}); it is damaged") from None


class _Reader(pickle._Unpickler):  # in Python: C's unpickler takes memory for any memo index that a file names
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self, data: bytes, known: Mapping[str, Any], lenient: bool, persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._known, self._lenient, self._persistent = known, lenient, persistent
        self._functions = [made for made in known.values() if callable(made) and not isinstance(made, type)]

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._known:
            return self._known[full]
        if not self._lenient:
            raise SnapshotError(f"it names {full[:100]!r}, which does not belong in a checkpoint's metadata")
        return stand_in(full)

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise SnapshotError("it refers to something outside of itself")
        return self._persistent(pid)

    def _make(self) -> None:
        """Carry out REDUCE and NEWOBJ: call a function or class with a tuple of arguments."""
        args, made = self.stack.pop(), self.stack.pop()
        allowed = issubclass(made, Record) if isinstance(made, type) else any(made is each for each in self._functions)
        if type(args) is not tuple or not allowed:
            raise SnapshotError("it calls something that is not a class")
        self.append(made(*args))

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Record):
            raise SnapshotError("it gives a state to something that is not an object")
        made.state = state

    def _set_items(self) -> None:
        self._put(self.pop_mark())

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def _put(self, items: list[Any]) -> None:
        into = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not _is_key(key):
                raise SnapshotError("it has a key that is not a name")
            if isinstance(into, dict):
                into[key] = value
            elif not isinstance(into, Record):
                raise SnapshotError("it puts items into something that is not a dict")

    def _extend(self) -> None:
        self._add(self.pop_mark())

    def _append(self) -> None:
        self._add([self.stack.pop()])

    def _add(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)
        elif not isinstance(self.stack[-1], Record):
            raise SnapshotError("it puts items into something that is not a list")

    # The instructions that protocols 2 to 5 use to build data. A file with any other instruction is refused.
    dispatch = {  # type: ignore[assignment]
        code: pickle._Unpickler.dispatch[code]
        for code in (
            *b"\x80\x95.(012N\x88\x89JKM\x8a\x8bGX\x8c\x8dBC\x8e",
            *b")t\x85\x86\x87]}\x94qrhjc\x93Q",
        )
        if code in pickle._Unpickler.dispatch
    } | {
        ord("R"): _make,
        0x81: _make,
        ord("b"): _build,
        ord("u"): _set_items,
        ord("s"): _set_item,
        ord("e"): _extend,
        ord("a"): _append,
    }


def _is_key(key: Any) -> bool:
    if type(key) is int:
        return -(1 << 63) <= key < 1 << 64
    if type(key) is tuple:
        return len(key) <= 16 and all(type(each) in (str, int) and _is_key(each) for each in key)
    return key is None or type(key) in (str, bool, float) or isinstance(key, Record)
