"""Names of tensors as paths of zarr: reversible, distinct, and nothing that zarr reads in another way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.checkpoint.durable.snapshot_view import Tensor
from mt_resilient.formats.zarr_nodes import CHUNK_BYTES, Array, name_of, path_of

part = st.sampled_from(
    ["", ".", "..", "zarr.json", "__x", "_", "c", "a%", "%", "%25", "a.b", "\\", "ü", "0"]
) | st.text(max_size=4)
names = st.lists(part, min_size=1, max_size=4).map("/".join)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("model/decoder.layers.0.mlp.linear_fc1.weight", "model/decoder.layers.0.mlp.linear_fc1.weight"),
        ("a//b", "a/%/b"),
        ("..", "%2E."),
        ("zarr.json", "zarr%2Ejson"),
        ("__init", "%5F_init"),
        ("50%", "50%25"),
        ("a", "a%"),
    ],
)
def test_plain_names_stay_and_odd_ones_are_encoded(name: str, path: str) -> None:
    assert path_of(name, {"a", "a/b"}) == path


@given(st.sets(names, min_size=1, max_size=6))
def test_paths_are_reversible_and_distinct(all_names: set[str]) -> None:
    paths = {name: path_of(name, all_names) for name in all_names}
    assert {name: name_of(path) for name, path in paths.items()} == {name: name for name in all_names}
    assert len(set(paths.values())) == len(all_names)
    for path in paths.values():
        parts = path.split("/")
        assert "\\" not in path
        assert not {"", ".", "..", "zarr.json"} & set(parts)
        assert not any(each.startswith("__") for each in parts)
        assert not any(other.startswith(f"{path}/") for other in paths.values()), "no array is a group too"


@given(
    st.lists(st.integers(0, 1 << 22), max_size=3).map(tuple),
    st.sampled_from(["float32", "bfloat16", "complex128", "bool"]),
    st.data(),
)
def test_chunks_are_of_bounded_size_and_cover_the_tensor(
    shape: tuple[int, ...], dtype: str, data: st.DataObject
) -> None:
    array = Array(Tensor(name="t", dtype=dtype, shape=shape), False)
    chunk = Tensor(name="c", dtype=dtype, shape=array.chunk)
    assert 0 < chunk.nbytes <= CHUNK_BYTES
    place = [data.draw(st.integers(0, size - 1)) for size in shape] if all(shape) else None
    if place is not None:
        found = array.box(tuple(at // size for at, size in zip(place, array.chunk, strict=True)))
        assert found is not None
        assert all(o <= at < o + n for o, n, at in zip(*found, place, strict=True))
    assert not shape or array.box(tuple(-(-s // c) for s, c in zip(shape, array.chunk, strict=True))) is None
