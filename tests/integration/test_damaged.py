"""Some sixty damaged snapshots, and what each command says of them: an exit code and a sentence that names the file, never a traceback."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_resilient.checkpoint.arena.fill import destinations, fill
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.durable import load
from mt_resilient.checkpoint.durable.load_resharded import Saved
from mt_resilient.checkpoint.durable.snapshot_view import Contents
from mt_resilient.checkpoint.format.shard_image import CHUNK_BYTES
from mt_resilient.cli import main
from mt_resilient.resilience.errors import ResilientError, SnapshotError

from ..harness import some_of
from ..hostile import encoded, read_as_zarr, reseal, sharded, sign_figures, sign_metadata, trained, write_manifest
from .test_reshard import save, whole

Capture = pytest.CaptureFixture[str]
Damage = Callable[[Files], object]
RANK, SHARD, METADATA = paths.manifest_name(1), "rank-00001/c/0/0", "rank-00001/zarr.json"
GIB = 1 << 30
SOUND, USAGE, DAMAGED = 0, 2, 6


def bytes_of(name: str, content: bytes | Callable[[bytes], bytes]) -> Damage:
    def damage(snapshot: Files) -> None:
        path = snapshot.path / name
        path.write_bytes(content(path.read_bytes()) if callable(content) else content)
        if name == RANK:
            reseal(snapshot)

    return damage


def replaced(name: str, by: Callable[[Path], object]) -> Damage:
    def damage(snapshot: Files) -> None:
        path = snapshot.path / name
        path.unlink()
        by(path)

    return damage


def sparse(name: str, nbytes: int = 3 * GIB) -> Damage:
    return lambda snapshot: os.truncate(snapshot.path / name, nbytes)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # a path may be too long for one
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def commit_says(**fields: Any) -> Damage:
    def damage(snapshot: Files) -> None:
        path = snapshot.path / paths.COMMIT
        path.write_bytes(encoded(json.loads(path.read_bytes()) | fields))

    return damage


def figures(**fields: Any) -> Damage:
    def damage(snapshot: Files) -> None:
        path = snapshot.path / paths.COMMIT
        found = json.loads(path.read_bytes())
        found["figures"] |= fields
        sign_figures(found["figures"])
        path.write_bytes(encoded(found))

    return damage


def ranks(count: int) -> Damage:
    def damage(snapshot: Files) -> None:
        found = json.loads((snapshot.path / paths.COMMIT).read_bytes())
        more = b",".join([b'{"bytes":1,"sha256":"' + b"0" * 64 + b'"}'] * (count - len(found["ranks"])))
        content = encoded(found).replace(b'"}], "figures"', b'"},' + more + b'], "figures"')
        (snapshot.path / paths.COMMIT).write_bytes(content)

    return damage


def manifest(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(snapshot: Files) -> None:
        found = json.loads((snapshot.path / RANK).read_bytes())
        change(found)
        write_manifest(snapshot, 1, encoded(found))
        reseal(snapshot)

    return damage


def field(name: str, value: Any) -> Damage:
    return manifest(lambda found: found.update({name: value}))


def row(change: Callable[[list[Any]], object]) -> Damage:
    """The first tensor's row is changed."""
    return manifest(lambda found: change(found["table"]["pieces"][0]))


def column(number: int, value: Any) -> Damage:
    return row(lambda piece: piece.__setitem__(number, value))


def part(number: int, value: Any) -> Damage:
    return row(lambda piece: piece[4][0].__setitem__(number, value))


def table(name: str, value: Any) -> Damage:
    return manifest(lambda found: found["table"].update({name: value}))


def twice(found: dict[str, Any]) -> None:
    first, second = found["table"]["pieces"][:2]
    second[0] = first[0]


def over_another(found: dict[str, Any]) -> None:
    found["table"]["pieces"][1][3] = 0


