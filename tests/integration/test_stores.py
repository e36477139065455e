"""The protocol of snapshots over each kind of store: files, tensorstore's memory, and a real S3 server (OpenStack Swift)."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import tensorstore as ts

from mt_resilient.checkpoint.arena.fill import destinations, fill
from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.checkpoint.backend import object_store, paths, place
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.object_store import Objects
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.backend.place import Place
from mt_resilient.checkpoint.durable import catalog, commit, load
from mt_resilient.checkpoint.durable.retention import RetentionPolicy
from mt_resilient.checkpoint.format.shard_image import CHUNK_BYTES, STRIDE_BYTES
from mt_resilient.checkpoint.slabs import zarr_slab
from mt_resilient.resilience.clock import wall_s
from mt_resilient.resilience.errors import LayoutError, MachineError, SnapshotError, UsageError

from ..harness import GATED, MINIMAL, Job, cli, digest_of, undisturbed
from ..played import Node, noise
from ..swift import BIN, KEYS, REGION, Swift

pytestmark = pytest.mark.xdist_group("swift")

KINDS = ["file", "memory", "s3"]
BUCKET = "job"


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    if not BIN.exists():
        pytest.skip("there is no S3 server here; scripts/swift installs one")
    server = Swift(tmp_path_factory.mktemp("swift"))
    try:
        server.make_bucket(BUCKET)
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def bucket(swift: Swift, name: str = BUCKET, region: str = REGION) -> Place:
    """A prefix of its own."""
    return place.at(place.address(f"s3://{name}/{uuid.uuid4().hex}", swift.endpoint, region))


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    match request.param:
        case "file":
            return place.at(str(tmp_path))
        case "memory":
            return place.at(f"memory://{uuid.uuid4().hex}")
    return bucket(request.getfixturevalue("swift"))


@pytest.fixture
def node(root: Place) -> Iterator[Node]:
    node = Node(root)
    yield node
    node.close()


each = pytest.mark.parametrize("root", KINDS, indirect=True)
s3 = pytest.mark.parametrize("root", ["s3"], indirect=True)


# A place


def test_a_listing_may_take_longer_than_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        """A store that sends its names after some seconds."""

        def __init__(self, kv: ts.KvStore) -> None:
            self.kv = kv

        def read(self, *given: Any, **more: Any) -> Any:
            return self.kv.read(*given, **more)

        def list(self, *given: Any) -> ts.Future:
            promise, future = ts.Promise.new()
            names = self.kv.list(*given).result()
            threading.Timer(0.0 if given else 3.0, promise.set_result, [names]).start()
            return future

    monkeypatch.setattr(object_store, "DEADLINE_S", 2.0)
    place = Objects.at("memory://listing")
    (place / "a").write("x", b"")
    slow = Objects(cast(ts.KvStore, Slow(place.kv)), place.url, "")
    assert slow.holding(["x"]) == {"a": {"x"}}


def test_an_upload_may_take_as_long_as_those_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(zarr_slab, "_done", lambda future, slab, nbytes, *, writing: told.append(nbytes))
    coming = deque((cast(ts.Future, None), nbytes) for nbytes in (128, 128, 4))
    while coming:
        zarr_slab._uploaded(coming, cast(Objects, None))
    assert told == [260, 132, 4]


@each
def test_a_place_keeps_what_it_is_given(root: Place) -> None:
    here = root / "snapshots" / "a"
    assert not here.there("x")
    with pytest.raises(SnapshotError, match="a/x: No such file"):
        here.read("x")
    assert (root / "snapshots").holding(["x"]) == {}
    for content in (b"", b"1", bytes(100_000)):
        here.write("x", content)
        assert (here.there("x"), here.read("x")) == (True, content)
    (root / "snapshots" / "ab").write("c/y", b"")
    assert (root / "snapshots").holding(["x", "z"]) == {"a": {"x"}, "ab": set()}
    here.rename("x", "z")
    assert (here.there("x"), here.read("z")) == (False, bytes(100_000))
    assert (root / "snapshots").holding(["x", "z"]) == {"a": {"z"}, "ab": set()}
    here.write("s1", b"")
    here.write("s2", b"")
    assert (root / "snapshots").holding(["z"], ["s1", "s2", "s3"]) == {"a": {"z", "s1", "s2"}, "ab": set()}
    here.write("x", b"")
    here.delete("x")
    assert not here.there("x")
    here.clear()
    here.clear()
    assert (root / "snapshots").holding(["x", "z"]) == {"ab": set()}


@each
def test_its_address_leads_there_again(root: Place) -> None:
    (root / "a").write("x", b"1")
    assert (place.at(root.address) / "a").read("x") == b"1"
    assert (root / "a").name == "a"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("hdfs://there", "name a directory, s3://bucket/prefix"),
        ("memory://here", "name a directory, s3://bucket/prefix"),
        ("s3://", "s3:// is no place for snapshots"),
        ("s3://No_Bucket!", "Invalid S3 bucket name"),
        ("file://host/path", "is no file:///path"),
        ("s3://bucket/run?endpoint=x", "--set snapshots.endpoint"),
    ],
)
def test_what_is_no_place_is_a_sentence(given: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        place.address(given)


def test_an_endpoint_is_for_s3_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are for s3:// URLs"):
        place.address(str(tmp_path), endpoint="http://localhost:1")
    assert (
        place.address("s3://bucket/run", "http://localhost:1") == "s3://bucket/run?endpoint=http%3A%2F%2Flocalhost%3A1"
    )
    assert str(place.at("file:///tmp/a%20b")) == "/tmp/a b"


# Snapshots


@each
def test_from_the_arena_and_back(node: Node) -> None:
    node.snapshot(1)
    first = node.drain_here(1)
    node.snapshot(2)
    second = node.drain_here(2)
    assert [str(found) for found in catalog.committed(node.root)] == [str(second), str(first)]
    assert catalog.verify(first) == catalog.verify(second) == []
    for rank in node.ranks:
        manifest = load.open_rank(second, rank, world=2)
        slot = node.arenas[rank].holding(2)
        with slot.reading() as view:
            expected = [(index, bytes(chunk)) for index, chunk in view.chunks()]
        assert [(index, bytes(chunk)) for index, chunk in load.chunks(second, manifest)] == expected
    with pytest.raises(LayoutError, match="written by 2 ranks, and this job has 4"):
        load.open_rank(second, 0, world=4)
    assert catalog.next_generation(node.root) == 2


def test_the_same_state_has_the_same_digest_everywhere(tmp_path: Path, swift: Swift) -> None:
    digests = set()
    for root in (place.at(str(tmp_path)), place.at("memory://digests"), bucket(swift)):
        node = Node(root)
        node.snapshot(1)
        digests.add(catalog.digest(node.drain_here(1)))
        node.close()
    assert len(digests) == 1


@each
def test_a_slab_of_several_shards(root: Place) -> None:
    chunks = zarr_slab.OBJECT_CHUNKS + 2
    node = Node(root, range(1), world=1, nbytes=chunks * CHUNK_BYTES, slots=1)
    node.snapshot(1)
    snapshot = node.drain_here(1)
    assert catalog.verify(snapshot) == []
    slab = snapshot / "rank-00000"
    assert slab.there("c/1/0") == isinstance(slab, Objects)
    manifest = load.open_rank(snapshot, 0)
    wanted = [0, zarr_slab.OBJECT_CHUNKS - 1, zarr_slab.OBJECT_CHUNKS, chunks - 1]
    assert [index for index, _ in load.chunks(snapshot, manifest, wanted)] == wanted
    node.close()


@each
def test_what_replicas_hold_alike_is_written_once_and_read_by_all(root: Place) -> None:
    shared, private, ranks = 9, 3, 3
    node = Node(root, range(ranks), world=ranks, shared_bytes=shared * CHUNK_BYTES, nbytes=private * CHUNK_BYTES)
    node.snapshot(1)
    snapshot = node.drain_here(1)
    assert catalog.verify(snapshot) == []
    manifests = [load.open_rank(snapshot, rank) for rank in range(ranks)]
    assert [len(manifest.sources.own) for manifest in manifests] == [shared // ranks + private] * ranks
    if isinstance(snapshot, Files):
        sizes = [(snapshot.path / f"rank-{rank:05}" / zarr_slab.SHARD).stat().st_size for rank in range(ranks)]
        assert sizes == [manifest.table.image.file_bytes(shared // ranks + private) for manifest in manifests]
    for rank, manifest in enumerate(manifests):
        into = destinations(manifest.table, {})
        fill(manifest.table, into, load.chunks(snapshot, manifest), manifest.words())
        assert into["shared"].numpy().tobytes() == noise(shared * CHUNK_BYTES, 1, 0).tobytes()
        assert into["x"].numpy().tobytes() == noise(private * CHUNK_BYTES, rank, 1, 0).tobytes()
    wanted = [0, 4, 8, 10]
    found = load.chunks(snapshot, manifests[0], wanted)
    assert [index for index, _ in found] == wanted
    node.close()


@each
def test_a_rank_with_nothing_of_its_own_writes_nothing(root: Place) -> None:
    node = Node(root, shared_bytes=4000, nbytes=0)
    node.snapshot(1)
    snapshot = node.drain_here(1)
    assert catalog.verify(snapshot) == []
    assert [(snapshot / f"rank-{rank:05}").there(zarr_slab.SHARD) for rank in range(2)] == [True, False]
    node.close()


@pytest.mark.parametrize("flipped", [0, 1])
def test_a_replica_that_has_become_another_is_not_written(tmp_path: Path, flipped: int) -> None:
    """Whether its bytes are its own or another rank's: its fingerprint was taken before."""
    node = Node(Files(tmp_path), shared_bytes=6 * CHUNK_BYTES)
    node.snapshot(1)
    with node.arenas[flipped].slots[0].reading() as view:
        assert view is not None
        view.memory[2 * STRIDE_BYTES + 5] ^= 1
    with pytest.raises(SnapshotError, match=f"'shared' of rank {flipped} has changed in memory"):
        node.drain_here(1)
    node.close()


