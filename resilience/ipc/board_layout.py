"""The layout of a board page: one page of shared memory per local rank, written by the rank, read by the agent, and back for orders.

A beat is a few stores into memory, with no system call. Every field is eight bytes and aligned, so a reader never sees half of one. A
row of several has a number that is stored last; that is enough where stores become visible in their order (x86), and only there.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, overload

from ..inprocess.tally import ROW
from .board_events import PAGE_BYTES, REWINDS, REWINDS_AT, SIGHTINGS, Rewound, Sighted

_UNSAVED_AT = 280
_ROW_AT = 1344
"""Two places, used in turn, for this rank's word at a boundary: its ordinal, then the row."""
_ROW, _SAID = struct.Struct(f"{ROW}d"), struct.Struct(f"q{ROW}d")
_PLACES = _ROW_AT, _ROW_AT + _SAID.size
_ASKED, _ASKED_AT = struct.Struct("5q"), 19 * 8
_FAREWELL_AT, _FAREWELL_END = 1600, 3840
_SPENT_AT = _FAREWELL_END
_SIGHTINGS_COUNT_AT = _SPENT_AT + 4 * 8
_LIVED, _CODES = 1, 1000


class _Int:
    """An aligned 64-bit integer of the page."""

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
    """One rank's page over a writable 4096-byte buffer. Times are CLOCK_MONOTONIC nanoseconds, 0 while the thing has not happened."""

    pid = _Int(0)
    generation = _Int(1)
    rank = _Int(2)
    phase = _Int(3)
    """RankPhase."""
    step = _Int(4)
    """Steps done; -1 before the first boundary of this generation."""
    beat_ns = _Int(7)
    attached_ns = _Int(8)
    built_ns = _Int(9)
    restored_ns = _Int(10)
    stepped_ns = _Int(11)
    """First step of this generation finished."""
    replayed_ns = _Int(12)
    """Back at the step that the fault of the generation before had reached."""
    snapshots = _Int(13)
    skipped = _Int(14)
    """Snapshots that found no free slot or no memory,"""
    starved = _Int(17)
    """and those of them that found no memory."""
    left = _Int(18)
    """1 once the script is done without an exception and the interpreter has begun to shut down."""
    stall_ns = _Int(15)
    """Time the loop spent in our hands, staging included."""
    rewinds = _Int(16)
    """How often the ranks have gone back in place in this generation; `rewind(ordinal)` tells of the last ones."""
    order = _Int(21)
    """Order; the agent writes it."""

    durable = _Int(22)
    """How many snapshots on disk have been asked for in this generation; the agent writes it."""
    copies = _Int(23)
    """How many snapshots for the memory of other nodes; the agent writes it."""
    durable_step = _Int(32)
    """Step of the first snapshot for the disk that was begun since the agent, which asked for it, has set this to -1."""
    paused = _Int(19)
    """1: wait at the next boundary; the agent writes it, and the next four, the number last."""
    ordered = _Int(20)
    """Number of the last order to go back,"""
    ordered_to = _Int(28)
    """the step,"""
    ordered_skip = _Int(29)
    """how many batches to leave out after it,"""
    ordered_by = _Int(30)
    """and why: the place in `OrderedBy`."""
    declined = _Int(31)
    """Number of the last of them that could not be done, since not all ranks have the state."""
    fetching = _Int(33)
    """1 while this rank's part of the state that it starts from is on its way from another node; the agent writes it."""
    until_ns = _Int(34)
    """Where others may begin a generation without this node: no boundary is crossed after this time, when the agent's lease may be over. 0:
    always. The agent writes it."""

    doing = _Int(24)
    """Doing: what the rank does between two boundaries."""
    listens = _Int(25)
    """Number of the signal that makes this process write its stacks; 0: none does, and it would die of one."""
    main_thread = _Int(26)
    """Its main thread, as stacks name it."""
    tells = _Int(27)
    """1 once a loop that we know, or a Session, is there: steps will be told; 2: and it can leave data out."""

    first_step = _Int(_SIGHTINGS_COUNT_AT // 8 + 1)
    """Which step it was that was finished first in this generation, at `stepped_ns`, which is stored after it."""

    sightings = _Int(_SIGHTINGS_COUNT_AT // 8)
    """How many faults the ranks have found in this generation while they only observe; `sighting(ordinal)` tells of the last ones."""

    repeated = _Int(_SIGHTINGS_COUNT_AT // 8 + 5)
    """Repeated: what this rank found when it computed steps again."""

    launched_pid = _Int(_SIGHTINGS_COUNT_AT // 8 + 2)
    """The process that the launcher has started as this rank, once it ends its ranks; 0 before. It writes this, and the next two."""
    seen = _Int(_SIGHTINGS_COUNT_AT // 8 + 3)
    """How the launcher found it then: 0: not told; 1: alive, so the launcher has ended it; else 1000 more than its exit code."""
    launcher_signal = _Int(_SIGHTINGS_COUNT_AT // 8 + 4)
    """The signal that has ended the launcher itself; 0: none that it could tell of."""

    __slots__ = ("floats", "ints", "raw")

    def __init__(self, buffer: memoryview) -> None:
        self.raw = buffer
        self.ints = buffer.cast("q")
        self.floats = buffer.cast("d")

    @classmethod
    def place(cls, name: str) -> int:
        """Of a field that is a number, among all numbers of the page."""
        field: _Int = vars(cls)[name]
        return field.index

    @property
    def loss(self) -> float:
        return self.floats[5]

    @property
    def grad_norm(self) -> float:
        return self.floats[6]

    def beat(self, step: int, loss: float, grad_norm: float, now_ns: int) -> None:
        """The heartbeat of one finished step."""
        floats, ints = self.floats, self.ints
        floats[5] = loss
        floats[6] = grad_norm
        ints[4] = step
        ints[7] = now_ns

    @property
    def asked(self) -> tuple[int, ...]:
        """What the agent asks for, all that a row tells of: `paused`, `ordered`, `order`, `durable`, `copies`."""
        return _ASKED.unpack_from(self.raw, _ASKED_AT)

    def stalled(self, held_ns: int) -> None:
        """The loop has spent so much more time in our hands."""
        self.ints[15] += held_ns

    def timed(self, own_ns: int, computing_ns: int, queued_ns: int, steps: int = 1) -> None:
        """So many more steps are done, and took so much of this rank's own time (`straggler.Spent`)."""
        place, ints = _SPENT_AT // 8, self.ints
        ints[place] += own_ns
        ints[place + 1] += computing_ns
        ints[place + 2] += queued_ns
        ints[place + 3] += steps

    @property
    def spent(self) -> tuple[int, ...]:
        """All steps together: own, computing, queued, in nanoseconds; and how many steps. A reader may see a step in one that is not in
        another yet."""
        return tuple(self.ints[_SPENT_AT // 8 : _SPENT_AT // 8 + 4].tolist())

    def rewound(self, done: Rewound) -> None:
        """Note a rewind in place that is done."""
        REWINDS.put(self.raw, self.rewinds + 1, done)
        self.floats[5] = self.floats[6] = math.nan  # they are of another step
        self.step = done.to
        self.rewinds += 1  # last: from here on the agent reads it

    def rewind(self, ordinal: int) -> Rewound:
        """The `ordinal`-th rewind, one of the last eight."""
        return REWINDS.get(self.raw, ordinal)

    def sighted(self, found: Sighted) -> None:
        """Note a fault that nothing is done about."""
        SIGHTINGS.put(self.raw, self.sightings + 1, found)
        self.sightings += 1  # last: from here on the agent reads it

    def sighted_again(self, step: int) -> None:
        """The newest of these faults is still there."""
        self.ints[SIGHTINGS.place(self.sightings) // 8 + 2] = step

    def sighting(self, ordinal: int) -> Sighted:
        """The `ordinal`-th such fault, one of the last two."""
        return SIGHTINGS.get(self.raw, ordinal)

    def speak(self, ordinal: int, row: Sequence[float]) -> None:
        """Say the `ordinal`-th row (from 1) to whoever reads this page: the other ranks of the node. It may be said when all of them
        have heard the one before; the one before that is gone."""
        place = _PLACES[ordinal % 2]
        _ROW.pack_into(self.raw, place + 8, *row)
        self.ints[place // 8] = ordinal  # last: from here on the others read it

    @property
    def spoken(self) -> int:
        """How many rows have been said."""
        return max(self.ints[place // 8] for place in _PLACES)

    def hear(self, ordinal: int) -> tuple[float, ...] | None:
        """The `ordinal`-th row of the rank that this page belongs to; None while it has not said it."""
        said = _SAID.unpack_from(self.raw, _PLACES[ordinal % 2])  # in their order: the ordinal is read first
        return said[1:] if said[0] == ordinal else None

    def clear(self, generation: int, rank: int = -1) -> None:
        """Ready for the rank of another generation; the agent does it while no rank is alive."""
        self.raw[:] = bytes(PAGE_BYTES)
        self.generation = generation
        self.rank = rank
        self.step = self.durable_step = -1

    @property
    def unsaved(self) -> str:
        """Why this rank's state could not be saved when it was last tried; empty while it can."""
        length = max(0, min(self.ints[_UNSAVED_AT // 8], REWINDS_AT - _UNSAVED_AT - 8))
        return bytes(self.raw[_UNSAVED_AT + 8 : _UNSAVED_AT + 8 + length]).decode(errors="replace")

    @unsaved.setter
    def unsaved(self, why: str) -> None:
        data = _cut(why, REWINDS_AT - _UNSAVED_AT - 8)
        self.ints[_UNSAVED_AT // 8] = 0
        self.raw[_UNSAVED_AT + 8 : _UNSAVED_AT + 8 + len(data)] = data
        self.ints[_UNSAVED_AT // 8] = len(data)

    def say_farewell(self, **words: Any) -> None:
        """Leave a last message (a small JSON object; long texts are cut) for the agent to read after this process is gone."""
        data = b""
        for limit in (1500, 300, 80):
            short = {k: v[-limit:] if isinstance(v, str) else v for k, v in words.items()}
            data = json.dumps(short, ensure_ascii=False).encode(errors="backslashreplace")
            if len(data) <= _FAREWELL_END - _FAREWELL_AT - 8:
                break
        self.raw[_FAREWELL_AT + 8 : _FAREWELL_AT + 8 + len(data)] = data
        self.ints[_FAREWELL_AT // 8] = len(data)

    def farewell(self) -> dict[str, Any]:
        """The last message, empty when there is none."""
        length = self.ints[_FAREWELL_AT // 8]
        if not 0 < length <= _FAREWELL_END - _FAREWELL_AT - 8:
            return {}
        try:
            words = json.loads(bytes(self.raw[_FAREWELL_AT + 8 : _FAREWELL_AT + 8 + length]))
        except (ValueError, RecursionError):  # killed while it was writing, or somebody else has written there
            return {}
        return {k: v for k, v in words.items() if isinstance(v, str | int)} if isinstance(words, dict) else {}

    def say_seen(self, pid: int, code: int | None) -> None:
        """The launcher ends its ranks, and has found this one so. code: its exit code; None: it lives."""
        self.seen = _LIVED if code is None else _CODES + code
        self.launched_pid = pid

    @property
    def ended_by_launcher(self) -> bool:
        """Whether it lived until the launcher has ended it."""
        return self.seen == _LIVED

    @property
    def seen_code(self) -> int | None:
        """The exit code that the launcher had seen before it ended the others; None: it had seen none."""
        return self.seen - _CODES if self.seen > _LIVED else None

    def release(self) -> None:
        """Let go of the buffer, so that its mapping can be closed."""
        self.ints.release()
        self.floats.release()
        self.raw.release()


def _cut(said: str, most: int) -> bytes:
    """The text in UTF-8, of `most` bytes at most: where it is longer, up to the end of a word, and three dots."""
    data = said.encode(errors="backslashreplace")
    if len(data) <= most:
        return data
    kept = data[: most - len("…".encode())].decode(errors="ignore")
    words = kept.rpartition(" ")[0]
    return f"{words if len(words) > len(kept) // 2 else kept}…".encode()