def same_box_again(found: dict[str, Any]) -> None:
    """The second half of a tensor is said to be the first one: as many elements, some twice and some not at all."""
    halves = [each for piece in found["table"]["pieces"] for each in piece[4] if each[0] == "optimizer/exp_avg/model/t"]
    assert [half[2] for half in halves] == [[0, 0], [2, 0]]
    halves[1][2] = [0, 0]


def flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


CASES: dict[str, tuple[Damage, int, str]] = {
    # COMMIT
    "COMMIT is empty": (bytes_of(paths.COMMIT, b""), DAMAGED, ": COMMIT is not readable as JSON"),
    "COMMIT is cut off": (bytes_of(paths.COMMIT, lambda c: c[:-9]), DAMAGED, ": COMMIT is not readable as JSON"),
    "COMMIT is no UTF-8": (bytes_of(paths.COMMIT, b"\xff\xfe\xfd" * 9), DAMAGED, ": COMMIT is not readable"),
    "COMMIT is a list": (bytes_of(paths.COMMIT, b"[]"), DAMAGED, "does not name its format"),
    "COMMIT is nested deep": (bytes_of(paths.COMMIT, b"[" * 10**6), DAMAGED, ": COMMIT is not readable"),
    "COMMIT is of 3 GiB": (sparse(paths.COMMIT), DAMAGED, "COMMIT has more than"),
    "COMMIT is a pipe": (replaced(paths.COMMIT, os.mkfifo), DAMAGED, "COMMIT is no regular file"),
    "COMMIT is a directory": (replaced(paths.COMMIT, os.mkdir), DAMAGED, "COMMIT is no regular file"),
    "COMMIT is a socket": (replaced(paths.COMMIT, a_socket), DAMAGED, "COMMIT is no regular file"),
    "COMMIT is a device": (
        replaced(paths.COMMIT, lambda path: path.symlink_to("/dev/zero")),
        DAMAGED,
        "COMMIT is no regular file",
    ),
    "COMMIT leads nowhere": (
        replaced(paths.COMMIT, lambda path: path.symlink_to("nowhere")),
        USAGE,
        "no committed snapshot",
    ),
    "COMMIT leads to itself": (
        replaced(paths.COMMIT, lambda path: path.symlink_to(path.name)),
        USAGE,
        "no committed snapshot",
    ),
    "COMMIT of a later version": (commit_says(format=4), USAGE, "is written in format 4"),
    "COMMIT of no version": (commit_says(format=True), DAMAGED, "does not name its format"),
    "COMMIT of another attempt": (
        commit_says(attempt="0000000001-g1-00000000"),
        DAMAGED,
        "COMMIT belongs to the attempt",
    ),
    "COMMIT of a long attempt": (commit_says(attempt="x" * 10**6), DAMAGED, ": COMMIT is damaged"),
    "COMMIT with a key too many": (commit_says(more=1), DAMAGED, "unknown field `more`"),
    "COMMIT names no ranks": (commit_says(ranks=[]), DAMAGED, "of length >= 1"),
    "COMMIT names a million ranks": (ranks(1_000_000), DAMAGED, "COMMIT has more than"),
    "COMMIT names 100,000 ranks": (ranks(100_000), DAMAGED, "rank-00002.json: No such file"),
    "COMMIT names 100,001 ranks": (ranks(100_001), DAMAGED, "of length <= 100000"),
    "a checksum too short": (commit_says(ranks=[{"bytes": 1, "sha256": "0"}]), DAMAGED, "matching regex"),
    "a manifest of 3 GiB is promised": (
        commit_says(ranks=[{"bytes": 3 * GIB, "sha256": "0" * 64}]),
        DAMAGED,
        "Expected `int` <=",
    ),
    "written at NaN": (figures(written_s=float("nan")), DAMAGED, "NaN is no number"),
    "written at Infinity": (figures(written_s=float("inf")), DAMAGED, "Infinity is no number"),
    "written at 1e300": (figures(written_s=1e300), DAMAGED, "Expected `float` <="),
    "written at 10**400": (figures(written_s=10**400), DAMAGED, "COMMIT is damaged"),
    "written before 1970": (figures(written_s=-1.0), DAMAGED, "Expected `float` >="),
    "10**400 bytes": (figures(bytes=10**400), DAMAGED, "Expected `int` <="),
    "10**5000 bytes": (bytes_of(paths.COMMIT, b'{"format":3,"bytes":' + b"9" * 5000 + b"}"), DAMAGED, "not readable"),
    "-1 bytes": (figures(bytes=-1), DAMAGED, "Expected `int` >= 0"),
    "True bytes": (figures(bytes=True), DAMAGED, "got `bool`"),
    "1.5 bytes": (figures(bytes=1.5), DAMAGED, "got `float`"),
    "figures that nobody has signed": (
        commit_says(figures={"written_s": 1.0, "bytes": 1, "crc32c": 1}),
        DAMAGED,
        "figures",
    ),
    # A rank's manifest, and all checksums above it right
    "a manifest is empty": (bytes_of(RANK, b""), DAMAGED, "rank-00001.json: the rank manifest is not readable"),
    "a manifest is cut off": (bytes_of(RANK, lambda c: c[:99]), DAMAGED, "rank-00001.json: the rank manifest is not"),
    "a manifest is missing": (lambda s: (s.path / RANK).unlink(), DAMAGED, "rank-00001.json: No such file"),
    "a manifest is a pipe": (replaced(RANK, os.mkfifo), DAMAGED, "rank-00001.json is no regular file"),
    "a manifest is a directory": (replaced(RANK, os.mkdir), DAMAGED, "rank-00001.json is no regular file"),
    "a manifest is of 3 GiB": (sparse(RANK), DAMAGED, "rank-00001.json has more than"),
    "a manifest of another rank": (field("rank", 0), DAMAGED, "rank-00001.json belongs to"),
    "a manifest of another world": (field("world", 3), DAMAGED, "rank-00001.json belongs to"),
    "a manifest of no world": (field("world", 0), DAMAGED, "at `$.world`"),
    "a manifest of a later version": (
        field("format", 9),
        USAGE,
        "rank-00001.json: the rank manifest is written in format 9",
    ),
    "chunks elsewhere": (field("sources", [[1, 0, 1 << 39]]), DAMAGED, "and not the"),
    "chunks that are too many": (field("sources", [[1 << 59, 1, 0]]), DAMAGED, "where each of its"),
    "fingerprints of zeros": (
        manifest(lambda found: found.update(fingerprints=["0" * 16] * len(found["fingerprints"]))),
        DAMAGED,
        "and was saved with 0000000000000000",
    ),
    "checksums of zeros": (field("chunk_crc32c", [0]), DAMAGED, "chunk 0 is undamaged, but is not the chunk"),
    "a payload of 2**59 bytes": (table("payload_bytes", 1 << 59), DAMAGED, "not a whole number of chunks"),
    "a payload of NaN": (table("payload_bytes", float("nan")), DAMAGED, "NaN is no number"),
    "200 dimensions": (column(2, [1] * 200), DAMAGED, "of length <= 64"),
    "65 dimensions": (column(2, [1] * 65), DAMAGED, "of length <= 64"),
    "a product that overflows": (column(2, [1 << 40, 1 << 40]), DAMAGED, "malformed row"),
    "10**400 rows": (column(2, [10**400]), DAMAGED, "Expected `int` <="),
    "-1 rows": (column(2, [-1]), DAMAGED, "Expected `int` >= 0"),
    "True rows": (column(2, [True]), DAMAGED, "got `bool`"),
    "1.0 rows": (column(2, [1.0]), DAMAGED, "got `float`"),
    "a name of 10 MB": (column(0, "n" * 10**7), DAMAGED, "Expected `str` of length"),
    "another name than the state's": (column(0, "../../etc/passwd"), DAMAGED, "that is not in it"),
    "an unknown dtype": (column(1, "object"), DAMAGED, "malformed row"),
    "two tensors of a name": (manifest(twice), DAMAGED, "twice"),
    "a tensor over another": (manifest(over_another), DAMAGED, "over another tensor"),
    "a tensor outside": (column(3, 1 << 50), DAMAGED, "lies outside the payload"),
    "a part outside its tensor": (part(2, [9, 9]), DAMAGED, "malformed part"),
    "a part of 200 dimensions": (part(1, [1] * 200), DAMAGED, "of length <= 64"),
    "a part with strides that overflow": (part(7, [(1 << 60) - 1] * 2), DAMAGED, "malformed part"),
    "a state nested deep": (table("skeleton", deep(700)), DAMAGED, "nested too deep"),
    "a state nested deeper": (
        bytes_of(RANK, lambda c: c.replace(b'"skeleton":', b'"skeleton":' + b"[" * 10**5)),
        DAMAGED,
        "is not readable",
    ),
    "a state with an unknown kind": (table("skeleton", {"pickle": "x"}), DAMAGED, "unknown kind 'pickle'"),
    # A slab
    "a zarr.json of 3 GiB": (sparse(METADATA), DAMAGED, "zarr.json has more than"),
    "a zarr.json of another": (bytes_of(METADATA, b"{}"), DAMAGED, "zarr.json is damaged"),
    "a zarr.json that is a pipe": (replaced(METADATA, os.mkfifo), DAMAGED, "zarr.json is no regular file"),
    "a shard that is missing": (lambda s: (s.path / SHARD).unlink(), DAMAGED, "rank-00001/c/0/0 is missing"),
    "a shard that is cut off": (bytes_of(SHARD, lambda c: c[:-1]), DAMAGED, "rank-00001/c/0/0 has"),
    "a shard of 3 GiB": (sparse(SHARD), DAMAGED, "rank-00001/c/0/0 has 3221225472 bytes"),
    "a shard with a flipped bit": (bytes_of(SHARD, flipped), DAMAGED, "rank-00001/c/0/0: chunk 0 is damaged"),
    "a shard with another index": (
        bytes_of(SHARD, lambda c: c[:-1] + flipped(c[-1:])),
        DAMAGED,
        "rank-00001/c/0/0: its index is damaged",
    ),
    "a shard that is a pipe": (replaced(SHARD, os.mkfifo), DAMAGED, "rank-00001/c/0/0 has 0 bytes"),
    "a shard that is a directory": (replaced(SHARD, os.mkdir), DAMAGED, "rank-00001/c/0/0"),
}
ONLY_TOGETHER: dict[str, tuple[Damage, str]] = {
    "a part twice, and another one not at all": (manifest(same_box_again), "or some of them twice"),
}
"""What no rank can see of its own part."""


