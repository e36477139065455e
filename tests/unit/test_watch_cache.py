"""A write of one's own is waited for as long as others' changes come before it; where nothing comes, all is listed anew."""

import os
import threading
import time
from collections.abc import Sequence

import pytest

from mt_resilient.resilience.store import watch_cache
from mt_resilient.resilience.store.protocol import Change, Listing
from mt_resilient.resilience.store.watch_cache import Mirror

from ..memory_store import MemoryStore, MemoryWatch

EACH_S = 0.03


class Trickle(MemoryWatch):
    """One change in `EACH_S`, of what was written before it is let go."""

    def __init__(self, store: MemoryStore, whole: MemoryWatch) -> None:
        super().__init__(store, whole.prefix)
        self._whole, self._reads, self._writes = whole, *os.pipe()
        self._let: list[Change] = []

    def fileno(self) -> int:
        return self._reads

    def let_go(self, most: int) -> None:
        changes = self._whole.take()
        self.owed = changes[-1].revision

        def let() -> None:
            for change in changes[:most]:
                time.sleep(EACH_S)
                self._let.append(change)
                os.write(self._writes, b".")

        threading.Thread(target=let, daemon=True).start()

    def take(self) -> Sequence[Change]:  # type: ignore[override]
        return [self._let.pop(0) for _ in os.read(self._reads, 100)] if self._let else []


class Far(MemoryStore):
    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.listed = 0

    def listing(self, prefix: str) -> Listing:
        self.listed += 1
        return super().listing(prefix)

    def watch(self, prefix: str, since: int) -> Trickle:
        self.trickle = Trickle(self, super().watch(prefix, since))
        return self.trickle


@pytest.mark.parametrize(("come", "listed"), [(12, 1), (5, 2), (0, 2)])
def test_own_writes_are_in_it(come: int, listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if come == 12:  # on a busy machine they come late
        monkeypatch.setattr(watch_cache, "_PATIENCE_S", 60.0)
    store = Far()
    mirror = Mirror(store, "/")
    mirror.entries()
    for number in range(12):
        store.put(f"/{number}", b"")
    store.trickle.let_go(come)
    assert len(mirror.entries()) == 12
    assert store.listed == listed


def test_a_store_that_counts_anew_from_a_backup_is_read_as_it_is() -> None:
    """The new write has the revision of one that is lost."""
    store = MemoryStore(lambda: 0.0)
    store.put("a/x", b"kept")
    backup = store.range("").values()
    store.put("a/y", b"lost")
    mirror = Mirror(store, "a/")
    mirror.entries()
    mirror.changed()
    store.lose(backup)
    store.put("a/y", b"new")
    assert mirror.entries()["a/y"].value == b"new"
    assert mirror.changed() == {"a/y": b"new"}
