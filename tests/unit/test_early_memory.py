"""A restarted rank registers its slot while the script builds its model, once the script has opened a device."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import Header, RankArena
from mt_resilient.training.snapshot import early_memory, pinned_memory

from .test_handoff import HANDOFF

STEP, BYTES = 7, 1 << 20
REAL_ENDS = early_memory._ends


class Script:
    """A rank's process, up to its Session. The device's context and the end of the wait for a Session come when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fds = arena.create(ranks=1, slots=3)
        paths = tuple(arena.paths(self.fds, os.getpid())[0])
        self.page = SimpleNamespace(pid=os.getpid())
        self.at: Any = SimpleNamespace(
            handoff=replace(HANDOFF, arena=(paths,), resume_step=STEP), page=self.page, local_rank=0, rank=3, world=4
        )
        self.calls: list[Callable[[], None]] = []
        self.devices: list[int] = []
        self.looks: Callable[[], None] | None = None
        self.over = threading.Event()
        self.told: list[Any] = []
        self.refuses: Exception | None = None
        runtime = SimpleNamespace(
            contexts=lambda kind: self._contexts,
            module=lambda kind: SimpleNamespace(set_device=lambda where: self.told.append(("device", where))),
            allow_capture=lambda kind: self.told.append("captures may go on"),
            address=lambda memory: 1,
            register=self._register,
            unregister=lambda kind, piece: self.told.append("unregistered"),
        )
        monkeypatch.setattr(early_memory, "device", runtime)
        monkeypatch.setattr(pinned_memory, "device", runtime)
        monkeypatch.setattr(early_memory, "torch", SimpleNamespace(cuda=SimpleNamespace(_lazy_call=self.calls.append)))
        monkeypatch.setattr(early_memory, "_ends", self._ends)

    def _contexts(self) -> list[int]:
        if self.looks:
            self.looks()
        return self.devices

    def _register(self, kind: str, piece: memoryview) -> bool:
        if self.refuses:
            raise self.refuses
        self.told.append(("registered", kind))
        return True

    def _ends(self, requests: SimpleQueue[None], seconds: float) -> bool:
        if seconds == early_memory._UNUSED_S:
            assert self.over.wait(60)
        return False

    def snapshot(self, **more: Any) -> None:
        wanted = {"generation": 1, "step": STEP, "rank": 3, "world": 4, "payload_bytes": BYTES} | more
        claimed = RankArena(self.at.handoff.arena[0]).claim(Header(**wanted), b"{}")
        assert claimed
        claimed[0].staged()
        claimed[0].seal()

    def opens_a_device(self) -> None:
        for call in self.calls:
            call()

    @staticmethod
    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "mt-resilient_register"]

    def ends(self) -> None:
        self.over.set()
        for each in self.threads():
            each.join(60)
        assert not self.threads()
        assert not early_memory._arenas
        assert not early_memory._pinned


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    found = Script(monkeypatch)
    yield found
    found.ends()
    for fd in found.fds[0]:
        os.close(fd)


def test_a_session_finds_its_slot_registered(script: Script) -> None:
    script.snapshot()
    early_memory.begin(script.at)
    assert not script.threads(), "nothing runs before the script opens a device"
    script.devices = [2]
    script.opens_a_device()
    slots = early_memory.arena(script.at)
    slot = slots.holding(STEP)
    assert slot
    memory, header = early_memory.pinned("cuda", slot), slot.header()
    memory.wait(header.image.memory_bytes)
    assert memory.ready(header, header.table_bytes)
    assert script.told == [("device", 2), "captures may go on", ("registered", "cuda")]
    memory.prepare(header, header.table_bytes)
    script.ends()
    assert script.told[3:] == [], "it is registered once, and what a Session has taken stays"
    others = early_memory.arena(script.at)
    assert others is not slots, "the next Session of the process has slots of its own"
    others.close()
    slots.close()


