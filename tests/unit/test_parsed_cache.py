"""Parsing only what has changed gives the World that parsing everything gives."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.resilience.errors import InternalError
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.node import AckKind, Spec
from mt_resilient.resilience.model.request import Request
from mt_resilient.resilience.model.types import Generation, NodeId
from mt_resilient.resilience.store.codec import dumps
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.parsed_cache import Values
from mt_resilient.resilience.store.state_reader import read_world, world_of
from mt_resilient.resilience.store.watch_cache import Mirror

from ..memory_store import MemoryStore
from .worlds import ack, incident, node, record, status

KEYS = Keys("job")
NAMES = ("a", "b", "ab", "c/d")


def keyed() -> dict[str, list[Any]]:
    """Key → what may be there."""
    several: dict[str, list[Any]] = {
        KEYS.spec: [Spec(command=("t",))],
        KEYS.generation: [record(number=1, members=("a", "b")), record(number=2, members=("b",))],
        KEYS.incident("0001"): [incident(1)],
        KEYS.incident("0002"): [incident(2)],
        KEYS.request("r"): [Request(kind="stop")],
    }
    for name in NAMES:
        one = NodeId(name)
        several[KEYS.node(one)] = [node(name), node(name, instance="later")]
        several[KEYS.status(one)] = [status(max_step=n) for n in range(3)]
        for generation in (1, 2):
            several[KEYS.ack(Generation(generation), one)] = [ack(AckKind.READY, generation, name)]
    return several


KEYED = keyed()
WRITES = st.sampled_from(sorted(KEYED)).flatmap(
    lambda key: st.tuples(st.just(key), st.one_of(st.none(), st.sampled_from(KEYED[key])))
)


@given(st.lists(st.lists(WRITES, max_size=6), max_size=12), st.booleans())
def test_the_world_is_the_same_however_it_was_come_by(rounds: list[list[tuple[str, Any]]], listed: bool) -> None:
    store = MemoryStore(lambda: 0.0)
    mirror, values = Mirror(store, KEYS.root), Values()
    for writes in rounds:
        for key, value in writes:
            if value is None:
                store.delete(key)
            else:
                store.put(key, dumps(value))
        if listed:
            mirror.doubt()
        found = store.range(KEYS.root)
        assert dict(mirror.entries()) == found
        values.update(mirror.changed())
        world = world_of(KEYS, values)
        assert world == read_world(KEYS, {key: entry.value for key, entry in found.items()})
        assert list(world.status) == sorted(world.status)


def test_one_that_comes_while_another_goes_is_put_in_its_place() -> None:
    values = Values({KEYS.status(NodeId(name)): dumps(status()) for name in ("ab", "b")})
    world_of(KEYS, values)
    values.update({KEYS.status(NodeId("ab")): None, KEYS.status(NodeId("a")): dumps(status())})
    assert list(world_of(KEYS, values).status) == ["a", "b"]


def test_what_was_handed_out_stays_as_it_was() -> None:
    values = Values({KEYS.status(NodeId("a")): dumps(status())})
    before = world_of(KEYS, values)
    values.update({KEYS.status(NodeId("a")): None, KEYS.status(NodeId("b")): dumps(status())})
    assert list(world_of(KEYS, values).status) == ["b"]
    assert list(before.status) == ["a"]


def test_what_is_no_record_is_our_error_each_time() -> None:
    values = Values({KEYS.generation: b"{}"})
    for _ in range(2):
        with pytest.raises(InternalError, match="GenerationRecord"):
            values.one(KEYS.generation, GenerationRecord)


def test_acknowledgements_of_older_generations_are_not_kept_up() -> None:
    values = Values()
    for number in range(1, 20):
        new = record(number=number)
        values.update(
            {KEYS.generation: dumps(new), KEYS.ack(Generation(number), NodeId("a")): dumps(ack(AckKind.READY, number))}
        )
        assert world_of(KEYS, values).acks.keys() == {"a"}
    assert len(values._groups) < 12
