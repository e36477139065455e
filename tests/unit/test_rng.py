"""Streams of random numbers beside torch's own come back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import _random

from mt_resilient.training.state.rng import Randomness

from .lives import Life


def test_the_stream_of_dtensors_comes_back_in_place_and_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before torch 2.9: states by name, which a draw may change in place."""

    def tracker(offset: int) -> SimpleNamespace:
        return SimpleNamespace(rng_states={"parallel-rng": torch.tensor([7, offset], dtype=torch.uint8)})

    live, other = tracker(1), tracker(0)
    monkeypatch.setattr(_random, "_rng_tracker", live)
    life = Life()
    kept, state = life.snapshot(), Randomness(()).collect()
    live.rng_states["parallel-rng"][1] = 5
    life.restore(kept)
    assert live.rng_states["parallel-rng"].tolist() == [7, 1]
    monkeypatch.setattr(_random, "_rng_tracker", other)
    for _ in range(2):  # the generators are restored again right before the first step
        Randomness(()).restore(state)
        assert other.rng_states["parallel-rng"].tolist() == [7, 1]
        other.rng_states["parallel-rng"][1] = 9


@pytest.mark.parametrize("tracker", [None, SimpleNamespace(), SimpleNamespace(rng_states={})])
def test_without_such_a_stream_nothing_of_it_is_saved(tracker: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_random, "_rng_tracker", tracker)
    state = Randomness(()).collect()
    assert "dtensor" not in state
    Randomness(()).restore({**state, "dtensor": {"parallel-rng": torch.zeros(2)}})