@pytest.mark.parametrize("damage", ["flip", "delete", "truncate"])
def test_damage_to_what_another_rank_wrote_is_found_by_all_who_need_it(tmp_path: Path, damage: str) -> None:
    node = Node(Files(tmp_path), shared_bytes=6 * CHUNK_BYTES)
    node.snapshot(1)
    snapshot = node.drain_here(1)
    shard = snapshot.path / "rank-00000" / zarr_slab.SHARD
    match damage:
        case "flip":
            with shard.open("r+b") as file:
                file.seek(5)
                file.write(b"\x55\xaa")
        case "delete":
            shard.unlink()
        case "truncate":
            os.truncate(shard, 3 << 20)
    problems = catalog.verify(snapshot)
    assert len(problems) == 2
    assert all(str(shard) in problem for problem in problems)
    node.close()


def test_what_is_put_is_what_tensorstore_writes() -> None:
    root = place.at("memory://reference")
    assert isinstance(root, Objects)
    chunks = zarr_slab.OBJECT_CHUNKS + 2
    node = Node(root, range(1), world=1, nbytes=chunks * CHUNK_BYTES, slots=1)
    node.snapshot(1)
    slab = node.drain_here(1) / "rank-00000"
    node.close()
    assert isinstance(slab, Objects)
    ours = {key: slab.kv.read(key).result().value for key in slab.kv.list().result()}
    copied = ts.Context()
    memory = {"driver": "memory", "path": "copy/"}
    kv = ts.KvStore.open(memory, context=copied).result()
    for key, value in ours.items():
        kv.write(key, value).result()
    opened = ts.open({"driver": "zarr3", "kvstore": memory}, context=copied).result()
    content = opened.read().result()
    for key in ours:
        if key != zarr_slab.METADATA.encode():
            kv.write(key, None).result()
    opened.write(content).result()
    assert {key: kv.read(key).result().value for key in kv.list().result()} == ours


