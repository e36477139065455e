"""Accelerate counts the batches that it accumulates: a recovery puts the counts back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mt_resilient import Session
from mt_resilient.training.state.step_counts import StepCounts

accelerate = pytest.importorskip("accelerate")
local_sgd = pytest.importorskip("accelerate.local_sgd")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def accelerator() -> accelerate.Accelerator:
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)


def looked(**named: object) -> StepCounts:
    counts = StepCounts(named)
    counts.look(lambda _: None)
    return counts


def told(**named: object) -> str:
    found: list[str] = []
    StepCounts(named).look(found.append)
    return " ".join(found)


def synchronized(accelerator: accelerate.Accelerator, batches: int) -> list[bool]:
    """At which of the next batches the gradients synchronize."""
    model, found = torch.nn.Linear(1, 1), []
    for _ in range(batches):
        with accelerator.accumulate(model):
            found.append(accelerator.sync_gradients)
    return found


def test_gradients_synchronize_at_the_same_batches_after_a_rewind_and_after_a_restart() -> None:
    live = accelerator()
    counts = looked()
    synchronized(live, 6)
    kept = counts.collect()
    expected = synchronized(live, 5)
    assert expected == [False, True, False, False, False]
    counts.restore(kept)
    assert not live.sync_gradients
    assert synchronized(live, 5) == expected

    live.step, live.sync_gradients = 0, True  # as in a new process
    looked().restore(kept)
    assert synchronized(live, 5) == expected


def test_local_sgd_goes_on_counting() -> None:
    live = local_sgd.LocalSGD(accelerator(), torch.nn.Linear(1, 1), 8)
    counts = looked()
    live.step()
    kept = counts.collect()
    live.step()
    counts.restore(kept)
    assert live.num_steps == 1


def test_several_are_told_apart_by_the_names_that_a_session_gets() -> None:
    first, second = accelerator(), accelerator()
    assert "several objects of the class Accelerator" in told()
    named = {"first": first, "second": second}
    assert not told(**named)
    counts = looked(**named)
    first.step, second.step = 1, 2
    kept = counts.collect()
    first.step, second.step = 5, 5
    StepCounts({"second": second, "first": first}).restore(kept)
    assert (first.step, second.step) == (1, 2)


def test_a_session_takes_an_accelerator() -> None:
    session = Session(model=torch.nn.Linear(1, 1), accelerator=accelerator())
    assert [*session.steps(2)] == [0, 1]


def test_what_is_made_behind_the_session_counts_too() -> None:
    counts = StepCounts({})
    live = local_sgd.LocalSGD(accelerator(), torch.nn.Linear(1, 1), 8)
    counts.look(lambda _: None)
    live.step()
    kept = counts.collect()
    live.step()
    counts.restore(kept)
    assert live.num_steps == 1
