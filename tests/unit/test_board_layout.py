"""A board page: each field in its own place, and a last message that fits."""

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mt_resilient.resilience.inprocess.tally import ROW
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES, REWINDS, Rewound, Sighted
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.data_windows import Window
from mt_resilient.resilience.model.rewind import Remedy
from mt_resilient.resilience.model.types import OrderedBy

INTS = [name for name, field in vars(Page).items() if type(field) is type(vars(Page)["step"])]


def page() -> Page:
    fresh = Page(memoryview(bytearray(PAGE_BYTES)))
    fresh.clear(generation=3)
    return fresh


def rewound(onset: int, **changes: Any) -> Rewound:
    told = {
        "kind": Kind.LOSS_SPIKE,
        "onset": onset,
        "reached": 100 + onset,
        "to": onset - 1,
        "remedy": Remedy.SKIP,
        "window": Window(onset, 2 * onset),
        "value": 1.5,
        "expected": 0.5,
        "ranks": (0, onset, 65534),
        "at_ns": 10 * onset,
        "done_ns": 10 * onset + 1,
        "order": onset + 7,
    }
    return Rewound(**{**told, **changes})


@pytest.mark.parametrize("kind", [*Kind, *OrderedBy])
@pytest.mark.parametrize("remedy", Remedy)
def test_every_rewind_arrives_as_it_was_told(kind: str, remedy: Remedy) -> None:
    written = page()
    told = rewound(3, kind=kind, remedy=remedy, window=None, ranks=())
    written.rewound(told)
    assert written.rewind(1) == told


def test_each_field_has_a_place_of_its_own() -> None:
    written = page()
    for number, name in enumerate(INTS):
        setattr(written, name, 1000 + number)
    written.floats[5], written.floats[6] = 0.5, 0.25
    assert {name: getattr(written, name) for name in INTS} == {name: 1000 + number for number, name in enumerate(INTS)}
    assert (written.loss, written.grad_norm) == (0.5, 0.25)


def test_the_last_rewinds_are_told_each_by_itself() -> None:
    written = page()
    for ordinal in range(1, 3 * REWINDS.kept):
        written.beat(100 + ordinal, 1.0, 1.0, 7)
        written.say_farewell(error="said before")
        written.rewound(rewound(ordinal))
        assert (written.rewinds, written.step) == (ordinal, ordinal - 1)
        for kept in range(max(1, ordinal - REWINDS.kept + 1), ordinal + 1):
            assert written.rewind(kept) == rewound(kept)
    assert written.farewell() == {"error": "said before"}
    untouched = [
        name for name in INTS if name not in ("generation", "rank", "step", "durable_step", "rewinds", "beat_ns")
    ]
    assert {getattr(written, name) for name in untouched} == {0}


def test_a_row_is_heard_until_the_one_after_the_next() -> None:
    written = page()
    written.say_farewell(error="said before")
    written.rewound(rewound(3))
    assert written.hear(1) is None
    for ordinal in range(1, 7):
        written.speak(ordinal, [ordinal + 0.5] * ROW)
        assert written.hear(ordinal) == (ordinal + 0.5,) * ROW
        assert ordinal == 1 or written.hear(ordinal - 1) == (ordinal - 0.5,) * ROW
        assert ordinal <= 2 or written.hear(ordinal - 2) is None
        assert written.hear(ordinal + 1) is None
    assert (written.farewell(), written.rewind(1)) == ({"error": "said before"}, rewound(3))


def test_a_message_leaves_the_fields_alone() -> None:
    written = page()
    written.speak(1, [5.0] * ROW)
    written.rewound(rewound(3))
    found = {"window": Window(3, 4), "value": 7.0, "expected": 7.0, "at_ns": 8, "remedy": Remedy.SKIP}
    sighted = [Sighted(kind=Kind.LOSS_SPIKE, onset=at, seen=9, last=9, to=6, **found) for at in (4, 5)]
    for each in sighted:
        written.sighted(each)
    for name in INTS:
        setattr(written, name, -7)
    written.say_farewell(error="x" * 5000, traceback="y" * 5000)
    assert (written.hear(1), written.rewind(1)) == ((5.0,) * ROW, rewound(3))
    assert [written.sighting(1), written.sighting(2)] == sighted
    assert {getattr(written, name) for name in INTS} == {-7}