@each
def test_a_rejected_snapshot_is_none_and_stays(node: Node) -> None:
    node.snapshot(1)
    snapshot = node.drain_here(1)
    promised = snapshot.read(paths.COMMIT)
    snapshot.write(paths.REJECTED, promised)  # where a kill leaves an object store between the two steps
    assert catalog.committed(node.root) == []
    snapshot.delete(paths.REJECTED)
    for _ in ("this node", "another one, which has seen it committed too"):
        commit.reject(snapshot, "rank 1 could not load it", 0.0)
    assert catalog.committed(node.root) == []
    assert [attempt.stamp.step for attempt in catalog.look(node.root).rejected] == [1]
    with pytest.raises(SnapshotError, match="rejected: rank 1 could not load it"):
        load.open_rank(snapshot, 0)
    node.snapshot(2)
    node.drain_here(2)
    assert catalog.retire(node.root, RetentionPolicy(keep=1), 0.0) == []
    assert snapshot.there("rank-00001/c/0/0")
    assert snapshot.read(paths.REJECTED) == promised


@each
def test_what_belongs_to_the_user_stays_until_its_time_is_over(node: Node) -> None:
    for step in range(1, 7):
        node.snapshot(step)
        node.drain_here(step)
    places = {attempt.stamp.step: attempt.under(node.root) for attempt in catalog.look(node.root).durable}
    promised = places[1].read(paths.COMMIT)
    now_s, policy = wall_s(), RetentionPolicy(keep=1, keep_own_h=10)
    for _ in ("this node", "another one, which has seen it committed too"):
        commit.leave(places[1], "an order went back", now_s)
    commit.leave(places[4], "an order went back", now_s)
    commit.mark(places[2], paths.ORDERED)
    commit.mark(places[3], paths.KEPT)
    commit.mark(places[4], paths.KEPT)

    def retired(later_h: float) -> list[int]:
        gone = catalog.retire(node.root, policy, now_s + later_h * 3600)
        return [going.attempt.stamp.step for going in gone]

    assert retired(9) == [5]
    found = catalog.look(node.root)
    assert [attempt.stamp.step for attempt in found.durable] == [6, 3, 2]
    assert {attempt.stamp.step for attempt in found.left} == {1, 4}
    assert found.rejected == found.remains == ()
    with pytest.raises(SnapshotError, match="was set aside before"):
        node.drain_here(1)  # what has not heard of it would write it again
    assert catalog.verify(places[1]) == []
    assert retired(11) == [2, 1], "one was ordered, the other set aside"
    assert not places[1].there("rank-00000.json")
    for _ in ("this node", "another one"):
        commit.take_back(places[4])
    assert [attempt.stamp.step for attempt in catalog.look(node.root).durable] == [6, 4, 3]
    commit.leave(places[4], "another order went back", now_s)
    left = catalog.look(node.root).left
    assert [commit.reason(attempt.under(node.root), mark) for attempt, mark in left.items()] == [
        ("another order went back", round(now_s))
    ]
    assert places[4].there(paths.COMMIT), "a store may delete later what it was asked to delete: nothing comes again"
    assert commit.returned(places[4])
    assert not commit.returned(places[3])
    assert promised
    commit.leave(places[4], "an order went back", now_s)
    commit.reject(places[4], "rank 1 could not load it", 0.0)
    found = catalog.look(node.root)
    assert (found.left, [attempt.stamp.step for attempt in found.rejected]) == ({}, [4])
    commit.take_back(places[4])
    assert len(catalog.look(node.root).durable) == 2, "a wrong one cannot be taken back"
    assert retired(1000) == []


