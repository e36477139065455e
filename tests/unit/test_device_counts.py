"""While the warm process imports the script's libraries, it answers how many devices there are without asking the driver."""

import os

import pytest
import torch

from mt_resilient.training.warm import preload
from mt_resilient.training.warm.side_effects import Watch


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 2), ("", 0), ("-1", 0), ("0", 1), ("1,0", 2), ("0,-1,1", 1), ("0,1,2", 2), ("GPU-8f2a", 1)],
)
def test_as_many_devices_as_the_driver_would_show(
    visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = os.listdir
    monkeypatch.setattr(
        os, "listdir", lambda place: ["nvidia0", "nvidia1", "nvidiactl"] if place == "/dev" else listed(place)
    )
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for name in ("device_count", "is_available"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))  # put back whatever happens
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    watch = Watch((), terminal=False)
    with preload._counting_devices(watch):
        watch.after["torch"]()
        if visible is not None:  # as the script's opening may do
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert (torch.cuda.device_count(), torch.cuda.is_available()) == (count, count > 0)
