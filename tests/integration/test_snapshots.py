"""Arena → drain process → disk → restore, with real processes, kills, full disks and damaged files."""

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import zarr

from mt_resilient.checkpoint import arena, catalog, commit, layout, restore, tree
from mt_resilient.checkpoint.arena import RankArena, Slot, State
from mt_resilient.checkpoint.drain import drain
from mt_resilient.checkpoint.header import DRAINED_OFFSET, Header, Stamp
from mt_resilient.checkpoint.layout import Attempt
from mt_resilient.checkpoint.tensors import plan
from mt_resilient.resilience.errors import LayoutError, SnapshotError

RUN = "5eed5eed"
PATIENCE_S = 60.0


class Node:
    """An agent's arena and its ranks, played by the test; each rank's state is noise that (rank, step, seed)
    decides."""

    def __init__(
        self, root: Path, ranks: range = range(2), *, world: int = 2, nbytes: int = 100_000, slots: int = 2
    ) -> None:
        self.root, self.ranks, self.world, self.nbytes = root, ranks, world, nbytes
        self.fds = arena.create(len(ranks), slots)
        self.paths = arena.paths(self.fds, os.getpid())
        self.arenas = [RankArena(row) for row in self.paths]

    def snapshot(self, step: int, *, seed: int = 0, generation: int = 1, durable: bool = True) -> bool:
        claims = []
        for rank, slots in zip(self.ranks, self.arenas, strict=True):
            state = {"step": step, "seed": seed, "x": np.random.default_rng([rank, step, seed]).bytes(self.nbytes)}
            skeleton, leaves = tree.flatten({**state, "x": np.frombuffer(state["x"], np.uint8)}, lambda value: False)
            table = plan(skeleton, [(name, leaf.dtype.name, leaf.shape) for name, leaf in leaves])
            more = {"rank": rank, "world": self.world, "table": table.to_json(), "payload_bytes": table.payload_bytes}
            claims.append(slots.claim(generation=generation, step=step, durable=durable, **more))
            if claims[-1] is not None:
                slot, payload = claims[-1]
                payload[: self.nbytes] = leaves[0][1].data
                slot.staged()
        whole = all(claims)
        for claimed in claims:
            if claimed is not None:
                claimed[0].seal() if whole else claimed[0].free()
        return whole

    def drain(self, **more: object) -> "DrainProcess":
        config = {
            "arena": self.paths,
            "root": str(self.root),
            "run": RUN,
            "local_ranks": len(self.ranks),
            "poll_s": 0.01,
        }
        return DrainProcess(config | more)

    def drain_here(self, step: int, *, generation: int = 1) -> Path:
        """The directory of `step`, written by this very process."""
        slots = [[Slot(path) for path in row] for row in self.paths]
        report = drain(slots, Attempt(run=RUN, stamp=Stamp(generation, 0, step)), self.root, deadline_s=0)
        for slot in chain(*slots):
            slot.close()
        assert report is not None
        return report.directory

    def close(self) -> None:
        for slots in self.arenas:
            slots.close()
        for fd in chain(*self.fds):
            os.close(fd)