@each
def test_what_is_kept_or_taken_back_while_others_are_deleted_stays(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 6):
        node.snapshot(step)
        node.drain_here(step)
    places = {attempt.stamp.step: attempt.under(node.root) for attempt in catalog.look(node.root).durable}
    for step in (1, 2):
        commit.leave(places[step], "an order went back", 1.0)
    delete = commit.delete

    def slowly(snapshot: Place) -> bool:
        commit.mark(places[3], paths.KEPT)
        commit.take_back(places[1])
        return delete(snapshot)

    monkeypatch.setattr(commit, "delete", slowly)
    gone = catalog.retire(node.root, RetentionPolicy(keep=1), 1e9)
    assert [going.attempt.stamp.step for going in gone] == [4, 2]
    assert [attempt.stamp.step for attempt in catalog.look(node.root).durable] == [5, 3, 1]


@each
def test_the_old_are_retired_and_remains_are_swept(node: Node) -> None:
    left = Attempt(run="deadbeef", stamp=Stamp(1, 0, 7))
    left.under(node.root).write("rank-00000.json", b"")
    for step in (1, 2, 3):
        node.snapshot(step)
        node.drain_here(step)
    assert [going.attempt.stamp.step for going in catalog.retire(node.root, RetentionPolicy(keep=2), 0.0)] == [1]
    found = catalog.look(node.root)
    assert [attempt.stamp.step for attempt in found.durable] == [3, 2]
    assert (found.rejected, found.remains) == ((), ())
    assert len((node.root / paths.SNAPSHOTS).holding([]).keys() - {paths.JOB}) == 2


