"""Values given to the Session that share an object or memory with each other, or with data that the Session does not have. Each is
restored in the same process and in a new one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from mt_resilient.resilience.errors import SnapshotError

from .kept import Meter, Snapshot
from .lives import Life, Made, comes_back


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("order", [("buffer", "part"), ("part", "buffer")])
def test_a_value_and_a_view_of_it_are_both_filled(order: tuple[str, str], numpy: bool) -> None:
    def made() -> Made:
        buffer: Any = np.zeros(6) if numpy else torch.zeros(6)
        given = {"buffer": buffer, "part": buffer[3:]}

        def step(n: int) -> None:
            buffer[n] += n + 1
            given["part"][2] += 1

        return {name: given[name] for name in order}, step, lambda: (buffer.tolist(), given["part"].tolist())

    comes_back(made, 4, 1)


@pytest.mark.parametrize("order", [("history", "state"), ("state", "history")])
@pytest.mark.parametrize("kind", [list, Meter, dict, lambda: torch.zeros(6)])
def test_a_value_that_enters_another_one_is_one_object(order: tuple[str, str], kind: Any) -> None:
    def made() -> Made:
        given: dict[str, Any] = {"history": kind(), "state": {"h": None, "n": 0}}
        history, state = given["history"], given["state"]

        def step(n: int) -> None:
            state["n"] = n
            state["h"] = history if n % 3 != 2 else kind()
            if isinstance(history, list):
                history.append(n)
            elif isinstance(history, dict):
                history[n] = [n]
            elif isinstance(history, Meter):
                history.total += n
            else:
                history[n] += 1

        def looks() -> Any:
            return state["n"], state["h"] is history, str(vars(history) if isinstance(history, Meter) else history)

        return {name: given[name] for name in order}, step, looks

    for steps in (2, 3, 4):
        comes_back(made, steps, 1 if steps < 4 else 0)


def test_two_names_of_one_object_remain_so() -> None:
    def made() -> Made:
        state: dict[str, Any] = {"n": 0}

        def step(n: int) -> None:
            state["n"], state["own"] = n + 1, state

        return {"a": state, "b": state}, step, lambda: (state["n"], state.get("own", state) is state)

    comes_back(made, 2, 1)


def test_an_object_of_another_source_is_not_filled_in_its_place() -> None:
    history, state = [1], {"h": [2]}
    life = Life(state=state, history=history)
    kept = life.snapshot()
    state["h"] = history
    history.append(3)
    life.restore(kept)
    assert (state, history) == ({"h": [2]}, [1])
    assert state["h"] is not history


@pytest.mark.parametrize("view", [torch.conj, lambda each: each.conj().imag])
def test_a_conjugated_view_is_refused(view: Any) -> None:
    numbers = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(SnapshotError, match=r"resolve_conj\(\)"):
        Life(state={"numbers": numbers, "view": view(numbers)}).snapshot()


class Warming(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler of a script, with torch's own way to save it."""

    state_dict = torch.optim.lr_scheduler.LRScheduler.state_dict
    load_state_dict = torch.optim.lr_scheduler.LRScheduler.load_state_dict


def rate(step: int) -> float:
    return 1 / (1 + step)


def test_an_attribute_that_comes_to_a_scheduler_after_the_snapshot_goes_again() -> None:
    def made() -> Made:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
        scheduler = Warming(optimizer, rate)

        def step(n: int) -> None:
            if n >= 2:
                scheduler.best = n  # type: ignore[attr-defined]
            scheduler.step()

        return {"scheduler": scheduler}, step, lambda: (scheduler.last_epoch, getattr(scheduler, "best", None))

    comes_back(made, 2, 1)
    comes_back(made, 3, 1)


def test_a_copy_of_a_models_state_dict_keeps_its_versions() -> None:
    def made() -> Made:
        best: dict[str, Any] = {}

        def step(n: int) -> None:
            best["weights"] = copy.deepcopy(torch.nn.BatchNorm1d(2 + n).state_dict())

        return {"best": best}, step, lambda: (list(best["weights"]), dict(best["weights"]._metadata))

    comes_back(made, 2, 1, changes=False)


class Versioned(torch.nn.Linear):
    _version = 2

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}more"] = torch.ones(1)


def test_a_modules_own_load_is_told_the_version() -> None:
    model = Versioned(1, 1)
    kept = Snapshot(Life(model=model).sources)
    seen: list[Any] = []
    model._load_from_state_dict = lambda state, prefix, metadata, *rest: seen.append(metadata)  # type: ignore[method-assign]
    kept.restore()
    assert seen == [{"version": 2}]


class Recalling(torch.nn.Linear):
    def __init__(self, last: Any) -> None:
        super().__init__(2, 2)
        self.last = last


PLACES: dict[str, tuple[Any, Any]] = {
    "value": (lambda row: {"last": row}, lambda given, row: given.update(last=row)),
    "value in a list": (lambda row: {"last": [row]}, lambda given, row: given.update(last=[row])),
    "attribute": (Recalling, lambda given, row: setattr(given, "last", row)),
    "late attribute": (lambda row: Recalling(None), lambda given, row: setattr(given, "last", row)),
}


@pytest.mark.parametrize("part", [lambda data, n: data[n], lambda data, n: data.T[:1, n : n + 3]])
@pytest.mark.parametrize("kind", [torch.arange, np.arange])
@pytest.mark.parametrize("place", PLACES)
def test_a_rewind_does_not_write_into_the_scripts_data(place: str, kind: Any, part: Any) -> None:
    make, put = PLACES[place]
    data = kind(20.0).reshape(10, 2)
    before, given = data.tolist(), make(part(data, 0) * 0)
    life = Life(given=given)
    snapshots = []
    for n in range(5):
        snapshots.append(life.snapshot())
        put(given, part(data, n))
    for _ in range(2):
        life.snapshot()
        life.restore(snapshots[3])
        assert data.tolist() == before
        last = given["last"] if isinstance(given, dict) else given.last
        assert (last[0] if isinstance(last, list) else last).tolist() == part(data, 2).tolist()


@pytest.mark.parametrize("kind", [torch.zeros, np.zeros])
def test_a_part_of_the_scripts_memory_that_was_there_at_first_is_filled(kind: Any) -> None:
    buffer = kind(6)
    state = {"part": buffer[3:]}
    life = Life(state=state)
    kept = life.snapshot()
    buffer += 1
    life.restore(kept)
    assert buffer.tolist() == [1, 1, 1, 0, 0, 0]


def test_a_late_row_is_not_written_into_where_the_model_had_no_attribute_at_first() -> None:
    data, model = torch.arange(6.0).reshape(3, 2), torch.nn.Linear(2, 2)
    life = Life(model=model)
    life.snapshot()
    model.late = data[0]
    kept = life.snapshot()
    model.late = data[1]
    for _ in range(2):
        life.restore(kept)
        assert (data[1].tolist(), model.late.tolist()) == ([2, 3], [0, 1])
