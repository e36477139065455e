"""Manifests: there and back, and nothing else believed."""

import json

import pytest

from mt_resilient.checkpoint.format.manifest import Commit, Entry, Figures, RankManifest
from mt_resilient.checkpoint.format.shared_chunks import Sources
from mt_resilient.checkpoint.format.tensor_table import plan
from mt_resilient.resilience.errors import SnapshotError

MANIFEST = RankManifest(
    attempt="0000000001-g1-aaaaaaaa0000",
    rank=0,
    world=2,
    table=plan({"leaf": "a"}, [("a", "float32", (3,))]),
    metadata_sha256="0" * 64,
    fingerprints=("0123456789abcdef",),
    chunk_crc32c=(7,),
    sources=Sources.whole(0, 1),
)
COMMIT = Commit(
    attempt=MANIFEST.attempt,
    ranks=(Entry(bytes=3, sha256="a" * 64), Entry(bytes=4, sha256="b" * 64)),
    figures=Figures.of(1.5e9, 12),
)


@pytest.mark.parametrize(
    ("old", "new"), [(b"1500000000.0", b"1500000001.0"), (b'"bytes":12', b'"bytes":13'), (b"crc32c", b"crc32b")]
)
def test_changed_figures_in_commit_are_detected(old, new):
    assert old in COMMIT.to_json()
    with pytest.raises(SnapshotError, match="COMMIT"):
        Commit.from_json(COMMIT.to_json().replace(old, new))


def test_manifest_and_commit_are_parsed_as_they_were_written():
    assert RankManifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert Commit.from_json(COMMIT.to_json()) == COMMIT
    assert COMMIT.world == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 0}, "does not name its format"),
        ({"rank": "0"}, r"Expected `int`, got `str` - at `\$\.rank`"),
        ({"chunk_crc32c": []}, "one checksum for each chunk"),
        ({"chunk_crc32c": [1.5]}, "Expected `int`, got `float`"),
        ({"fingerprints": []}, "one fingerprint for each tensor"),
        ({"fingerprints": [7]}, "Expected `str`"),
        ({"table": {}}, r"missing required field `skeleton` - at `\$\.table`"),
        ({"sources": [[1, 0]]}, "of length 3"),
        ({"sources": [[1, 0, True]]}, "Expected `int`, got `bool`"),
        ({"sources": [[2, 0, 0]]}, "where each of its 1 chunks is"),
        ({"sources": [[1, 2, 0]]}, "where each of its 1 chunks is"),
        ({"sources": [[1, 1, -1]]}, "Expected `int` >= 0"),
        ({"sources": [[1 << 70, 0, 0]]}, "Expected `int` <="),
        ({"sources": [[1, 0, 1]]}, "does not place"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_a_malformed_rank_manifest_is_refused(change, words):
    with pytest.raises(SnapshotError, match=words):
        RankManifest.from_json(json.dumps(json.loads(MANIFEST.to_json()) | change).encode())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": []}, "of length >= 1"),
        ({"ranks": [{"bytes": 1, "sha256": "A" * 64}]}, "matching regex"),
        ({"ranks": [{"bytes": True, "sha256": "a" * 64}]}, "got `bool`"),
        ({"ranks": [3]}, "Expected `object`, got `int`"),
        ({"format": None}, "does not name its format"),
    ],
)
def test_a_malformed_commit_is_refused(change, words):
    with pytest.raises(SnapshotError, match=words):
        Commit.from_json(json.dumps(json.loads(COMMIT.to_json()) | change).encode())


@pytest.mark.parametrize("kind", [RankManifest, Commit])
@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"[" * 100_000, b'{"format":3}'])
def test_bytes_that_are_no_manifest_are_refused(kind, data):
    with pytest.raises(SnapshotError):
        kind.from_json(data)
