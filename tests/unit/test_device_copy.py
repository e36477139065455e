"""When a large state gets memory for its copies to the host."""

from types import SimpleNamespace
from typing import Any

import pytest

from mt_resilient.training.snapshot import device_copy
from mt_resilient.training.snapshot.device_copy import Offload

MODEL, WITH_OPTIMIZER, WITH_GRADIENTS = (number << 30 for number in (2, 6, 8))


@pytest.mark.parametrize(
    ("sizes", "apart", "requested"),
    [
        ([MODEL, WITH_GRADIENTS, WITH_OPTIMIZER], False, [WITH_OPTIMIZER]),
        ([WITH_OPTIMIZER] * 3, False, [WITH_OPTIMIZER]),
        # gradients are accumulated over two steps
        ([WITH_OPTIMIZER, WITH_GRADIENTS] * 3, False, [WITH_OPTIMIZER, WITH_GRADIENTS]),
        ([WITH_GRADIENTS, WITH_OPTIMIZER], True, [WITH_GRADIENTS]),  # the user has set an interval
        ([1 << 20], False, [1 << 20]),
    ],
)
def test_a_large_state_gets_memory_once_it_no_longer_grows(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], apart: bool, requested: list[int]
) -> None:
    monkeypatch.setattr(device_copy, "_FIRST_S", 0.0)
    found: list[int] = []
    offload: Any = SimpleNamespace(
        _largest_bytes=0, _prepared=(0, 0), _again=False, _pinned={}, under_way=list,
        _rooms=SimpleNamespace(put=lambda request: found.append(request[0].image.memory_bytes)),
    )  # fmt: skip
    for size in sizes:
        wanted: Any = SimpleNamespace(image=SimpleNamespace(memory_bytes=size), pieces=1)
        Offload.room(offload, wanted, 100, apart=apart)
    assert found == requested
