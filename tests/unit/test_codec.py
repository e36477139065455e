"""Records to JSON and back."""

import dataclasses
import json
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.resilience.errors import InternalError
from mt_resilient.resilience.inprocess.loss_spike import SpikePolicy
from mt_resilient.resilience.inprocess.rewind_ladder import LadderPolicy
from mt_resilient.resilience.inprocess.tally import RankPolicy
from mt_resilient.resilience.ipc.handoff import Handoff
from mt_resilient.resilience.model.data_windows import Window
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.node import Ack, NodeRecord, NodeStatus, Spec
from mt_resilient.resilience.model.request import Request
from mt_resilient.resilience.model.signals import InPlaceRewind, RankExit
from mt_resilient.resilience.store.codec import dumps, loads

RECORDS = (Ack, GenerationRecord, Handoff, InPlaceRewind, Incident, NodeRecord, NodeStatus, RankExit, Request, Spec)

POLICIES = [RankPolicy(), RankPolicy(spikes=SpikePolicy(enabled=False), ladder=LadderPolicy(max_skips=0))]

st.register_type_strategy(RankPolicy, st.sampled_from(POLICIES))
st.register_type_strategy(Window, st.builds(lambda at, size: Window(at, at + size), st.integers(0), st.integers(1)))
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(str, st.text(st.characters(codec="utf-8") | st.characters(categories=["Cs"]), max_size=9))


@pytest.mark.parametrize("cls", RECORDS)
def test_there_and_back(cls: type) -> None:
    @settings(max_examples=20, deadline=None)
    @given(st.from_type(cls))
    def check(record: Any) -> None:
        data = dumps(record)
        assert b"\n" not in data
        assert loads(cls, data) == record
        assert loads(cls, data.decode()) == record
        assert _kinds(loads(cls, data)) == _kinds(record)

    check()


def _kinds(value: Any) -> Any:
    """Types all the way down: a StrEnum equals its text, and is not the same thing."""
    if dataclasses.is_dataclass(value):
        return type(value), [_kinds(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return tuple, [_kinds(item) for item in value]
    return type(value)


@pytest.mark.parametrize("cls", RECORDS)
def test_only_a_field_without_a_default_is_needed_and_unknown_fields_are_ignored(cls: type) -> None:
    @settings(max_examples=3, deadline=None)
    @given(st.from_type(cls))
    def check(record: Any) -> None:
        newer = {**json.loads(dumps(record)), "added_in_a_later_version": [1, {"a": None}]}
        assert loads(cls, json.dumps(newer)) == record
        for field in dataclasses.fields(cls):
            fields = json.loads(dumps(record))
            del fields[field.name]
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                with pytest.raises(InternalError, match=cls.__name__):
                    loads(cls, json.dumps(fields))
            else:
                assert isinstance(loads(cls, json.dumps(fields)), cls)

    check()


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    number: int


@dataclass(frozen=True)
class Outer:
    text: str = ""
    number: int = 0
    real: float = 0.0
    perhaps: int | None = None
    colour: Colour = Colour.RED
    several: tuple[int, ...] = ()
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    by_number: dict[int, int] = dataclasses.field(default_factory=dict)
    inner: Inner = Inner(1)
    inners: tuple[Inner, ...] = ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", 1),
        ("text", None),
        ("number", "1"),
        ("number", 1.5),
        ("number", None),
        ("real", "1"),
        ("perhaps", "1"),
        ("colour", "blue"),
        ("several", "12"),
        ("several", 1),
        ("several", [1, "2"]),
        ("several", {"1": 2}),
        ("table", [1]),
        ("table", {"a": "b"}),
        ("inner", 1),
        ("inner", {}),
        ("inner", [1]),
        ("inners", [{"number": 1}, {}]),
    ],
)
def test_a_value_of_another_type_is_our_error(field: str, value: Any) -> None:
    with pytest.raises(InternalError, match="cannot read a Outer from"):
        loads(Outer, json.dumps({field: value}))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"7", b'"text"', b"\xff\xfe", b"[" * 100])
def test_what_is_no_record_at_all_is_our_error(data: bytes) -> None:
    with pytest.raises(InternalError, match="Inner"):
        loads(Inner, data)


def test_a_whole_number_is_a_number() -> None:
    read = loads(Outer, '{"real": 3, "perhaps": null}')
    assert (type(read.real), read.real, read.perhaps) == (float, 3.0, None)


def test_what_only_python_takes_for_json_is_read() -> None:
    read = loads(Outer, b'{"real": NaN, "text": "\\udcff", "by_number": {"2": 3}}')
    assert read.by_number == {2: 3}
    assert math.isnan(read.real)
    assert read.text == "\udcff"


def test_the_error_does_not_repeat_a_whole_record() -> None:
    with pytest.raises(InternalError) as caught:
        loads(Inner, json.dumps({"text": "x" * 10_000}))
    assert len(str(caught.value)) < 400
