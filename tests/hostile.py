"""Damage that somebody may have done to a snapshot on purpose: JSON that is changed in its structure, bytes that are changed at random, and
all checksums above them made right again."""

from __future__ import annotations

import copy
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crc32c import crc32c
from hypothesis import strategies as st

from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.format.sharding import Part
from mt_resilient.checkpoint.slabs import zarr_slab
from mt_resilient.formats.dcp_names import Foreign, Found, FoundBox
from mt_resilient.formats.import_checkpoint import import_into
from mt_resilient.formats.zarr_store import SnapshotStore

NUMBERS = (0, 1, 2, 3, 5, -1, True, 1.0, 1.5, 1 << 31, 1 << 40, 1 << 58, (1 << 60) - 1, 1 << 63, 1 << 70, 10**400)
TEXTS = ("", "t", "..", "/etc/passwd", "a\0b", "\ud800", "float32", "0" * 16, "0" * 64, "n" * 100_000, "model/t", "1.0")
odd = st.recursive(
    st.none() | st.sampled_from([*NUMBERS, float("nan"), float("inf"), *TEXTS, [1] * 200, [0] * 65]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dict", "tuple", "leaf", "int", "numpy", "float", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value in a JSON value."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


@st.composite
def changed(draw: st.DrawFn, sound: Any) -> Any:
    """`sound` with one to three values replaced, moved, copied or left out."""
    found = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(found)))
        if not path:
            continue
        into, key = at(found, path[:-1]), path[-1]
        match draw(st.sampled_from(["odd", "odd", "near", "other", "gone", "twice", "deep"])):
            case "odd":
                into[key] = copy.deepcopy(draw(odd))
            case "near" if type(into[key]) is int:
                into[key] += draw(st.sampled_from([-64, -1, 1, 64]))
            case "other":
                into[key] = copy.deepcopy(at(found, draw(st.sampled_from(places(found)))))
            case "gone":
                del into[key]
            case "twice" if isinstance(into, list):
                into.insert(key, copy.deepcopy(into[key]))
            case "deep":
                for _ in range(draw(st.sampled_from([70, 400]))):
                    into[key] = [into[key]]
    return found


@st.composite
def scratched(draw: st.DrawFn, sound: bytes) -> bytes:
    """`sound` with bytes changed, cut off or put in."""
    body = bytearray(sound)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(body) - 1, 0)))
        match draw(st.sampled_from(["byte", "bit", "cut", "more"])):
            case "byte" if body:
                body[place] = draw(st.integers(0, 255))
            case "bit" if body:
                body[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del body[place:]
            case "more":
                body[place:place] = draw(
                    st.sampled_from([b"\0", b"\xff", b"[" * 5000, b"9" * 5000, b'"a":1,', b"1e999"])
                )
    return bytes(body)


def encoded(value: Any) -> bytes:
    """JSON as no careful writer makes it: with NaN, and with numbers of any size."""
    return json.dumps(value).encode()


def write_manifest(snapshot: Files, rank: int, data: bytes) -> None:
    (snapshot.path / paths.manifest_name(rank)).write_bytes(data)


def reseal(snapshot: Files) -> None:
    """As somebody would who means harm: COMMIT has the right checksums of the manifests that are there."""
    path = snapshot.path / paths.COMMIT
    found = json.loads(path.read_bytes())
    for rank, entry in enumerate(found["ranks"]):
        content = (snapshot.path / paths.manifest_name(rank)).read_bytes()
        entry |= {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    path.write_bytes(encoded(found))


def sign_figures(figures: Any) -> None:
    """Their checksum, where they are figures at all."""
    if isinstance(figures, dict):
        held = {key: figures.get(key) for key in ("written_s", "bytes")}
        figures["crc32c"] = crc32c(json.dumps(held, separators=(",", ":")).encode())


def sign_metadata(snapshot: Files, rank: int, data: bytes) -> None:
    """Another zarr.json for a rank's slab, which its manifest names."""
    (snapshot.path / paths.slab_name(rank) / zarr_slab.METADATA).write_bytes(data)
    path = snapshot.path / paths.manifest_name(rank)
    path.write_bytes(encoded(json.loads(path.read_bytes()) | {"metadata_sha256": sha256(data).hexdigest()}))
    reseal(snapshot)


def trained(root: Path) -> Files:
    """A snapshot of some ranks: a model, an optimizer with groups, values, tensors of one rank's own."""
    numbers = np.arange(24, dtype=np.uint32)

    def found(name: str, shape: tuple[int, ...], cuts: int = 1) -> Found:
        rows = shape[0] // cuts
        inner = int(np.prod(shape[1:]))
        boxes = tuple(
            FoundBox(
                offset=(cut * rows, *(0 for _ in shape[1:])),
                shape=(rows, *shape[1:]),
                read=lambda cut=cut: numbers[cut * rows * inner : (cut + 1) * rows * inner],
            )
            for cut in range(cuts)
        )
        return Found(name=name, dtype="float32", shape=shape, boxes=boxes)

    foreign = Foreign(
        step=1,
        found=[
            found("model/t", (4, 6), 2),
            found("model/u", (24,)),
            found("optimizer/exp_avg/model/t", (4, 6), 2),
            found("optimizer/exp_avg/model/u", (24,)),
        ],
        values={"counters": {"iteration": 1, "rate": [0.5, float("nan")], "blob": b"\0\1"}},
        groups=[{"lr": 0.1, "betas": (0.9, 0.99), "params": ["model/t"]}, {"lr": 0.2, "params": ["model/u"]}],
    )
    place = import_into(Files(root), foreign, part_bytes=200)
    assert isinstance(place, Files)
    return place


def sharded(root: Path) -> Files:
    """A snapshot of two ranks: strided boxes, flat shards, tensors of one rank's own."""
    from .integration.test_reshard import save, whole

    t, flat = torch.arange(12.0).view(3, 4), torch.arange(5.0)
    column = Part(name="model/c", shape=(3, 4), offset=(0, 0), box=(3, 2), strides=(4, 1))
    shard = Part(name="model/f", shape=(9,), offset=(0,), box=(9,), flat=(0, 5))
    rest = Part(name="model/f", shape=(9,), offset=(0,), box=(9,), flat=(5, 9))
    other = Part(name="model/c", shape=(3, 4), offset=(0, 2), box=(3, 2), start=2, strides=(4, 1))
    first = [("t", t, [*whole("model/t", t)]), ("c", t, [column, other]), ("f", flat, [shard]), ("own", flat, [])]
    return save(root, [first, [("f", flat[:4], [rest]), ("own", flat[1:], [])]])


def read_as_zarr(snapshot: Files) -> None:
    """The first chunk of each array."""
    store = SnapshotStore(str(snapshot), as_integers=True)
    try:
        for array in store.arrays.values():
            first = (0,) * len(array.tensor.shape)
            if array.box(first) is not None:
                store._chunk(array, first)
    finally:
        store.close()
