"""The measurement of a rank's own time changes nothing in what it measures."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.training.boundary.step_timer import OwnTime


class Unfinished(dist.Work):
    """As a library's, without a `wait` of its own."""


class Waits(dist.Work):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


@pytest.mark.parametrize("measured", [True, False])
def test_work_of_another_library_waits_as_before(monkeypatch: pytest.MonkeyPatch, measured: bool) -> None:
    monkeypatch.setattr(dist.Work, "wait", dist.Work.wait)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    own_time = OwnTime(Page(memoryview(bytearray(PAGE_BYTES))))
    if measured:
        own_time.begin(1)
    with pytest.raises(RuntimeError, match="timed out"):
        Unfinished().wait(timedelta(milliseconds=1))
    assert Waits().wait()
    assert (own_time._waited_ns > 0) is measured
