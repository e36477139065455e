"""Many tensors and many snapshots: what grows with them, and what does not. Counted, not timed."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import RankArena
from mt_resilient.checkpoint.arena.fill import destinations, fill
from mt_resilient.checkpoint.arena.slot_header import Header, Stamp
from mt_resilient.checkpoint.arena.staging import Stager
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import catalog, load
from mt_resilient.checkpoint.durable.retention import Stored
from mt_resilient.checkpoint.durable.save import drain
from mt_resilient.checkpoint.format.pytree import unflatten
from mt_resilient.checkpoint.slabs.slab_writer import by_tensorstore

RANKS, SNAPSHOTS, TENSORS = 2, 100, 10_000
Saving = Callable[[int, int], Path]


def state_of(rank: int, tensors: int) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(rank).standard_normal((tensors, 8), np.float32)
    return {f"layers.{index:05}.weight": numbers[index] for index in range(tensors)}


@pytest.fixture
def save(tmp_path: Path) -> Iterator[Saving]:
    """Saves a step of so many tensors a rank; gives its directory."""
    fds = arena.create(RANKS, 2)
    ranks = [RankArena(row) for row in arena.paths(fds, os.getpid())]

    def saved(step: int, tensors: int) -> Path:
        for rank, slots in enumerate(ranks):
            stager = Stager()
            layout, encoded, leaves = stager.plan(state_of(rank, tensors), lambda leaf: False)
            described = Header(
                generation=1, step=step, rank=rank, world=RANKS, pieces=tensors, payload_bytes=layout.payload_bytes
            )
            claimed = slots.claim(described, encoded)
            assert claimed is not None
            slot, view = claimed
            stager.stage(leaves, layout, view)
            slot.staged()
            slot.seal()
        attempt = Attempt(run="5eed5eed", stamp=Stamp(1, 0, step))
        report = drain([slots.slots for slots in ranks], attempt, Files(tmp_path), 0, by_tensorstore)
        assert report is not None
        return report.snapshot.path

    yield saved
    for slots, row in zip(ranks, fds, strict=True):
        slots.close()
        for fd in row:
            os.close(fd)


def calls(work: Callable[[], object]) -> Counter[str]:
    """How often `work` calls the operating system through `os`, by name."""
    found: Counter[str] = Counter()

    def look(frame: Any, event: str, what: Any) -> None:
        if event == "c_call" and what.__module__ in ("posix", "_io") and what.__name__ != "fspath":
            found[what.__name__] += 1

    gc.disable()  # what other tests have left may close files when it goes
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def test_files_do_not_grow_with_the_tensors(save: Saving) -> None:
    for step, tensors in enumerate((10, TENSORS), 1):
        files = [path for path in save(step, tensors).rglob("*") if path.is_file()]
        assert len(files) <= 4 * RANKS + 3, files


def test_ten_thousand_tensors_come_back(save: Saving) -> None:
    snapshot = save(1, TENSORS)
    assert catalog.verify(Files(snapshot)) == []
    for rank in range(RANKS):
        manifest = load.open_rank(Files(snapshot), rank, RANKS)
        into = destinations(manifest.table, {})
        fill(manifest.table, into, load.chunks(Files(snapshot), manifest), manifest.words())
        found, expected = unflatten(manifest.table.skeleton, into), state_of(rank, TENSORS)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_metadata_grows_with_the_tensors_and_no_faster(save: Saving) -> None:
    each = []
    for step, tensors in enumerate((500, TENSORS), 1):
        snapshot = save(step, tensors)
        files = (path for path in snapshot.rglob("*") if path.is_file() and path.name != "0")
        each.append(sum(path.stat().st_size for path in files) / tensors / RANKS)
    few, many = each
    assert many <= 1.05 * few, "bytes of metadata a tensor"
    assert many <= 200


@pytest.mark.variant
def test_looking_for_snapshots_asks_six_times_for_each(save: Saving, tmp_path: Path) -> None:
    for step in range(1, SNAPSHOTS + 1):
        save(step, 1)
    found = calls(lambda: catalog.look(Files(tmp_path)))
    assert found["stat"] >= SNAPSHOTS, "the counting counts"
    assert sum(found.values()) <= 6 * SNAPSHOTS + 5, (
        found
    )  # three marks and a turn; NFS needs the directory opened and closed
    assert len(catalog.look(Files(tmp_path)).durable) == SNAPSHOTS
    known: dict[Attempt, Stored] = {}
    durable = catalog.look(Files(tmp_path)).durable
    found = calls(lambda: catalog.stored(Files(tmp_path), durable, known))
    assert sum(found.values()) <= 8 * SNAPSHOTS, found
    assert calls(lambda: catalog.stored(Files(tmp_path), durable, known)).total() == 0, "each is asked once"
    names = [path.name for path in (tmp_path / paths.SNAPSHOTS).iterdir()]
    assert len(names) == SNAPSHOTS, "nothing but snapshots is left there"
