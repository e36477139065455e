"""All nodes use the same place for snapshots; another place is refused at the start."""

from pathlib import Path

import pytest

from mt_resilient.agent.join.storage_match import PREFIX, agree
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.model.types import NodeId
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.protocol import Put
from mt_resilient.resilience.store.seat import Seat

from ..memory_store import MemoryStore

KEYS = Keys("job")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(lambda: 0.0)


def joins(store: MemoryStore, name: str, path: Path, life: int = 1) -> None:
    path.mkdir(exist_ok=True)
    agree(Seat(store, KEYS, NodeId(name)), life, Files(path))


def marks(path: Path) -> list[str]:
    return [each.name for each in path.iterdir() if each.name.startswith(PREFIX)]


def test_all_nodes_find_the_marker_of_the_first(store: MemoryStore, tmp_path: Path) -> None:
    for name in "aba":
        joins(store, name, tmp_path / "shared")
    assert len(marks(tmp_path / "shared")) == 1


def test_another_directory_of_the_same_name_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    joins(store, "a", tmp_path / "a")
    with pytest.raises(UsageError) as caught:
        joins(store, "b", tmp_path / "b")
    assert f"{tmp_path / 'b'} is not the same place on b as on a" in str(caught.value)
    assert "Name a place that all nodes reach, with --snapshots" in str(caught.value)
    assert marks(tmp_path / "b") == []


def test_two_nodes_that_begin_at_once_leave_one_marker(tmp_path: Path) -> None:
    """One has written its name into etcd while the other wrote its marker."""
    Files(tmp_path).write(f"{PREFIX}1", b"a")

    class Slow(MemoryStore):
        def transact(self, guards, puts):  # type: ignore[no-untyped-def]
            super().transact([], [Put(KEYS.place(1), f"{PREFIX}1 a".encode())])
            return super().transact(guards, puts)

    joins(Slow(lambda: 0.0), "b", tmp_path)
    assert marks(tmp_path) == [f"{PREFIX}1"]


def test_the_next_run_of_the_job_may_use_another_place(store: MemoryStore, tmp_path: Path) -> None:
    joins(store, "a", tmp_path / "before")
    joins(store, "a", tmp_path / "moved", 4)
    joins(store, "b", tmp_path / "moved", 4)
