"""A slot's memory is registered piece by piece: beside a training at moments that disturb no copies, and otherwise without pauses."""

from types import SimpleNamespace
from typing import Any

import pytest

from mt_resilient.training.snapshot import pinned_memory, slot_memory
from mt_resilient.training.snapshot.device_copy import Offload
from mt_resilient.training.snapshot.pinned_memory import Pinned
from mt_resilient.training.snapshot.slot_memory import SlotMemory

MEMORY = memoryview(bytearray(20))
WANTED: Any = SimpleNamespace(image=SimpleNamespace(memory_bytes=20), pieces=0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in order. Registering a piece takes 2 s."""
    found: list[str] = []
    times = iter(range(0, 1000, 2))
    runtime = SimpleNamespace(
        address=id,
        populate=lambda piece: found.append(f"populate {len(piece)}"),
        register=lambda kind, piece: found.append(f"register {len(piece)}") or True,
        unregister=lambda kind, piece: found.append(f"unregister {len(piece)}"),
    )
    monkeypatch.setattr(pinned_memory, "device", runtime)
    monkeypatch.setattr(pinned_memory, "PIECE_BYTES", 8)
    monkeypatch.setattr(pinned_memory, "monotonic_s", lambda: next(times))
    monkeypatch.setattr(pinned_memory, "sleep", lambda seconds: found.append(f"sleep {seconds}") if seconds else None)
    return found


def pinned() -> Pinned:
    slot: Any = SimpleNamespace(reserve=lambda wanted, table_bytes: (1 << 20, MEMORY))
    return Pinned("cuda", slot)


def test_beside_a_training_each_piece_waits_for_quiet_and_a_rest_follows(told: list[str]) -> None:
    memory = pinned()
    memory.prepare(WANTED, 0, lambda: told.append(f"quiet, with {memory._ready_bytes} ready"))
    assert told == [
        *("populate 8", "quiet, with 0 ready", "register 8", "sleep 6.0"),
        *("populate 8", "quiet, with 8 ready", "register 8", "sleep 6.0"),
        *("populate 4", "quiet, with 16 ready", "register 4", "sleep 6.0"),
    ]
    assert memory.ready(WANTED, 0)


def test_a_loop_that_waits_gets_memory_without_pauses_and_only_once(told: list[str]) -> None:
    memory = pinned()
    for _ in range(2):
        memory.prepare(WANTED, 0)
    assert told == ["register 8", "register 8", "register 4"]
    memory.release()
    assert told[3:] == ["unregister 8", "unregister 8", "unregister 4"]
    assert not memory.ready(WANTED, 0)


def test_memory_is_ready_before_the_rest(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    memory, ready = pinned(), []
    monkeypatch.setattr(pinned_memory, "sleep", lambda seconds: ready.append(memory._ready_bytes))
    memory.prepare(WANTED, 0, lambda: None)
    assert ready == [8, 16, 20]


@pytest.mark.parametrize("considerate", [True, False])
def test_no_memory_is_registered_beside_copies_unless_the_loop_waits_for_it(
    considerate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Over(BaseException):
        pass

    waited: list[str] = []
    job = SimpleNamespace(over=SimpleNamespace(wait=lambda: waited.append("the copies have arrived")))
    requests: list[Any] = [(WANTED, 0, [], considerate)]

    def request() -> Any:
        if not requests:
            raise Over
        return requests.pop()

    offload: Any = SimpleNamespace(_under_way=[job])
    memory: Any = SimpleNamespace(
        _device=SimpleNamespace(type="cuda"),
        _quiet=lambda: Offload.finish(offload),
        _rooms=SimpleNamespace(get=request),
    )
    monkeypatch.setattr(slot_memory.device, "allow_capture", lambda kind: True)
    monkeypatch.setattr(slot_memory.device, "module", lambda kind: SimpleNamespace(set_device=lambda where: None))
    requests[0][2].append(SimpleNamespace(prepare=lambda wanted, table_bytes, quiet: quiet and quiet()))
    with pytest.raises(Over):
        SlotMemory._make_room(memory)
    assert waited == ["the copies have arrived"] * considerate
    assert offload._under_way == [job], "only the loop's thread changes the list, which it may extend at this moment"


def test_the_end_of_the_loop_ends_the_registration_after_a_piece(told: list[str]) -> None:
    memory = pinned()
    memory.prepare(WANTED, 0, memory.stop)
    assert told == ["populate 8", "register 8", "sleep 6.0"]
