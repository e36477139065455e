"""The place of data loaders that Megatron does not make itself."""

from __future__ import annotations

from typing import Any

import pytest

from mt_resilient.training.loops.external_data import ExternalData, external_data


class Plain:
    """As an iterator over files."""

    def __next__(self) -> int:
        return 1


class Saves:
    """As `megatron.energon`'s loaders."""

    def __init__(self) -> None:
        self.at = 0

    def save_state_rank(self) -> dict[str, int]:
        return {"at": self.at}

    def restore_state_rank(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Unsavable(Saves):
    def save_state_rank(self) -> Any:
        return {"at": iter(())}


class Fails(Saves):
    def save_state_rank(self) -> Any:
        raise RuntimeError("not yet")


class Around:
    """As Megatron's example wraps Energon's loader: `save_state` is there, and what restores is inside."""

    def __init__(self, loader: Any) -> None:
        self._dataloader = loader

    def save_state(self) -> Any:
        return self._dataloader.save_state_rank()


class RerunDataIterator:
    """As Megatron's. Its state is not the loader's place."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def state_dict(self) -> dict[str, Any]:
        return {"saved_microbatches": []}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Endless:
    def __getattr__(self, name: str) -> Any:
        if name != "loader":
            raise AttributeError(name)
        return Endless()


@pytest.mark.parametrize(
    ("iterators", "complete"),
    [
        (None, True),  # a rank without a loader
        (Saves(), True),
        (RerunDataIterator(Around(Saves())), True),
        ([RerunDataIterator(Saves()), None, RerunDataIterator(Saves())], True),
        ([RerunDataIterator(Saves()), RerunDataIterator(Plain())], False),
        (RerunDataIterator(Plain()), False),
        (iter(()), False),
        (Endless(), False),
        (Unsavable(), False),
        (Fails(), False),
    ],
)
def test_whether_the_place_of_all_loaders_can_be_saved(iterators: Any, complete: bool) -> None:
    assert ExternalData(iterators).complete is complete


def test_a_recovery_puts_new_loaders_where_the_old_ones_were() -> None:
    old, new = [Saves(), Saves()], [Saves(), Saves()]
    data = ExternalData([RerunDataIterator(Around(each)) for each in old])
    old[0].at, old[1].at = 7, 9
    data.load_state_dict(data.state_dict())
    data.put_back([RerunDataIterator(Around(each)) for each in new])
    assert [each.at for each in new] == [7, 9]
    new[0].at = 8
    assert data.state_dict() == {"loaders": [{"at": 8}, {"at": 9}]}


def test_until_new_loaders_are_there_a_snapshot_holds_the_restored_places() -> None:
    """A pause may order one between the two."""
    old, new = Saves(), Saves()
    data = ExternalData(old)
    old.at = 9
    data.load_state_dict({"loaders": [{"at": 7}]})
    assert data.state_dict() == {"loaders": [{"at": 7}]}
    data.put_back(new)
    new.at += 1
    assert data.state_dict() == {"loaders": [{"at": 8}]}


def test_the_place_in_the_validation_data_is_put_back_too_if_it_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("mt_resilient.training.loops.external_data.tell_once", told.append)
    old, new = (Saves(), [Saves()]), (Saves(), [Saves()])
    data = external_data(*old)
    assert data is not None
    old[0].at, old[1][0].at = 7, 9
    data.load_state_dict(data.state_dict())
    data.put_back(*new)
    assert (new[0].at, new[1][0].at) == (7, 9)
    assert told == []
    data = external_data(old[0], Plain())
    assert data is not None
    assert len(told) == 1
    data.load_state_dict(data.state_dict())
    data.put_back(new[1][0], Plain())
    assert new[1][0].at == 7
    assert external_data(Plain(), Saves()) is None