def test_nothing_is_registered_before_the_script_has_a_context(script: Script) -> None:
    script.snapshot()
    looked = threading.Semaphore(0)
    script.looks = looked.release
    early_memory.begin(script.at)
    script.opens_a_device()
    for _ in range(3):
        assert looked.acquire(timeout=60)
    assert script.told == []
    script.devices = [1, 0]
    script.over.set()
    script.ends()
    assert script.told == [("device", 1), "captures may go on", ("registered", "cuda"), "unregistered"]


def test_what_no_session_takes_is_released(script: Script) -> None:
    script.snapshot()
    script.devices = [0]
    early_memory.begin(script.at)
    script.opens_a_device()
    script.ends()
    assert script.told[-1] == "unregistered"


@pytest.mark.parametrize("present", [True, False])
def test_a_process_without_a_context_or_a_driver_ends_the_wait(
    script: Script, monkeypatch: pytest.MonkeyPatch, present: bool
) -> None:
    script.snapshot()
    times = iter(range(1000))
    monkeypatch.setattr(early_memory, "monotonic_s", lambda: 10.0 * next(times))
    if not present:
        early_memory.device.contexts = lambda kind: None  # type: ignore[assignment]
    early_memory.begin(script.at)
    script.opens_a_device()
    script.ends()
    assert script.told == []


def test_an_error_leaves_the_start_as_it_would_be_without(script: Script) -> None:
    script.snapshot()
    script.devices, script.refuses = [0], RuntimeError("out of memory")
    early_memory.begin(script.at)
    script.opens_a_device()
    script.ends()
    script.refuses = None
    slots = early_memory.arena(script.at)
    slot = slots.holding(STEP)
    assert slot
    memory, header = early_memory.pinned("cuda", slot), slot.header()
    memory.prepare(header, header.table_bytes)
    assert memory.ready(header, header.table_bytes)
    slots.close()


@pytest.mark.parametrize(
    "what", ["no snapshot", "another step", "another rank", "another number of ranks", "no agent", "child"]
)
def test_no_thread_starts_if(script: Script, what: str) -> None:
    more = {"another step": {"step": 8}, "another rank": {"rank": 2}, "another number of ranks": {"world": 2}}
    if what != "no snapshot":
        script.snapshot(**more.get(what, {}))
    if what == "no agent":
        script.at.handoff = replace(script.at.handoff, arena=(("/nowhere",),))
    early_memory.begin(script.at)
    if what == "child":  # forked before any device was opened, with all that torch is to call
        script.page.pid = os.getpid() + 1
    script.devices = [0]
    script.opens_a_device()
    assert (script.threads(), script.told) == ([], [])


def test_a_forked_child_has_slots_of_its_own(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script.snapshot()
    script.devices = [0]
    early_memory.begin(script.at)
    script.opens_a_device()
    parent = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(early_memory.os, "getpid", lambda: parent + 1)
        slots = early_memory.arena(script.at)
    assert slots is not early_memory._arenas[parent]
    slot = slots.holding(STEP)
    assert slot
    assert not early_memory.pinned("cuda", slot).ready(slot.header(), 2)
    slots.close()


def test_a_torch_without_devices_is_left_alone(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_memory, "torch", SimpleNamespace(cuda=SimpleNamespace()))
    early_memory.begin(script.at)
    assert script.calls == []


def test_a_process_that_ends_ends_the_wait(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is inside torch when Python exits aborts the process."""
    closes: list[Callable[[], bool]] = []
    monkeypatch.setattr(pinned_memory.atexit, "register", closes.append)
    monkeypatch.setattr(early_memory, "_ends", REAL_ENDS)
    monkeypatch.setattr(pinned_memory, "END_S", 60.0)
    script.snapshot()
    early_memory.begin(script.at)
    script.opens_a_device()
    (close,) = closes
    assert script.threads()
    assert close()
    script.devices = [0]
    script.ends()
    assert script.told == []