@pytest.fixture
def snapshot(tmp_path: Path) -> Files:
    return trained(tmp_path)


def of_command(*words: str, capsys: Capture) -> tuple[int, str]:
    code = main(words)
    told = capsys.readouterr()
    return code, " ".join((told.out + told.err).split())


def exported(snapshot: Files, capsys: Capture, to: str = "safetensors") -> tuple[int, str]:
    target = snapshot.path.parents[1] / f"out-{to}"
    code, said = of_command("snapshots", "export", str(snapshot), "--to", to, str(target), capsys=capsys)
    assert target.exists() == (code == SOUND)
    return code, said


def opened_as_zarr(snapshot: Files) -> int:
    try:
        read_as_zarr(snapshot)
    except ResilientError as error:
        return error.exit_code
    return SOUND


def restored(snapshot: Files) -> int:
    try:
        for rank in (0, 1):
            manifest = load.open_rank(snapshot, rank, 2)
            manifest.table.described()
            into = destinations(manifest.table, {})
            fill(manifest.table, into, load.chunks(snapshot, manifest), manifest.words())
    except ResilientError as error:
        return error.exit_code
    return SOUND


@pytest.mark.parametrize("name", some_of(CASES, every=4))
def test_a_damaged_snapshot(name: str, snapshot: Files, capsys: Capture) -> None:
    damage, code, words = CASES[name]
    damage(snapshot)
    command = partial(of_command, capsys=capsys)
    found, said = command("snapshots", "verify", str(snapshot))
    assert (found, words in said) == (code, True), said[:2000]
    assert len(said) < 5000, "it is a sentence"
    found, said = command("snapshots", "ls", str(snapshot))
    assert found == (code if code == USAGE and "COMMIT" in name and "version" not in name else SOUND), said
    assert {exported(snapshot, capsys)[0], opened_as_zarr(snapshot)} == {code}
    if words != "no committed snapshot":
        allowed = {code, DAMAGED} if "world" not in name and "ranks" not in name else {code, USAGE}
        assert restored(snapshot) in allowed