class DrainProcess:
    def __init__(self, config: dict[str, object]) -> None:
        command = [sys.executable, "-m", "mt_resilient.agent.drain_process", json.dumps(config)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")

    def events(self, until: str) -> list[dict]:
        """The events up to the first of kind `until`."""
        assert self.process.stdout is not None
        found: list[dict] = []
        while not found or found[-1]["event"] != until:
            assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], f"no {until!r} after {found}"
            line = self.process.stdout.readline()
            assert line, f"it ended after {found}"
            found.append(json.loads(line))
        return found

    def finish(self) -> list[dict]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"finish\n")
        self.process.stdin.flush()
        found = self.events("finished")
        assert self.process.wait(PATIENCE_S) == 0
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def node(tmp_path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


@pytest.fixture
def snapshot(node) -> Path:
    """A sound snapshot of step 1."""
    node.snapshot(1)
    return node.drain_here(1)


# The good way


def test_from_the_arena_to_disk_and_back(node):
    node.snapshot(1)
    process = node.drain()
    (durable,) = process.events("durable")
    assert (durable["step"], durable["bytes"]) == (1, 2 * 102_400)
    node.snapshot(2)
    process.events("durable")
    node.snapshot(3, durable=False)
    node.snapshot(4)
    assert [event["event"] for event in process.finish()] == ["durable", "retired", "finished"]
    newest, older = catalog.committed(node.root)
    assert [newest.name, older.name] == ["0000000004-g1-5eed5eed0000", "0000000002-g1-5eed5eed0000"]
    assert catalog.verify(newest) == catalog.verify(older) == []
    for rank in node.ranks:
        table, payload = restore.open_rank(newest, rank, world=2)
        state = tree.unflatten(table.skeleton, {"x": np.asarray(payload[: node.nbytes])})
        assert state["step"] == 4
        assert state["x"].tobytes() == np.random.default_rng([rank, 4, 0]).bytes(node.nbytes)
        assert node.arenas[rank].holding(4).header().drained


def test_zarr_reads_the_same_bytes(node):
    node.nbytes = 9 << 20  # three chunks
    node.snapshot(1)
    node.drain().finish()
    slab = zarr.open_array(catalog.committed(node.root)[0] / "rank-00001", mode="r")
    assert slab.shape == (12 << 20,)
    with node.arenas[1].slots[0].reading() as view:
        assert np.asarray(slab[:]).tobytes() == bytes(view.payload)


def test_the_end_of_stdin_means_finish(node):
    node.snapshot(1)
    process = node.drain()
    process.process.stdin.close()
    assert [event["event"] for event in process.events("finished")] == ["durable", "finished"]


def test_two_nodes_on_one_file_system_make_one_snapshot(tmp_path):
    nodes = [Node(tmp_path, ranks=range(2), world=4), Node(tmp_path, ranks=range(2, 4), world=4)]
    drains = [node.drain(deadline_s=0.5) for node in nodes]
    nodes[0].snapshot(1)
    (failed,) = drains[0].events("failed")
    assert "ranks [2, 3]" in failed["reason"]
    assert failed["retry_in_s"] == 1.0
    assert catalog.committed(tmp_path) == []
    nodes[1].snapshot(1)
    assert [drains[1].events("written")[-1]["step"], drains[0].events("durable")[-1]["step"]] == [1, 1]
    for process in drains:
        process.finish()
    (found,) = catalog.committed(tmp_path)
    assert catalog.verify(found) == []
    assert commit.read_commit(found).world == 4


def test_a_snapshot_given_up_before_it_was_written_stays_unwritten(node):
    node.snapshot(5)
    for slots in node.arenas:
        slots.drop_after(4)
    assert [event["event"] for event in node.drain().finish()] == ["finished"]


def test_a_rank_killed_while_staging_is_ignored(node):
    node.snapshot(1)
    script = (
        "import sys, time; from mt_resilient.checkpoint.arena import Slot, Header\n"
        "header = Header(generation=1, step=2, rank=0, world=2, durable=True, payload_bytes=4096)\n"
        "Slot(sys.argv[1]).begin(header, b'{}')\n"
        "print('begun', flush=True); time.sleep(1000)"
    )
    rank = subprocess.Popen([sys.executable, "-c", script, node.paths[0][1]], stdout=subprocess.PIPE, cwd="/")
    assert rank.stdout.readline() == b"begun\n"
    torn = Slot(node.paths[0][1])
    assert torn.begin(Header(), b"") is None, "it holds the lock"
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    rank.stdout.close()
    assert [event.get("step") for event in node.drain().finish()] == [1, None]
    assert torn.header().state is State.STAGING
    assert node.snapshot(3), "the slot can be had again"


# Kills


def test_kills_at_random_moments_never_leave_a_snapshot_that_does_not_verify(node):
    chance = random.Random(1)
    node.nbytes, step, torn = 2 << 20, 0, 0
    for _ in range(30):
        process = node.drain(poll_s=0.001)
        step += node.snapshot(step + 1)
        process.events("durable")
        until = time.monotonic() + chance.random() * 0.06
        while time.monotonic() < until:
            step += node.snapshot(step + 1)
        process.kill()
        found = catalog.committed(node.root)
        names = [path.name for path in layout.snapshots(node.root).iterdir()]
        torn += len(names) - len(found)
        assert found
        for path in found:
            assert catalog.verify(path) == []
    assert torn > 0, "no kill hit a write: the test tests nothing"
    step += node.snapshot(step + 1)
    node.drain().finish()
    assert Attempt.parse(catalog.committed(node.root)[0].name).stamp.step == step
    assert len(list(layout.snapshots(node.root).iterdir())) <= 4, "what kills left over is swept"


def test_what_a_killed_drain_process_left_is_completed(node, snapshot):
    (snapshot / layout.COMMIT).unlink()
    (snapshot / "rank-00001.json").unlink()
    os.truncate(snapshot / "rank-00001/c/0", 1000)
    for slots in node.arenas:
        slots.slots[0]._store(DRAINED_OFFSET, 0)  # not drained after all
    assert node.drain().finish()[0]["event"] == "durable"
    assert catalog.verify(snapshot) == []


# Damage


@pytest.mark.parametrize("seed", range(5))
def test_one_flipped_bit_anywhere_is_found(snapshot, seed):
    chance = random.Random(seed)
    files = sorted(path for path in snapshot.rglob("*") if path.is_file())
    assert len(files) == 7
    for path in files:
        sound = path.read_bytes()
        for _ in range(4):
            damaged = bytearray(sound)
            damaged[chance.randrange(len(sound))] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            assert catalog.verify(snapshot) != [], path
        path.write_bytes(sound)
    assert catalog.verify(snapshot) == []


@pytest.mark.parametrize("file", ["COMMIT", "rank-00001.json", "rank-00001/zarr.json", "rank-00001/c/0"])
@pytest.mark.parametrize("damage", ["deleted", "empty", "truncated", "zeroed", "quarter zeroed"])
def test_a_damaged_file_is_found_and_refused(snapshot, file, damage):
    path = snapshot / file
    sound = path.read_bytes()
    quarter = len(sound) // 4
    match damage:
        case "deleted":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "truncated":
            path.write_bytes(sound[:-1])
        case "zeroed":
            path.write_bytes(bytes(len(sound)))
        case "quarter zeroed":
            path.write_bytes(sound[:quarter] + bytes(quarter) + sound[2 * quarter :])
    (problem,) = catalog.verify(snapshot)
    assert str(snapshot) in problem or "COMMIT" in problem
    with pytest.raises(SnapshotError):
        restore.open_rank(snapshot, 1)
    if file != "COMMIT":
        restore.open_rank(snapshot, 0)


@pytest.mark.parametrize(
    "parts", [["rank-00001.json"], ["rank-00001"], ["rank-00001/c/0"], ["rank-00001.json", "rank-00001"], ["COMMIT"]]
)
def test_parts_of_another_attempt_are_found(node, snapshot, parts):
    node.snapshot(2, seed=1)
    other = node.drain_here(2)
    for part in parts:
        target = snapshot / part
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        (shutil.copytree if (other / part).is_dir() else shutil.copy)(other / part, target)
    assert len(catalog.verify(snapshot)) == 1
    assert catalog.verify(other) == []


def test_metadata_that_would_read_just_as_well_is_not_taken_for_ours(snapshot):
    metadata = snapshot / "rank-00000/zarr.json"
    metadata.write_text(metadata.read_text().replace('"fill_value":0', '"fill_value":1'))
    (problem,) = catalog.verify(snapshot)
    assert "zarr.json is damaged" in problem


def test_another_world_or_rank_is_a_sentence(snapshot):
    with pytest.raises(LayoutError, match="written by 2 ranks, and this job has 4"):
        restore.open_rank(snapshot, 0, world=4)
    with pytest.raises(SnapshotError, match="no rank 2"):
        restore.open_rank(snapshot, 2)


def test_a_rejected_snapshot_is_none_but_its_bytes_stay(node, snapshot):
    commit.reject(snapshot, "rank 1 could not load it")
    assert catalog.committed(node.root) == []
    with pytest.raises(SnapshotError, match="rejected: rank 1 could not load it"):
        restore.open_rank(snapshot, 0)
    node.snapshot(2)
    node.drain(keep=1).finish()
    assert (snapshot / "rank-00001/c/0").exists()


def test_digests_compare_states_not_attempts(tmp_path):
    digests = []
    for index, more in enumerate([{}, {"generation": 4}, {"seed": 1}]):
        node = Node(tmp_path / str(index))
        node.snapshot(1, **more)
        found = node.drain_here(1, generation=more.get("generation", 1))
        digests.append(
            (catalog.digest(found), catalog.digest(found, include=["step"]), catalog.digest(found, exclude=["x"]))
        )
        node.close()
    assert digests[0] == digests[1] != digests[2]
    assert digests[0][1] == digests[2][1]
    assert digests[0][2] != digests[2][2]


# A machine that refuses


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    target = tmp_path / "small"
    target.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", target]).returncode:
        pytest.skip("mounting a small file system takes root")
    yield target
    subprocess.run(["umount", target], check=True)


def test_a_full_disk_is_reported_and_tried_again(small_disk):
    node = Node(small_disk, nbytes=2 << 20)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(6 << 20))
    node.snapshot(1)
    process = node.drain()
    failed = process.events("failed")[-1]
    assert "no space left" in failed["reason"].lower()
    assert (failed["step"], failed["retry_in_s"]) == (1, 1.0)
    ballast.unlink()
    assert process.events("durable")[-1]["step"] == 1
    ballast.write_bytes(bytes(3 << 20))
    node.snapshot(2)
    assert process.events("failed")[-1]["retry_in_s"] == 1.0, "the first one of a new row"
    last = process.finish()
    assert [event["event"] for event in last[-6:]] == ["failed"] * 5 + ["finished"]
    assert [event["retry_in_s"] for event in last[-6:-1]] == [1.0, 2.0, 4.0, 8.0, None]
    (found,) = catalog.committed(small_disk)
    assert catalog.verify(found) == []
    node.close()


