"""Arena → drain process → disk → restore, with real processes, kills, full disks and damaged files."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zarr

from mt_resilient.checkpoint.arena.arena import Slot, State
from mt_resilient.checkpoint.arena.fill import destinations, fill
from mt_resilient.checkpoint.arena.slot_header import DRAINED_OFFSET, Header, Stamp
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import catalog, commit, load
from mt_resilient.checkpoint.durable.load_resharded import Saved
from mt_resilient.checkpoint.durable.retention import RetentionPolicy
from mt_resilient.checkpoint.format import manifest, pytree
from mt_resilient.checkpoint.format.shard_image import CHUNK_BYTES
from mt_resilient.resilience.errors import FormatError, LayoutError, SnapshotError
from mt_resilient.resilience.report.json_outputs import SnapshotObject

from ..harness import MINIMAL, cli
from ..played import PATIENCE_S, RUN, Node


@pytest.fixture
def node(tmp_path) -> Iterator[Node]:
    node = Node(Files(tmp_path))
    yield node
    node.close()


@pytest.fixture
def nodes(tmp_path) -> Iterator[list[Node]]:
    """Two on one file system, with two ranks each."""
    nodes = [Node(Files(tmp_path), ranks=range(2), world=4), Node(Files(tmp_path), ranks=range(2, 4), world=4)]
    yield nodes
    for node in nodes:
        node.close()


@pytest.fixture
def snapshot(node) -> Path:
    """A sound snapshot of step 1."""
    node.snapshot(1)
    return node.drain_here(1).path


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
        manifest = load.open_rank(newest, rank, world=2)
        leaves = destinations(manifest.table, {})
        fill(manifest.table, leaves, load.chunks(newest, manifest), manifest.words())
        state = pytree.unflatten(manifest.table.skeleton, leaves)
        assert state["step"] == 4
        assert state["x"].tobytes() == np.random.default_rng([rank, 4, 0]).bytes(node.nbytes)
        assert node.arenas[rank].holding(4).header().drained


def test_a_snapshot_that_lies_in_two_slots_is_written_once(node):
    node.snapshot(1)
    node.snapshot(1)
    process = node.drain()
    process.events("durable")
    assert [event["event"] for event in process.finish()] == ["finished"]


def test_zarr_reads_the_same_bytes(node):
    node.nbytes = 9 << 20  # three chunks
    node.snapshot(1)
    node.drain().finish()
    slab = zarr.open_array(catalog.committed(node.root)[0].path / "rank-00001", mode="r")
    assert slab.shape == (3, CHUNK_BYTES)
    with node.arenas[1].slots[0].reading() as view:
        assert np.asarray(slab[:]).tobytes() == b"".join(bytes(chunk) for _, chunk in view.chunks())


def test_the_end_of_stdin_means_finish(node):
    node.snapshot(1)
    process = node.drain()
    process.process.stdin.close()
    assert [event["event"] for event in process.events("finished")] == ["durable", "finished"]


def test_two_nodes_on_one_file_system_make_one_snapshot(tmp_path, nodes):
    drains = [node.drain(deadline_s=0.5) for node in nodes]
    nodes[0].snapshot(1)
    (failed,) = drains[0].events("failed")
    assert "ranks [2, 3]" in failed["reason"]
    assert failed["retry_in_s"] == 1.0
    assert catalog.committed(Files(tmp_path)) == []
    nodes[1].snapshot(1)
    assert [drains[1].events("written")[-1]["step"], drains[0].events("durable")[-1]["step"]] == [1, 1]
    for process in drains:
        process.finish()
    (found,) = catalog.committed(Files(tmp_path))
    assert catalog.verify(found) == []
    assert commit.read_commit(found).world == 4


def test_a_slow_node_s_part_is_waited_for_whatever_its_ranks_have_taken_meanwhile(tmp_path, nodes):
    """The node that commits has long written its part, and newer snapshots have been taken into the slot that its part came from."""
    first, second = nodes[0].drain(), nodes[1].drain(max_write_mb_per_s=0.05)  # 0.2 MB take it 4 s
    for node in nodes:
        node.snapshot(1)
    begun, ends_s = Attempt(run=RUN, stamp=Stamp(1, 0, 1)).under(Files(tmp_path)), time.monotonic() + PATIENCE_S
    while {0, 1} & {*commit.missing_ranks(begun, 4)} or not begun.there("rank-00002"):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    for step in (2, 3, 4):
        for node in nodes:
            node.snapshot(step)
    assert [event["step"] for event in second.events("written")] == [1]
    assert [event["step"] for event in first.events("durable")] == [1]


@pytest.mark.variant
def test_what_another_node_no_longer_holds_keeps_nothing_newer_from_the_disk(tmp_path, nodes):
    """It could not write for some time: its ranks went on, and of the snapshots that were wanted it has the newest. Nor does the older one
    hold up the end, though it is waited for again by then."""
    first = nodes[0].drain()
    nodes[0].snapshot(1)
    begun = Attempt(run=RUN, stamp=Stamp(1, 0, 1)).under(Files(tmp_path))
    ends_s = time.monotonic() + PATIENCE_S
    while commit.missing_ranks(begun, 4) != [2, 3]:
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    for node in nodes:
        node.snapshot(2)
    second = nodes[1].drain()
    assert first.events("durable")[-1]["step"] == 2
    time.sleep(0.5)  # to where it waits
    told = first.finish()
    assert [(event["event"], event.get("step")) for event in told] == [("failed", 1), ("finished", None)]
    assert told[0]["retry_in_s"] is None
    second.finish()


def test_a_snapshot_given_up_before_it_was_written_stays_unwritten(node):
    node.snapshot(5)
    for slots in node.arenas:
        slots.drop_after(4)
    assert [event["event"] for event in node.drain().finish()] == ["finished"]


def test_a_rank_killed_while_staging_is_ignored(node):
    node.snapshot(1)
    script = (
        "import sys, time; from mt_resilient.checkpoint.arena.arena import Slot, Header\n"
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


@pytest.mark.parametrize("kills", [10, pytest.param(30, marks=pytest.mark.variant)])
def test_kills_at_random_moments_never_leave_a_snapshot_that_does_not_verify(kills, node):
    chance = random.Random(1)
    node.nbytes, step, torn, done = 2 << 20, 0, 0, 0
    while done < kills or (not torn and done < 100):
        done += 1
        process = node.drain(poll_s=0.001)
        step += node.snapshot(step + 1)
        process.events("durable")
        until = time.monotonic() + chance.random() * 0.06
        while time.monotonic() < until:
            step += node.snapshot(step + 1)
        process.kill()
        found = catalog.committed(node.root)
        names = [path.name for path in (node.root / paths.SNAPSHOTS).path.iterdir()]
        torn += len(names) - len(found)
        assert found
        for path in found:
            assert catalog.verify(path) == []
    assert torn > 0, "no kill hit a write: the test tests nothing"
    step += node.snapshot(step + 1)
    node.drain().finish()
    assert Attempt.parse(catalog.committed(node.root)[0].name).stamp.step == step
    assert len(list((node.root / paths.SNAPSHOTS).path.iterdir())) <= 4, "what kills left over is swept"


def test_what_a_killed_drain_process_left_is_completed(node, snapshot):
    (snapshot / paths.COMMIT).unlink()
    (snapshot / "rank-00001.json").unlink()
    os.truncate(snapshot / "rank-00001/c/0/0", 1000)
    for slots in node.arenas:
        slots.slots[0]._store(DRAINED_OFFSET, 0)  # not drained after all
    assert node.drain().finish()[0]["event"] == "durable"
    assert catalog.verify(Files(snapshot)) == []


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
            assert catalog.verify(Files(snapshot)) != [], path
        path.write_bytes(sound)
    assert catalog.verify(Files(snapshot)) == []


@pytest.mark.parametrize("file", ["COMMIT", "rank-00001.json", "rank-00001/zarr.json", "rank-00001/c/0/0"])
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
    (problem,) = catalog.verify(Files(snapshot))
    assert str(snapshot) in problem or "COMMIT" in problem
    with pytest.raises(SnapshotError):
        list(load.chunks(Files(snapshot), load.open_rank(Files(snapshot), 1)))
    if file != "COMMIT":
        list(load.chunks(Files(snapshot), load.open_rank(Files(snapshot), 0)))


@pytest.mark.parametrize(
    "parts", [["rank-00001.json"], ["rank-00001"], ["rank-00001/c/0/0"], ["rank-00001.json", "rank-00001"], ["COMMIT"]]
)
def test_parts_of_another_attempt_are_found(node, snapshot, parts):
    node.snapshot(2, seed=1)
    other = node.drain_here(2).path
    for part in parts:
        target = snapshot / part
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        (shutil.copytree if (other / part).is_dir() else shutil.copy)(other / part, target)
    assert len(catalog.verify(Files(snapshot))) == 1
    assert catalog.verify(Files(other)) == []


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def forge(snapshot: Path, rank: int, old: bytes, new: bytes) -> None:
    """Change a manifest, and what COMMIT says of it, so that only what is beyond their checksums can tell."""
    path = snapshot / paths.manifest_name(rank)
    forged = path.read_bytes().replace(old, new, 1)
    assert forged != path.read_bytes()
    path.write_bytes(forged)
    promised = json.loads((snapshot / paths.COMMIT).read_bytes())
    promised["ranks"][rank] = {"bytes": len(forged), "sha256": sha256(forged).hexdigest()}
    (snapshot / paths.COMMIT).write_text(json.dumps(promised))


CLASSES = {
    "data of a chunk": ("rank-00001/c/0/0", 70, "rank-00001/c/0/0: chunk 0 is damaged"),
    "checksum of a chunk": ("rank-00001/c/0/0", 102_396, "rank-00001/c/0/0: chunk 0 is damaged"),
    "index": ("rank-00001/c/0/0", 102_400, "rank-00001/c/0/0: its index is damaged"),
    "checksum of the index": ("rank-00001/c/0/0", -1, "rank-00001/c/0/0: its index is damaged"),
    "metadata": ("rank-00001/zarr.json", 40, "rank-00001/zarr.json is damaged, or from another attempt"),
    "manifest": ("rank-00001.json", -20, "rank-00001.json is not the manifest that COMMIT names"),
    "table in the manifest": ("rank-00001.json", 150, "rank-00001.json is not the manifest that COMMIT names"),
    "attempt in COMMIT": ("COMMIT", 25, "belongs to the attempt"),
    "checksum in COMMIT": ("COMMIT", -10, "COMMIT"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_of_bytes_is_named_when_one_of_them_is_wrong(snapshot, name):
    file, at, sentence = CLASSES[name]
    flip(snapshot / file, at)
    (problem,) = catalog.verify(Files(snapshot))
    assert sentence in problem
    if file != "COMMIT":
        assert str(snapshot / file) in problem


@pytest.mark.parametrize("parts", [["c/0/0"], ["c/0/0", "zarr.json"], ["."]])
def test_shards_that_changed_places_are_found(snapshot, parts):
    """Each is sound in itself; ranks of the same model have shards of the same size."""
    ones, others, aside = snapshot / "rank-00000", snapshot / "rank-00001", snapshot / "aside"
    for part in parts:
        (ones / part).rename(aside)
        (others / part).rename(ones / part)
        aside.rename(others / part)
    problems = catalog.verify(Files(snapshot))
    assert len(problems) == 2
    assert all("chunk 0 is undamaged, but is not the chunk that was staged" in problem for problem in problems)


@pytest.mark.parametrize("part", ["rank-00000/c/0/0", "rank-00000.json", "COMMIT"])
def test_what_an_earlier_generation_left_of_the_same_step_is_found(node, snapshot, part):
    node.snapshot(1, seed=1, generation=2)
    later = node.drain_here(1, generation=2).path
    shutil.copy(snapshot / part, later / part)
    (problem,) = catalog.verify(Files(later))
    assert {
        "rank-00000/c/0/0": "undamaged, but is not the chunk that was staged",
        "rank-00000.json": "it is damaged, or from another attempt",
        "COMMIT": "belongs to the attempt 0000000001-g1-5eed5eed0000",
    }[part] in problem


def test_a_whole_snapshot_under_the_name_of_another_generation_is_none(snapshot):
    renamed = snapshot.with_name(snapshot.name.replace("-g1-", "-g2-"))
    snapshot.rename(renamed)
    (problem,) = catalog.verify(Files(renamed))
    assert "belongs to the attempt 0000000001-g1-5eed5eed0000" in problem


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (b'["x","uint8",[100000],0]', b'["x","uint8",[ 99999],0]', "tensor 'x' of rank 1 has the fingerprint"),
        (b'["x","uint8",[100000],0]', b'["x","uint8",[200000],0]', "tensor 'x' lies outside the payload"),
        (b'["x","uint8"', b'["y","uint8"', "names a tensor 'x' that is not in it"),
        (b'"rank":1', b'"rank":0', "belongs to"),
        (b'"attempt":"0000000001-g1', b'"attempt":"0000000001-g2', "belongs to"),
    ],
)
def test_a_manifest_that_lies_is_found_where_its_checksum_is_right(snapshot, old, new, sentence):
    forge(snapshot, 1, old, new)
    (problem,) = catalog.verify(Files(snapshot))
    assert sentence in problem


def test_a_copy_that_went_bad_in_memory_does_not_get_to_disk(node):
    """The checksums of chunks are taken as it is written, and would be right; the fingerprint is what the tensor left with."""
    node.snapshot(1)
    with node.arenas[1].slots[0].reading() as view:
        view.memory[4242] ^= 1
    with pytest.raises(SnapshotError, match="tensor 'x' of rank 1 has changed in memory"):
        node.drain_here(1)
    assert not catalog.committed(node.root)


def test_metadata_that_would_read_just_as_well_is_not_taken_for_ours(snapshot):
    metadata = snapshot / "rank-00000/zarr.json"
    metadata.write_text(metadata.read_text().replace('"fill_value":0', '"fill_value":1'))
    (problem,) = catalog.verify(Files(snapshot))
    assert "zarr.json is damaged" in problem


def test_another_world_or_rank_is_a_sentence(snapshot):
    with pytest.raises(LayoutError, match="written by 2 ranks, and this job has 4"):
        load.open_rank(Files(snapshot), 0, world=4)
    with pytest.raises(SnapshotError, match="no rank 2"):
        load.open_rank(Files(snapshot), 2)


@pytest.mark.parametrize("version", [manifest.FORMAT - 1, manifest.FORMAT + 1])
def test_what_another_version_has_written_is_refused_and_left_as_it_is(tmp_path, node, snapshot, version):
    node.snapshot(2)
    newer = node.drain_here(2)
    path = snapshot / "COMMIT"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": version, "of a later time": True}))
    before, sentence = (
        path.read_bytes(),
        f"{snapshot}: COMMIT is written in format {version}; this version of mt-resilient",
    )
    for look in (catalog.verify, catalog.digest, Saved, lambda place: load.open_rank(place, 0)):
        with pytest.raises(FormatError, match=re.escape(sentence)):
            look(Files(snapshot))
    policy = RetentionPolicy(keep=1, keep_every_steps=1, max_age_h=1e-9)
    assert catalog.retire(node.root, policy, 1e12) == [], "of what age it is, is not known"
    for code, *words in (
        (0, "snapshots", "ls", str(tmp_path)),
        (2, "snapshots", "verify", str(tmp_path)),
        (2, "snapshots", "export", str(snapshot), "--to", "safetensors", str(tmp_path / "out")),
        (2, "run", "--run-dir", str(tmp_path), "--", "torchrun", str(MINIMAL)),
        (2, "run", "--run-dir", str(tmp_path / "b"), "--start-from", str(tmp_path), "--", "torchrun", str(MINIMAL)),
    ):
        if words[0] == "run":
            commit.delete(newer)
        done = cli(*words)
        assert done.returncode == code, done.stderr
        assert sentence in done.stdout + done.stderr
    assert path.read_bytes() == before
    assert not (snapshot / "REJECTED").exists()
    (told,) = msgspec.json.decode(cli("snapshots", "ls", "--json", str(tmp_path)).stdout, type=list[SnapshotObject])
    assert (told.name, told.bytes, told.ranks) == (snapshot.name, None, None)
    assert sentence in told.problem


def test_a_rejected_snapshot_is_none_but_its_bytes_stay(node, snapshot):
    commit.reject(Files(snapshot), "rank 1 could not load it", 0.0)
    assert catalog.committed(node.root) == []
    with pytest.raises(SnapshotError, match="rejected: rank 1 could not load it"):
        load.open_rank(Files(snapshot), 0)
    node.snapshot(2)
    node.drain(keep=1).finish()
    assert (snapshot / "rank-00001/c/0/0").exists()


def test_digests_compare_states_not_attempts(tmp_path):
    digests = []
    for index, more in enumerate([{}, {"generation": 4}, {"seed": 1}]):
        node = Node(Files(tmp_path / str(index)))
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
    subprocess.run(["umount", "--lazy", target], check=True)


def test_a_full_disk_is_reported_and_tried_again(small_disk):
    node = Node(Files(small_disk), nbytes=2 << 20)
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
    (found,) = catalog.committed(Files(small_disk))
    assert catalog.verify(found) == []
    node.close()


def test_a_read_only_disk_is_a_sentence(small_disk):
    node = Node(Files(small_disk))
    node.snapshot(1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    process = node.drain()
    assert "Read-only file system" in process.events("failed")[-1]["reason"]
    process.kill()
    node.close()


def test_a_slot_that_holds_nonsense_is_given_up(node):
    for rank, slots in enumerate(node.arenas):
        slot, _ = slots.claim(Header(generation=1, step=1, rank=rank, world=2, durable=True, payload_bytes=4092), b"{")
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
    gone = catalog.retire(node.root, RetentionPolicy(keep=2), 0.0)
    assert [going.attempt.stamp.step for going in gone] == [40, 30]
