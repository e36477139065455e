"""The layout of a board page: one page of shared memory per local rank. The rank writes its state there for the agent, and the agent its
orders for the rank.

A heartbeat is a few stores into memory, with no system call. Every field is eight bytes and aligned, so a reader never sees half of it. The
number of a row is stored after its fields, which suffices only if stores become visible in sequence (x86).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, overload

from ..inprocess.tally import ROW
from ..text import formatting
from .board_events import PAGE_BYTES, REWINDS, REWINDS_AT, SIGHTINGS, Rewound, Sighted

_UNSAVED_AT = 280
_ROW_AT = 1344
"""Offset in bytes of two slots, used in turn, for this rank's row at a boundary (between two steps): the row's ordinal, then the row."""
_ROW, _SAID = struct.Struct(f"{ROW}d"), struct.Struct(f"q{ROW}d")
_PLACES = _ROW_AT, _ROW_AT + _SAID.size
_ASKED, _ASKED_AT = struct.Struct("5q"), 19 * 8
_FAREWELL_AT, _FAREWELL_END = 1600, 3776
_DEVICE_AT, _SPENT_AT = _FAREWELL_END // 8, 3824
_SIGHTINGS_COUNT_AT = _SPENT_AT + 4 * 8
_LIVED, _CODES = 1, 1000
MARKS = 256
"""Marks in the queue of a device are numbered from 0 to 255, and then from 0 again."""


class _Int:
    """A field of `Page`: one aligned 64-bit integer."""

    def __init__(self, index: int) -> None:
        self.index = index

    @overload
    def __get__(self, page: None, owner: type) -> _Int: ...
    @overload
    def __get__(self, page: Page, owner: type) -> int: ...
    def __get__(self, page: Page | None, owner: type) -> _Int | int:
        return self if page is None else page.ints[self.index]

    def __set__(self, page: Page, value: int) -> None:
        page.ints[self.index] = value


class Page:
    """One rank's page over a writable 4096-byte buffer. Times are CLOCK_MONOTONIC nanoseconds, or 0 before the event has happened."""

    pid = _Int(0)
    generation = _Int(1)
    rank = _Int(2)
    phase = _Int(3)
    """A `RankPhase`."""
    step = _Int(4)
    """Number of finished steps; -1 before the first boundary of this generation."""
    beat_ns = _Int(7)
    attached_ns = _Int(8)
    built_ns = _Int(9)
    restored_ns = _Int(10)
    stepped_ns = _Int(11)
    """When the first step of this generation was finished."""
    replayed_ns = _Int(12)
    """When the rank had computed the last step that earlier generations had reached."""
    snapshots = _Int(13)
    skipped = _Int(14)
    """Number of snapshots that were not taken, because there was no free slot or no memory."""
    starved = _Int(17)
    """Number of `skipped` snapshots for which there was no memory."""
    left = _Int(18)
    """1 after the script has ended without an exception and the interpreter has begun to shut down."""
    stall_ns = _Int(15)
    """Time that the loop spent in our code, including the copying of snapshots into memory."""
    rewinds = _Int(16)
    """Number of rewinds in place in this generation. `rewind(ordinal)` returns one of the last eight."""
    order = _Int(21)
    """An `Order` to the rank; the agent writes it."""
    durable = _Int(22)
    """Number of snapshots on disk that the agent has ordered in this generation; the agent writes it."""
    copies = _Int(23)
    """Number of snapshots for other nodes' memory that the agent has ordered; the agent writes it."""
    durable_step = _Int(32)
    """Step of the first snapshot for the disk that the rank began after the agent ordered one. The agent sets it to -1 with the order."""
    paused = _Int(19)
    """1: the rank must wait at the next boundary. The agent writes this and the four fields of the last rewind order, `ordered` last."""
    ordered = _Int(20)
    """Number of the last rewind order."""
    ordered_to = _Int(28)
    """The step to which the last rewind order sends the ranks."""
    ordered_skip = _Int(29)
    """Number of batches after step `ordered_to` to skip."""
    ordered_by = _Int(30)
    """The reason of the last rewind order, as an index into `OrderedBy`."""
    declined = _Int(31)
    """Number of the last rewind order that failed, because not all ranks have the state."""
    fetching = _Int(33)
    """1 while this rank's part of the state to start from is being fetched from another node; the agent writes it."""
    until_ns = _Int(34)
    """The rank must cross no boundary after this time. By then the agent's lease may have expired, and other nodes may begin a generation
    without this node. 0: there is no limit. The agent writes it."""

    doing = _Int(24)
    """A `Doing`: what the rank does between two boundaries."""
    listens = _Int(25)
    """Number of the signal that makes this process write its stacks. 0: there is no such handler, and a signal could kill the process."""
    main_thread = _Int(26)
    """Number of the thread to look at, as stacks show it: the process's main thread, later the thread of the training loop."""
    tells = _Int(27)
    """0: neither a loop that we know nor a Session reports steps. 1: one does; 2: it can also skip data; 3: it cannot skip data, but it can
    put its data back."""
    first_step = _Int(_SIGHTINGS_COUNT_AT // 8 + 1)
    """The first step that was finished in this generation. The rank writes it before `stepped_ns`."""
    sightings = _Int(_SIGHTINGS_COUNT_AT // 8)
    """Number of findings of this generation on which the ranks did not act; `sighting(ordinal)` returns the last two."""
    repeated = _Int(_SIGHTINGS_COUNT_AT // 8 + 5)
    """A `Repeated`: whether this rank got the same figures when it computed steps again."""
    total = _Int((_PLACES[1] + _SAID.size) // 8)
    """Number of steps after which the loop ends; 0: not known."""
    device_queued = _Int(_DEVICE_AT)
    """Number of the last mark that the rank has put behind the work of its stream on the device."""
    device_reached = _Int(_DEVICE_AT + 1)
    """Number of the last mark that the device has reached. The device itself writes it."""
    device_since_ns = _Int(_DEVICE_AT + 2)
    """When the oldest mark that the device has not reached was put there; 0: it has reached all marks, or there is none."""
    device_called, device_answered = _Int(_DEVICE_AT + 3), _Int(_DEVICE_AT + 4)
    """The last mark queued, and the last mark reached, on a stream of our own that waits for no other work."""
    launched_pid = _Int(_SIGHTINGS_COUNT_AT // 8 + 2)
    """Process that the launcher started as this rank; 0 until the launcher ends its ranks. The launcher writes this and the next two
    fields."""
    seen = _Int(_SIGHTINGS_COUNT_AT // 8 + 3)
    """How the launcher found `launched_pid`. 0: not known; 1: alive, so the launcher ended it; else the process's exit code plus 1000."""
    launcher_signal = _Int(_SIGHTINGS_COUNT_AT // 8 + 4)
    """The signal that ended the launcher itself; 0: the launcher could report no signal."""

    __slots__ = ("floats", "ints", "raw")

    def __init__(self, buffer: memoryview) -> None:
        self.raw = buffer
        self.ints = buffer.cast("q")
        self.floats = buffer.cast("d")

    @classmethod
    def place(cls, name: str) -> int:
        """Return the index of an integer field among the page's 64-bit integers."""
        field: _Int = vars(cls)[name]
        return field.index

    @property
    def loss(self) -> float:
        return self.floats[5]

    @property
    def grad_norm(self) -> float:
        return self.floats[6]

    def beat(self, step: int, loss: float, grad_norm: float, now_ns: int) -> None:
        """Write the heartbeat of one finished step, and clear a last message: the rank has outlived the exception in it."""
        floats, ints = self.floats, self.ints
        ints[_FAREWELL_AT // 8] = 0
        floats[5], floats[6] = loss, grad_norm
        ints[4] = step
        ints[7] = now_ns

    @property
    def asked(self) -> tuple[int, ...]:
        """Return the agent's orders that a row reports: `paused`, `ordered`, `order`, `durable`, `copies`."""
        return _ASKED.unpack_from(self.raw, _ASKED_AT)

    def stalled(self, held_ns: int) -> None:
        """Add time that the loop spent in our code."""
        self.ints[15] += held_ns

    def timed(self, own_ns: int, computing_ns: int, queued_ns: int, steps: int = 1) -> None:
        """Add `steps` finished steps, and the nanoseconds of this rank's own time that they took (`straggler.Spent`)."""
        place, ints = _SPENT_AT // 8, self.ints
        ints[place] += own_ns
        ints[place + 1] += computing_ns
        ints[place + 2] += queued_ns
        ints[place + 3] += steps

    @property
    def spent(self) -> tuple[int, ...]:
        """Return the sums over all steps: own, computing and queued nanoseconds, and the number of steps. While the rank adds a step, a
        reader may see only some of the sums changed."""
        return tuple(self.ints[_SPENT_AT // 8 : _SPENT_AT // 8 + 4].tolist())

    def rewound(self, done: Rewound) -> None:
        """Record a rewind in place that is finished."""
        REWINDS.put(self.raw, self.rewinds + 1, done)
        self.floats[5] = self.floats[6] = math.nan  # the old figures belong to another step
        self.step = done.to
        self.rewinds += 1  # last: from now on the agent reads the record

    def rewind(self, ordinal: int) -> Rewound:
        """Return the record of rewind number `ordinal`, from 1. The page holds the last eight."""
        return REWINDS.get(self.raw, ordinal)

    def sighted(self, found: Sighted) -> None:
        """Record a finding on which the ranks do not act."""
        SIGHTINGS.put(self.raw, self.sightings + 1, found)
        self.sightings += 1  # last: from now on the agent reads the record

    def sighted_again(self, ordinal: int, step: int, outcome: int = 0) -> None:
        """Record that a finding is still there at `step`; or, with a `loss_level.Outcome`, that its watch has ended there."""
        place = SIGHTINGS.place(ordinal) // 8
        self.ints[place + 2] = step
        self.ints[place + 3] = outcome  # last: it says that the step is the final one

    def sighting(self, ordinal: int) -> Sighted:
        """Return the record of finding number `ordinal`, from 1. The page holds the last two."""
        return SIGHTINGS.get(self.raw, ordinal)

    def open_sightings(self) -> dict[int, Sighted]:
        """Return, by ordinal, which of the last two findings are still being watched."""
        kept = range(max(0, self.sightings - SIGHTINGS.kept) + 1, self.sightings + 1)
        return {ordinal: told for ordinal in kept if not (told := self.sighting(ordinal)).outcome}

    def speak(self, ordinal: int, row: Sequence[float]) -> None:
        """Write the `ordinal`-th row (from 1) for the other ranks of the node. Call `speak` only when all other ranks have read the row
        before, because it overwrites row `ordinal - 2`."""
        place = _PLACES[ordinal % 2]
        _ROW.pack_into(self.raw, place + 8, *row)
        self.ints[place // 8] = ordinal  # last: from now on the others read the row

    @property
    def spoken(self) -> int:
        """Return how many rows this page's rank has written."""
        return max(self.ints[place // 8] for place in _PLACES)

    def hear(self, ordinal: int) -> tuple[float, ...] | None:
        """Return the `ordinal`-th row that this page's rank wrote; None: the rank has not written it yet."""
        said = _SAID.unpack_from(self.raw, _PLACES[ordinal % 2])  # the ordinal is read before the row
        return said[1:] if said[0] == ordinal else None

    def clear(self, generation: int, rank: int = -1) -> None:
        """Reset the page for a rank of another generation. The agent does it while no rank is alive."""
        self.raw[:] = bytes(PAGE_BYTES)
        self.generation = generation
        self.rank = rank
        self.step = self.durable_step = -1

    @property
    def unsaved(self) -> str:
        """Return why this rank's state could not be saved at the last attempt; empty: it could be saved."""
        length = max(0, min(self.ints[_UNSAVED_AT // 8], REWINDS_AT - _UNSAVED_AT - 8))
        return bytes(self.raw[_UNSAVED_AT + 8 : _UNSAVED_AT + 8 + length]).decode(errors="replace")

    @unsaved.setter
    def unsaved(self, why: str) -> None:
        data = formatting.cut(why, REWINDS_AT - _UNSAVED_AT - 8)
        self.ints[_UNSAVED_AT // 8] = 0
        self.raw[_UNSAVED_AT + 8 : _UNSAVED_AT + 8 + len(data)] = data
        self.ints[_UNSAVED_AT // 8] = len(data)

    def say_farewell(self, **words: Any) -> None:
        """Write a last message (a small JSON object; long texts are cut), which the agent reads after this process is gone."""
        data = b""
        for limit in (1500, 300, 80):
            short = {k: v[-limit:] if isinstance(v, str) else v for k, v in words.items()}
            data = json.dumps(short, ensure_ascii=False).encode(errors="backslashreplace")
            if len(data) <= _FAREWELL_END - _FAREWELL_AT - 8:
                break
        self.raw[_FAREWELL_AT + 8 : _FAREWELL_AT + 8 + len(data)] = data
        self.ints[_FAREWELL_AT // 8] = len(data)

    def farewell(self) -> dict[str, Any]:
        """Return the last message; empty: there is no valid message."""
        length = self.ints[_FAREWELL_AT // 8]
        if not 0 < length <= _FAREWELL_END - _FAREWELL_AT - 8:
            return {}
        try:
            words = json.loads(bytes(self.raw[_FAREWELL_AT + 8 : _FAREWELL_AT + 8 + length]))
        except (ValueError, RecursionError):  # the rank was killed while writing, or other code wrote there
            return {}
        return {k: v for k, v in words.items() if isinstance(v, str | int)} if isinstance(words, dict) else {}

    def say_seen(self, pid: int, code: int | None) -> None:
        """Record how the launcher, which ends its ranks, found this rank. code: the rank's exit code; None: the rank is alive."""
        self.seen = _LIVED if code is None else _CODES + code
        self.launched_pid = pid

    @property
    def ended_by_launcher(self) -> bool:
        """Whether the rank lived until the launcher ended it."""
        return self.seen == _LIVED

    @property
    def seen_code(self) -> int | None:
        """Return the exit code that the launcher saw before it ended the other ranks; None: it saw no exit code."""
        return self.seen - _CODES if self.seen > _LIVED else None

    def release(self) -> None:
        """Release the buffer, so that its mapping can be closed."""
        self.ints.release()
        self.floats.release()
        self.raw.release()
