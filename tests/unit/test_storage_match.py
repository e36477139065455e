"""Snapshots have one place for all nodes: told at the start, with one sentence, and not at the first fault."""

from pathlib import Path

import pytest

from mt_resilient.agent.join.storage_match import PREFIX, agree
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.model.types import NodeId
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.memory import MemoryStore
from mt_resilient.resilience.store.protocol import Put
from mt_resilient.resilience.store.seat import Seat

KEYS = Keys("job")
A, B = NodeId("a"), NodeId("b")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(lambda: 0.0)


def place(path: Path) -> Files:
    path.mkdir(exist_ok=True)
    return Files(path)


def marks(path: Path) -> list[str]:
    return [each.name for each in path.iterdir() if each.name.startswith(PREFIX)]


def test_all_see_the_mark_of_the_first(store: MemoryStore, tmp_path: Path) -> None:
    for node in (A, B, A):
        agree(Seat(store, KEYS, node), 1, place(tmp_path / "shared"))
    assert len(marks(tmp_path / "shared")) == 1


def test_another_directory_of_the_same_name_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    agree(Seat(store, KEYS, A), 1, place(tmp_path / "a"))
    with pytest.raises(UsageError) as caught:
        agree(Seat(store, KEYS, B), 1, place(tmp_path / "b"))
    assert f"{tmp_path / 'b'} is not the same place on b as on a" in str(caught.value)
    assert "Name a place that all nodes reach, with --snapshots" in str(caught.value)
    assert marks(tmp_path / "b") == []


def test_two_that_begin_at_once_leave_one_mark(store: MemoryStore, tmp_path: Path) -> None:
    """One has written its name while the other wrote its mark."""
    shared = place(tmp_path / "shared")
    shared.write(f"{PREFIX}1", b"a")

    class Slow(MemoryStore):
        def transact(self, guards, puts):  # type: ignore[no-untyped-def]
            super().transact([], [Put(KEYS.place(1), f"{PREFIX}1 a".encode())])
            return super().transact(guards, puts)

    agree(Seat(Slow(lambda: 0.0), KEYS, B), 1, shared)
    assert marks(tmp_path / "shared") == [f"{PREFIX}1"]


def test_the_next_life_of_the_job_may_be_elsewhere(store: MemoryStore, tmp_path: Path) -> None:
    agree(Seat(store, KEYS, A), 1, place(tmp_path / "before"))
    agree(Seat(store, KEYS, A), 4, place(tmp_path / "moved"))
    agree(Seat(store, KEYS, B), 4, place(tmp_path / "moved"))