def test_a_page_is_seen_by_whoever_maps_the_same_memory() -> None:
    memory = bytearray(PAGE_BYTES)
    rank, agent = Page(memoryview(memory)), Page(memoryview(memory))
    rank.beat(7, 2.5, math.nan, 123)
    assert (agent.step, agent.loss, agent.beat_ns) == (7, 2.5, 123)
    assert math.isnan(agent.grad_norm)
    agent.order = 2
    assert rank.order == 2


def test_clearing_leaves_nothing_of_the_last_generation() -> None:
    used = page()
    used.beat(7, 2.5, 1.0, 123)
    used.order, used.pid = 2, 4711
    used.say_farewell(error="it failed")
    used.clear(generation=4, rank=1)
    assert (used.generation, used.rank, used.step, used.durable_step) == (4, 1, -1, -1)
    zero = [name for name in INTS if name not in ("generation", "rank", "step", "durable_step")]
    assert {getattr(used, name) for name in zero} == {0}
    assert (used.loss, used.farewell()) == (0.0, {})


@pytest.mark.parametrize("character", ["x", "ü", "错", "\\", '"', "\n", "\x00", "😀", "\udc80"])
@pytest.mark.parametrize("length", [100, 260, 3000, 100_000])
def test_long_texts_are_cut_at_their_beginning_and_what_matters_stays(character: str, length: int) -> None:
    written = page()
    texts = {"error": character * min(length, 300), "traceback": "first line\n" + character * length}
    written.say_farewell(**texts, kind="non_finite", step=7)
    heard = written.farewell()
    assert (heard["kind"], heard["step"]) == ("non_finite", 7)
    for name, text in texts.items():
        assert heard[name]
        assert text.endswith(heard[name])
    assert heard["traceback"].startswith("first line") is (length < 1000 and len(heard["traceback"]) > length)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["error", "traceback", "path"]), st.text(max_size=4000)), st.integers(-1, 10**9))
@example({"error": "KeyError: 'ключ'", "path": "/a/b"}, 7)
def test_a_message_arrives_with_all_its_words(texts: dict[str, Any], step: int) -> None:
    written = page()
    written.say_farewell(**texts, kind="snapshot", step=step)
    heard = written.farewell()
    assert heard.keys() == {*texts, "kind", "step"}
    assert (heard["kind"], heard["step"]) == ("snapshot", step)
    if sum(map(len, texts.values())) < 80:  # nothing is cut
        assert heard == {**texts, "kind": "snapshot", "step": step}


@pytest.mark.parametrize("length", [-1, 0, PAGE_BYTES, 2**62, -(2**62)])
def test_a_length_that_cannot_be_is_no_message(length: int) -> None:
    torn = page()
    torn.say_farewell(error="it failed")
    torn.ints[1600 // 8] = length
    assert torn.farewell() == {}


@pytest.mark.parametrize(
    "garbage", [b"garbage!", b"\xff\xfe\xfd", b'{"error": "it failed", "traceback": "', b"\x00" * 40]
)
def test_a_message_that_was_not_finished_is_no_message(garbage: bytes) -> None:
    torn = page()
    torn.say_farewell(error="it failed", kind="exit")
    torn.raw[1608 : 1608 + len(garbage)] = garbage
    assert torn.farewell() == {}


def test_a_released_page_lets_its_memory_go() -> None:
    memory = bytearray(PAGE_BYTES)
    Page(memoryview(memory)).release()
    memory.append(0)  # a BufferError while anything still looks at it


def test_why_a_state_could_not_be_saved_stays_beside_the_rest() -> None:
    page = Page(memoryview(bytearray(PAGE_BYTES)))
    page.order, page.durable = 2, 3
    page.rewound(rewound(1))
    for why in ("", "tensor 'x' is sparse", "ü" * 500, "x" * 1000):
        page.unsaved = why
        assert why.startswith(page.unsaved.rstrip("…"))
        assert len(page.unsaved) >= min(len(why), 100)
    page.unsaved = "größer " * 100
    assert page.unsaved.endswith("größer…"), "cut at the end of a word"
    page.unsaved = ""
    assert page.unsaved == ""
    assert (page.order, page.durable, page.rewinds, page.rewind(1)) == (2, 3, 1, rewound(1))