@pytest.mark.parametrize("name", ONLY_TOGETHER)
def test_what_only_all_parts_together_show(name: str, snapshot: Files, capsys: Capture) -> None:
    damage, words = ONLY_TOGETHER[name]
    damage(snapshot)
    code, said = exported(snapshot, capsys)
    assert (code, opened_as_zarr(snapshot)) == (DAMAGED, DAMAGED)
    assert words in said


def test_fingerprints_of_what_one_rank_has_alone_and_of_what_is_used_in_part(tmp_path: Path, capsys: Capture) -> None:
    snapshot = sharded(tmp_path)
    path = snapshot.path / paths.manifest_name(0)
    sound = json.loads(path.read_bytes())
    for number, name in enumerate(["t", "c", "f", "own"]):
        prints = [*sound["fingerprints"]]
        prints[number] = "0" * 16
        write_manifest(snapshot, 0, encoded(sound | {"fingerprints": prints}))
        reseal(snapshot)
        code, said = exported(snapshot, capsys)
        assert (code, opened_as_zarr(snapshot)) == (DAMAGED, DAMAGED)
        assert f"tensor '{name}' of rank 0 has the fingerprint" in said


def test_a_box_is_used_once_the_whole_of_its_piece_is_proved(tmp_path: Path) -> None:
    values = torch.arange(3 * CHUNK_BYTES // 4, dtype=torch.int32)
    snapshot = save(tmp_path, [[("t", values, whole("t", values))]])
    path = snapshot.path / paths.manifest_name(0)
    write_manifest(snapshot, 0, encoded(json.loads(path.read_bytes()) | {"fingerprints": ["0" * 16]}))
    reseal(snapshot)
    contents = Contents(Saved(snapshot, proving=True))
    with pytest.raises(SnapshotError, match="tensor 't' of rank 0 has the fingerprint"):
        contents.read_box(contents.tensors["t"], (5,), (3,))


def test_the_sound_one(snapshot: Files, capsys: Capture) -> None:
    assert of_command("snapshots", "verify", str(snapshot), capsys=capsys)[0] == SOUND
    assert {exported(snapshot, capsys, to)[0] for to in ("safetensors", "dcp")} == {SOUND}
    assert (opened_as_zarr(snapshot), restored(snapshot)) == (SOUND, SOUND)


def test_metadata_that_its_manifest_vouches_for_is_read_no_further_either(snapshot: Files, capsys: Capture) -> None:
    sign_metadata(snapshot, 1, b"{}" + b" " * (17 << 20))
    code, said = of_command("snapshots", "verify", str(snapshot), capsys=capsys)
    assert (code, "zarr.json has more than" in said) == (DAMAGED, True)


def test_of_many_ranks_that_are_damaged_some_are_named(snapshot: Files, capsys: Capture) -> None:
    ranks(50)(snapshot)
    code, said = of_command("snapshots", "verify", str(snapshot), capsys=capsys)
    assert (code, said.count("No such file")) == (DAMAGED, 14), (
        "and the first two, which are of a snapshot of two ranks"
    )
    assert said.endswith("ranks 16 to 49 were not checked")