@each
def test_age_and_size_decide_what_goes(node: Node) -> None:
    for step in (1, 2, 3, 4):
        node.snapshot(step)
        node.drain_here(step)
    now_s, one = wall_s(), catalog.stored(node.root, catalog.look(node.root).durable[:1], {})[0]
    assert one.written_s is not None
    assert one.bytes is not None
    assert abs(one.written_s - now_s) < 60
    assert one.bytes > 2 * 100_000
    policy = RetentionPolicy(keep=1, keep_every_steps=1, max_age_h=1, max_bytes=3 * one.bytes + 1000)
    assert [going.attempt.stamp.step for going in catalog.retire(node.root, policy, now_s)] == [1]
    oldest = catalog.look(node.root).durable[-1]
    gone = catalog.retire(node.root, policy, now_s + 3700, frozenset([oldest]))
    assert [going.attempt.stamp.step for going in gone] == [3]
    assert [attempt.stamp.step for attempt in catalog.look(node.root).durable] == [4, 2]
    assert catalog.verify(oldest.under(node.root)) == []


@each
def test_a_deletion_that_was_killed_is_ended_by_the_next_snapshot(node: Node) -> None:
    for step in (1, 2):
        node.snapshot(step)
        node.drain_here(step)
    catalog.committed(node.root)[-1].delete(paths.COMMIT)  # as far as it got
    assert [len(found) for found in (catalog.look(node.root).durable, catalog.look(node.root).remains)] == [1, 1]
    node.snapshot(3)
    node.drain_here(3)
    assert [attempt.stamp.step for attempt in catalog.look(node.root).durable] == [3, 2]
    assert len((node.root / paths.SNAPSHOTS).holding([]).keys() - {paths.JOB}) == 2


@each
@pytest.mark.parametrize("name", ["COMMIT", "rank-00001.json", "rank-00001/zarr.json", "rank-00001/c/0/0"])
def test_damage_is_found_and_refused(node: Node, name: str) -> None:
    node.snapshot(1)
    snapshot = node.drain_here(1)
    sound, chance = snapshot.read(name), random.Random(1)
    flipped = bytearray(sound)
    flipped[chance.randrange(len(sound))] ^= 1 << chance.randrange(8)
    quarter = len(sound) // 4
    zeroed = sound[:quarter] + bytes(quarter) + sound[2 * quarter :]
    for damaged in (None, b"", sound[:-1], bytes(len(sound)), zeroed, bytes(flipped)):
        snapshot.delete(name) if damaged is None else snapshot.write(name, damaged)
        assert len(catalog.verify(snapshot)) == 1
        with pytest.raises(SnapshotError):
            list(load.chunks(snapshot, load.open_rank(snapshot, 1)))
        snapshot.write(name, sound)
    assert catalog.verify(snapshot) == []


