"""Pickles of others: data comes out, and nothing in them is run."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

from mt_resilient.formats import dcp_reader, safe_unpickle, torch_zip
from mt_resilient.formats.safe_unpickle import Record, stand_in
from mt_resilient.formats.torch_zip import Held
from mt_resilient.resilience.errors import ResilientError, SnapshotError

KNOWN = {"collections.OrderedDict": safe_unpickle.empty_dict, "argparse.Namespace": stand_in("argparse.Namespace")}


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.made = function, args

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_read(protocol: int) -> None:
    data = {"a": [1, -(1 << 80), 2.5, None, True, "ü"], ("k", 3): ({}, (), [], (1, 2, 3, 4)), "o": OrderedDict(b=1)}
    assert safe_unpickle.read(pickle.dumps(data, protocol), "it", KNOWN) == data


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("function", [os.system, eval, subprocess.Popen, getattr, __import__])
def test_nothing_in_a_pickle_is_run(tmp_path: Path, function: Any, lenient: bool) -> None:
    marker = tmp_path / "ran"
    hostile = pickle.dumps(
        [Calls(function, f"touch {marker}"), Calls(OrderedDict), Calls(eval, f"open({str(marker)!r}, 'w')")]
    )
    if lenient:
        found, *_ = safe_unpickle.read(hostile, "it", KNOWN, lenient=True)
        assert isinstance(found, Record)
        assert found.args == (f"touch {marker}",)
    else:
        with pytest.raises(
            SnapshotError, match=r"^it: it names '.*', which does not belong in .*; nothing in it was run$"
        ):
            safe_unpickle.read(hostile, "it", KNOWN)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (b"\x80\x02}r\xff\xff\xff\x7f.", ""),  # a memo index of 2^31: C's unpickler makes room for so many
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", "not readable"),  # a bytearray of 2^63 bytes
        (b"I" + b"9" * 100_000 + b"\n.", "not readable"),  # a number as text
        (b"\x80\x02]q\x00(h\x00h\x00h\x00s.", "key"),
        (b"\x80\x02)\x85" + b"2\x86" * 60 + b"}q\x00h\x00\x93.", "not readable"),
        (b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s.", "key that is not a name"),  # its hash would take 2^60 steps
        (b"\x80\x02(K\x01K\x02l.", "not readable"),
        (b"\x80\x02cargparse\nNamespace\n}b.", "not an object"),  # a state for the class itself
        (b"\x80\x02K\x01)R.", "not a class"),
        (b"\x80\x02K\x01.trailing", ""),
        (b"\x80\x02", "not readable"),
        (b"", "not readable"),
        (b"\x80\x02K\x01Q.", "outside"),
        (b"\x80\x02\x82\x01.", "not readable"),  # copyreg's codes
    ],
)
def test_pickles_that_do_more_than_build_data_are_refused(program: bytes, what: str) -> None:
    if not what:
        safe_unpickle.read(program, "it", KNOWN)
        return
    with pytest.raises(SnapshotError, match=what):
        safe_unpickle.read(program, "it", KNOWN)


def test_a_pickle_cannot_change_the_stand_in_classes() -> None:
    before = dict(vars(KNOWN["argparse.Namespace"]))
    for program in (
        b"\x80\x02cargparse\nNamespace\n(N}X\x05\x00\x00\x00named K\x01u\x86b.",
        b"\x80\x02cargparse\nNamespace\n)\x81}b.",
    ):
        try:
            safe_unpickle.read(program, "it", KNOWN)
        except SnapshotError:
            pass
    assert dict(vars(KNOWN["argparse.Namespace"])) == before


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "c"
    state = {
        "model": {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(3).bfloat16()},
        "steps": {"n": 4, "lr": [0.1]},
    }
    dcp.save(state, checkpoint_id=path)
    return path


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(min_value=0), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 2))
def test_damaged_metadata_is_refused_or_describes_a_checkpoint(
    checkpoint: Path, changes: list[tuple[int, int]], cut: int
) -> None:
    body = bytearray((checkpoint / dcp_reader.METADATA).read_bytes())
    for at, value in changes:
        body[at % len(body)] = value
    with tempfile.TemporaryDirectory() as place:
        for file in checkpoint.glob("*.distcp"):
            os.link(file, Path(place) / file.name)
        (Path(place) / dcp_reader.METADATA).write_bytes(body[: len(body) - cut])
        try:
            found = dcp_reader.open_dcp(Path(place))
            for tensor in found.tensors.values():
                for chunk in tensor.chunks:
                    tensor.content(chunk)
            for key in found.values:
                found.value(key)
        except SnapshotError:
            pass


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(min_value=0), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_saved_by_torch_is_refused_or_read(changes: list[tuple[int, int]]) -> None:
    buffer = io.BytesIO()
    torch.save(
        {"t": torch.arange(6.0), "u": torch.ones(2, 2).t(), "n": (1, "x"), "h": torch.ones(1).to(torch.float8_e5m2)},
        buffer,
    )
    body = bytearray(buffer.getvalue())
    for at, value in changes:
        body[at % len(body)] = value
    with tempfile.NamedTemporaryFile() as file:
        file.write(body)
        file.flush()
        try:
            for each in torch_zip.load(Path(file.name), lenient=True).values():
                if isinstance(each, Held):
                    each.content()
        except (SnapshotError, AttributeError):  # no dict any more: a sound file of something else
            pass


def test_a_tensor_saved_by_torch_is_read_exact_to_the_bit(tmp_path: Path) -> None:
    base = torch.randn(7, 5)
    state = {
        "view": base[1:4, 2:4],
        "transposed": base.t(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "parameter": torch.nn.Parameter(base.clone()),
        "bytes": b"\0\xff",
        **{
            name: torch.ones(3).to(getattr(torch, name))
            for name in ("bfloat16", "float8_e4m3fn", "uint16", "complex128", "bool")
        },
    }
    torch.save(state, tmp_path / "state.pt")
    found = torch_zip.load(tmp_path / "state.pt")
    assert found.pop("bytes") == state.pop("bytes")
    for name, tensor in state.items():
        assert found[name].shape == tuple(tensor.shape)
        assert (
            found[name].content().tobytes()
            == tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )


def test_a_file_that_torch_did_not_save_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("nothing")
    torch.save({"a": 1}, tmp_path / "old", _use_new_zipfile_serialization=False)
    torch.save(torch.zeros(300), tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:900])
    for name in ("text", "old", "cut", "missing"):
        with pytest.raises(SnapshotError) as raised:
            torch_zip.load(tmp_path / name)
        assert str(tmp_path / name) in str(raised.value)
    with pytest.raises(ResilientError):
        torch_zip.load(tmp_path)
