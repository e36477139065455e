"""Whatever a snapshot says: it is refused with SnapshotError or it is read, and nothing else comes of it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint import layout
from mt_resilient.checkpoint.contents import Contents, batches
from mt_resilient.checkpoint.files import Files
from mt_resilient.checkpoint.geometry import Part
from mt_resilient.checkpoint.manifest import FORMAT, Commit, Entry, RankManifest
from mt_resilient.checkpoint.reshard import Saved
from mt_resilient.resilience.errors import FormatError, SnapshotError

from .test_reshard import save, whole

odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.sampled_from([1 << 40, 1 << 58, 1 << 70, -1, 1.5, float("nan"), "", "t", "float32", "0" * 16, 10**15]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dict", "leaf", "int", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value in a JSON value."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def changed(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(node)
    if not path:
        return value
    into = found
    for key in path[:-1]:
        into = into[key]
    into[path[-1]] = value
    return found


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Files:
    t, flat = torch.arange(12.0).view(3, 4), torch.arange(5.0)
    column = Part(name="model/c", shape=(3, 4), offset=(0, 0), box=(3, 2), strides=(4, 1))
    shard = Part(name="model/f", shape=(9,), offset=(0,), box=(9,), flat=(0, 5))
    rest = Part(name="model/f", shape=(9,), offset=(0,), box=(9,), flat=(5, 9))
    other = Part(name="model/c", shape=(3, 4), offset=(0, 2), box=(3, 2), start=2, strides=(4, 1))
    first = [("t", t, [*whole("model/t", t)]), ("c", t, [column, other]), ("f", flat, [shard]), ("own", flat, [])]
    return save(tmp_path_factory.mktemp("hostile"), [first, [("f", flat[:4], [rest]), ("own", flat[1:], [])]])


def reseal(snapshot: Files, manifest: Any) -> None:
    """As somebody would who means harm: all checksums above the manifest are right."""
    data = json.dumps(manifest).encode()
    (snapshot.path / layout.manifest_name(0)).write_bytes(data)
    entries = []
    for rank in range(2):
        content = (snapshot.path / layout.manifest_name(rank)).read_bytes()
        entries.append(Entry(bytes=len(content), sha256=sha256(content).hexdigest()))
    (snapshot.path / layout.COMMIT).write_bytes(
        replace(Commit.from_json(snapshot.read(layout.COMMIT)), ranks=tuple(entries)).to_json()
    )


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_manifest_that_was_meant_to_harm(snapshot: Files, data: st.DataObject) -> None:
    path = snapshot.path / layout.manifest_name(0)
    sound = path.read_bytes()
    parsed = json.loads(sound)
    try:
        for _ in range(data.draw(st.integers(1, 2))):
            parsed = changed(parsed, data.draw(st.sampled_from(places(parsed))), data.draw(odd))
        reseal(snapshot, parsed)
        try:
            saved = Saved(snapshot)
            contents = Contents(saved)
            for batch in batches(list(contents.tensors.values()), 1 << 20):
                contents.read(batch)
            saved.digest()
            for manifest in saved.manifests:
                manifest.words()
        except (SnapshotError, FormatError):
            pass
    finally:
        reseal(snapshot, json.loads(sound))


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(min_value=0), st.integers(0, 255))
def test_a_manifest_with_a_damaged_byte(snapshot: Files, at: int, value: int) -> None:
    body = bytearray((snapshot.path / layout.manifest_name(0)).read_bytes())
    body[at % len(body)] = value
    try:
        RankManifest.from_json(bytes(body)).table.described()
    except (SnapshotError, FormatError):
        pass


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3), max_leaves=9))
def test_any_json_is_no_commit(found: Any) -> None:
    for data in (json.dumps(found), json.dumps({"format": FORMAT, "attempt": found, "ranks": [found]})):
        with pytest.raises(SnapshotError):
            Commit.from_json(data.encode())


def test_the_sound_one_is_read(snapshot: Path) -> None:
    contents = Contents(Saved(snapshot))
    assert list(contents.tensors) == ["model/c", "model/f", "model/t", "rank-00000/own", "rank-00001/own"]
    assert [tensor.shape for tensor in contents.tensors.values()] == [(3, 4), (9,), (3, 4), (5,), (4,)]