@each
def test_a_sound_shard_of_another_attempt_is_found(node: Node) -> None:
    node.snapshot(1)
    node.snapshot(2, seed=1)
    snapshot, other = node.drain_here(1), node.drain_here(2)
    snapshot.write("rank-00001/c/0/0", other.read("rank-00001/c/0/0"))
    (problem,) = catalog.verify(snapshot)
    assert "not the chunk that was staged" in problem


@pytest.mark.parametrize("root", ["file", pytest.param("s3", marks=pytest.mark.variant)], indirect=True)
def test_kills_at_random_moments_never_leave_a_snapshot_that_does_not_verify(root: Place) -> None:
    node, chance, step, torn, done = Node(root, nbytes=2 << 20), random.Random(1), 0, 0, 0
    while done < 5 or (not torn and done < 100):
        done += 1
        process = node.drain(poll_s=0.001)
        step += node.snapshot(step + 1)
        process.events("durable")
        until = time.monotonic() + chance.random() * 0.3
        while time.monotonic() < until:
            step += node.snapshot(step + 1)
        process.kill()
        found = catalog.look(root)
        torn += len(found.remains)
        assert found.durable
        for attempt in found.durable:
            if catalog.verify(attempt.under(root)):  # unless the server has only now carried out the last deletion
                assert attempt not in catalog.look(root).durable
    assert torn > 0, "no kill hit a write: the test tests nothing"
    step += node.snapshot(step + 1)
    node.drain().finish()
    found = catalog.look(root)
    assert found.durable[0].stamp.step == step
    assert found.remains == ()
    node.close()


# A store that does not answer, or refuses


@s3
def test_a_server_that_is_down_costs_nothing(node: Node, swift: Swift) -> None:
    node.snapshot(1)
    snapshot = node.drain_here(1)
    process = node.drain()
    with swift.down():
        node.snapshot(2)
        failed = process.events("failed")[-1]
        assert "the store does not answer" in failed["reason"]
        assert failed["retry_in_s"] == 1.0
        with pytest.raises(MachineError, match="the store does not answer"):
            catalog.verify(snapshot)
    assert process.events("durable")[-1]["step"] == 2
    process.finish()
    assert catalog.verify(snapshot) == []


@s3
def test_a_server_that_hangs_is_given_up_in_time(node: Node, swift: Swift) -> None:
    node.snapshot(1)
    snapshot = node.drain_here(1)
    manifest = load.open_rank(snapshot, 0)
    process = node.drain()
    content = load.chunks(snapshot, manifest)
    with swift.hanging():
        node.snapshot(2)
        started = time.monotonic()
        with pytest.raises(MachineError, match="does not answer"):
            next(content)
        assert time.monotonic() - started < 60
        assert "does not answer" in process.events("failed")[-1]["reason"]
    assert process.events("durable")[-1]["step"] == 2
    process.finish()
    assert [catalog.verify(found) for found in catalog.committed(node.root)] == [[], []]


def refused(place: Place, sentence: str) -> None:
    """Whatever is asked of it, and never as if nothing were there."""
    for ask in (
        lambda: place.there("x"),
        lambda: place.read("x"),
        lambda: place.write("x", b""),
        lambda: place.holding(["x"]),
        lambda: catalog.look(place),
    ):
        with pytest.raises(MachineError, match=sentence) as told:
            ask()
        assert "\n" not in str(told.value)
        assert len(str(told.value)) < 400


def test_a_missing_bucket_is_not_an_empty_one(swift: Swift) -> None:
    refused(bucket(swift, "nowhere"), "there is no such bucket")


