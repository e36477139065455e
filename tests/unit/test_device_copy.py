"""When a large state gets memory for its copies to the host, and what counts as waiting for them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD

from mt_resilient.training.snapshot import device_copy, slot_memory
from mt_resilient.training.snapshot.device_copy import Offload
from mt_resilient.training.snapshot.slot_memory import SlotMemory

MODEL, WITH_OPTIMIZER, WITH_GRADIENTS = (number << 30 for number in (2, 6, 8))


@pytest.mark.parametrize(
    ("sizes", "stride", "requested"),
    [
        ([MODEL, WITH_GRADIENTS, WITH_OPTIMIZER], 1, [WITH_OPTIMIZER]),
        ([WITH_OPTIMIZER] * 3, 1, [WITH_OPTIMIZER]),
        # gradients are accumulated over two steps
        ([WITH_OPTIMIZER, WITH_GRADIENTS] * 3, 1, [WITH_OPTIMIZER, WITH_GRADIENTS]),
        ([WITH_GRADIENTS, WITH_OPTIMIZER], 1000, [WITH_GRADIENTS]),  # the user has set an interval
        ([1 << 20], 1, [1 << 20]),
    ],
)
def test_a_large_state_gets_memory_once_it_no_longer_grows(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], stride: int, requested: list[int]
) -> None:
    monkeypatch.setattr(slot_memory, "_FIRST_S", 0.0)
    found: list[int] = []
    memory: Any = SimpleNamespace(
        _largest_bytes=0, _prepared=(0, 0), _again=False, pinned={},
        _rooms=SimpleNamespace(put=lambda request: found.append(request[0].image.memory_bytes)),
    )  # fmt: skip
    for size in sizes:
        wanted: Any = SimpleNamespace(image=SimpleNamespace(memory_bytes=size), pieces=1)
        SlotMemory.ready(memory, wanted, 100, stride)
    assert found == requested


@pytest.mark.parametrize("read", [None, "read"])
def test_the_device_is_asked_how_long_it_waits_from_before_the_host_does(read: str | None) -> None:
    said: list[str] = []
    names = iter(["before", "after"])

    def event(**_: bool) -> Any:
        name = next(names)
        return SimpleNamespace(record=lambda stream: said.append(name))

    stream = SimpleNamespace(wait_event=lambda event: said.append(event))
    job = SimpleNamespace(issued=SimpleNamespace(wait=lambda: said.append("issued")), read=read, waits=[])
    module = SimpleNamespace(Event=event, current_stream=lambda where: stream)
    offload: Any = SimpleNamespace(
        _module=module, device=None, under_way=lambda: [job], _captures=lambda: False, stepped=set(), captured=set()
    )
    Offload._before_update(offload, SGD([torch.zeros(1)]))
    assert said == ["before", "issued", *(("read", "after") if read else ())]
    assert len(job.waits) == (read is not None)


def test_copies_go_on_if_the_runtime_refuses_to_let_others_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(BaseException):
        pass

    def refused(*_: object) -> Any:
        raise OSError

    def reached() -> Any:
        raise Reached

    monkeypatch.setattr(device_copy.device, "allow_capture", refused)
    module = SimpleNamespace(set_device=lambda where: None)
    offload: Any = SimpleNamespace(
        _module=module, device=SimpleNamespace(type="cuda"), _jobs=SimpleNamespace(get=reached)
    )
    with pytest.raises(Reached):
        Offload._carry(offload)