def test_a_read_only_disk_is_a_sentence(small_disk):
    node = Node(small_disk)
    node.snapshot(1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    process = node.drain()
    assert "Read-only file system" in process.events("failed")[-1]["reason"]
    process.kill()
    node.close()


def test_a_slot_that_holds_nonsense_is_given_up(node):
    for rank, slots in enumerate(node.arenas):
        slot, _ = slots.claim(generation=1, step=1, rank=rank, world=2, durable=True, table=b"{", payload_bytes=4096)
        slot.staged()
        slot.seal()
    process = node.drain()
    failed = process.events("failed")[-1]
    assert failed["retry_in_s"] is None
    node.snapshot(2)
    assert process.events("durable")[-1]["step"] == 2
    assert process.finish() == [{"event": "finished"}]


def test_a_configuration_that_cannot_be_meant(node):
    process = node.drain(kep=3)
    assert process.process.wait(PATIENCE_S) == 2
    process.kill()


def test_after_going_back_the_new_lineage_is_the_newest(node):
    for next_one, generation, step in ((1, 1, 30), (2, 1, 40), (2, 2, 22), (3, 2, 23)):
        for slots in node.arenas:
            slots.drop_after(step - 1)
        assert catalog.next_generation(node.root) == next_one
        node.snapshot(step, generation=generation)
        node.drain_here(step, generation=generation)
    steps = [int(path.name[:10]) for path in catalog.committed(node.root)]
    assert steps == [23, 22, 40, 30]
    assert [attempt.stamp.step for attempt in catalog.retire(node.root, keep=2)] == [40, 30]