def test_another_region(swift: Swift) -> None:
    refused(bucket(swift, region="eu-west-9"), "the store refuses access .*snapshots.region")


@s3
@pytest.mark.parametrize("secret", ["wrong", None])
def test_a_wrong_key_costs_nothing(node: Node, secret: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    node.snapshot(1)
    snapshot = node.drain_here(1)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    if secret:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    process = node.drain()
    node.snapshot(2)
    failed = process.events("failed")[-1]
    assert "the store refuses access" in failed["reason"]
    assert failed["retry_in_s"] == 1.0
    process.kill()
    assert catalog.verify(snapshot) == []


# A job


def job_at(place: Path, swift: Swift, where: str) -> Job:
    place.mkdir(exist_ok=True)
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "90", "--step-delay", "0.02"]
    # Slots for all that is kept until the gate: none is overwritten before it is written.
    often = ["--snapshot-every", "5", "--durable-every", "10", "--set", "snapshots.slots=8"]
    store = ["--set", f"snapshots.endpoint={swift.endpoint}", "--set", f"snapshots.region={REGION}"]
    return Job(place, command, "--snapshots", where, *often, *store, **KEYS)


def test_a_job_that_is_killed_altogether_goes_on_from_the_store(tmp_path: Path, swift: Swift) -> None:
    """Everything dies, and the newest snapshot in the store is damaged: the one before it is used. Then the store is down for a while."""
    expected, _ = undisturbed(MINIMAL, "--steps", "90")
    where = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    job = job_at(tmp_path, swift, where)
    job.until_said("step 20 is on disk")
    job.kill_everything()
    assert not (job.directory / "snapshots").exists()
    newest, older, *_ = catalog.committed(place.at(place.address(where, swift.endpoint, REGION)))
    shard = bytearray(newest.read("rank-00000/c/0/0"))
    shard[100] ^= 1
    newest.write("rank-00000/c/0/0", bytes(shard))
    job.start()
    job.until_said(f"the snapshot {newest.name} cannot be restored and is set aside")
    job.until_said(f"going back to step {int(older.name[:10])} from disk")
    assert newest.there(paths.REJECTED)
    # At the gate all that may be written is written: what comes after it meets the store that is down.
    job.until_said("step 20 is on disk", times=2)
    job.until_said("step 30 is on disk")
    with swift.down():
        job.gate.touch()
        job.until_step(42)  # so the snapshot of step 40 is sealed
        job.gate.unlink()  # the ranks wait again, and their end does not come before the store is back
        job.until_said("could not be written")
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == expected
    assert "step 90 is on disk" in job.said()
    listed = cli("snapshots", "ls", "--run-dir", str(job.directory))
    assert "    90 " in listed.stdout, listed.stderr
    verified = cli("snapshots", "verify", "--run-dir", str(job.directory))
    kept = (
        3 + 1
    )  # the newest, and what the ranks have started from; and the one that was written last, if it is an older one
    assert verified.returncode == 0
    assert verified.stdout.count("sound, every byte read") in (kept, kept + 1)

    other = job_at(tmp_path / "other", swift, where)
    assert other.agent.wait(180) == 2
    assert "are another job's" in other.said()


@pytest.mark.parametrize(
    ("where", "extra", "sentence"),
    [
        ("s3://nowhere/run", {}, "there is no such bucket"),
        (f"s3://{BUCKET}/run", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch"),
    ],
)
def test_a_job_without_its_store_does_not_begin(
    where: str, extra: dict[str, str], sentence: str, tmp_path: Path, swift: Swift
) -> None:
    words = [
        "--snapshots",
        where,
        "--set",
        f"snapshots.endpoint={swift.endpoint}",
        "--set",
        "snapshots.region=us-east-1",
    ]
    done = cli("run", "--run-dir", str(tmp_path), *words, "--", "torchrun", str(MINIMAL), **extra)
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.splitlines()
    assert sentence in line
    assert "nothing was started" in line
