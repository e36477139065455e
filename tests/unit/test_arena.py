"""Slots: their states, who may have them when, what survives whom, and what a rank overwrites."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena import slot as slot_module
from mt_resilient.checkpoint.arena.arena import HUNG_S, Header, RankArena, Slot, State
from mt_resilient.checkpoint.arena.slot_header import Stamp, complete, due, overwrite_order
from mt_resilient.resilience.errors import MachineError
from mt_resilient.resilience.ipc import shared_memory
from mt_resilient.training.device import address


@pytest.fixture
def slot_paths():
    fds = arena.create(ranks=1, slots=3)
    yield arena.paths(fds, os.getpid())[0]
    for fd in fds[0]:
        os.close(fd)


def wanted(step: int, **more) -> Header:
    return Header(**{"generation": 1, "step": step, "rank": 0, "world": 1, "payload_bytes": 8188} | more)


def stage(
    ranks: RankArena, step: int, *, content: bytes = b"x", durable: bool = False, seal: bool = True, **more
) -> Slot:
    table, now_s = more.pop("table", b"{}"), more.pop("now_s", 0.0)
    slot, view = ranks.claim(wanted(step, durable=durable, **more), table, now_s=now_s)
    view.memory[: len(content)] = content
    slot.staged()
    if seal:
        slot.seal()
    return slot


def steps(ranks: RankArena) -> list[int]:
    return sorted(slot.header().step for slot in ranks.slots if slot.header().whole)


# Slots


def test_a_new_slot_is_free_and_empty(slot_paths):
    slot = Slot(slot_paths[0])
    assert slot.header() == Header()
    slot.free()
    with slot.reading() as view:
        assert view is None


def test_another_process_reads_what_was_staged(slot_paths):
    stage(RankArena(slot_paths), 7, content=b"hello", table=b'{"a":1}', seal=False)
    with Slot(slot_paths[0]).reading() as view:
        assert (view.header.step, view.header.state, view.table) == (7, State.STAGED, b'{"a":1}')
        assert bytes(view.memory[:5]) == b"hello"
        assert view.header.payload_bytes == 8188


def test_reading_after_a_growth_that_failed_midway_takes_no_memory(slot_paths):
    stage(RankArena(slot_paths), 7, content=b"hello")
    with open(slot_paths[0], "r+b") as file:
        os.ftruncate(file.fileno(), 64 << 20)
        before = shared_memory.allocated(file.fileno())
        assert before < 4 << 20  # the kernel may take huge pages
        with Slot(slot_paths[0]).reading() as view:
            assert bytes(view.memory[:5]) == b"hello"
        assert shared_memory.allocated(file.fileno()) == before


def test_a_writer_and_a_reader_lock_each_other_out(slot_paths):
    writer, reader = Slot(slot_paths[0]), Slot(slot_paths[0])
    assert writer.begin(wanted(1), b"{}") is not None
    with reader.reading() as view:
        assert view is None, "its writer is at it"
    writer.staged()
    with reader.reading() as view:
        assert writer.begin(wanted(1), b"{}") is None, "a reader is at it"
        writer.seal()
        assert reader.header().state is State.SEALED, "sealing needs no lock"
    assert writer.begin(wanted(1), b"{}") is not None


def test_reading_the_header_does_not_move_memory_that_another_thread_reserves(slot_paths, monkeypatch):
    slot, large, looking = Slot(slot_paths[0]), wanted(1, payload_bytes=1 << 20), threading.Event()
    Slot(slot_paths[0]).take(1 << 20)  # it has a header's page

    def mapped(fd, size, **how):
        there = shared_memory.mapped(fd, size, **how)
        if threading.current_thread() is look:
            looking.set()
            time.sleep(0.2)
        return there

    monkeypatch.setattr(slot_module, "mapped", mapped)
    look = threading.Thread(target=slot.header)
    look.start()
    looking.wait()
    _, promised = slot.reserve(large, 2)
    look.join()
    view = slot.begin(large, b"{}")
    assert address(view.memory) == address(promised)


def test_a_slot_whose_writer_was_killed_is_torn_and_can_be_reused(slot_paths):
    stage(RankArena(slot_paths[:1]), 1)
    if (child := os.fork()) == 0:
        Slot(slot_paths[0]).begin(Header(step=2, payload_bytes=4096), b"{}")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    slot = Slot(slot_paths[0])
    assert slot.header().state is State.STAGING
    with slot.reading() as view:
        assert view is None
    ranks = RankArena(slot_paths[:1])
    assert ranks.holding(2) is None
    stage(ranks, 3)
    assert steps(ranks) == [3]


def test_memory_keeps_its_address_until_it_has_to_grow(slot_paths):
    ranks = RankArena(slot_paths[:1])
    slot = ranks.slots[0]

    def payload(table: bytes, payload_bytes: int) -> memoryview:
        view = slot.begin(Header(step=1, pieces=3, payload_bytes=payload_bytes), table)
        slot.staged()
        return view.memory

    first = payload(b"x" * 5000, 8188)
    assert payload(b"x" * 6000, 8188) is first
    assert slot.header().image_offset % 4096 == 0
    grown = payload(b"x" * 20_000, (1 << 20) - 4)
    grown[-1] = 5
    assert len(grown) == 1 << 20
    assert len(bytes(first)) == 2 * 4096, "the old mapping lives as long as somebody views it"
    with Slot(slot_paths[0]).reading() as view:
        assert view.memory[-1] == 5
        assert view.table == b"x" * 20_000


def test_a_lack_of_memory_is_reported_and_the_old_snapshot_stays(slot_paths):
    ranks = RankArena(slot_paths[:1])
    stage(ranks, 1, content=b"old", seal=False)
    with pytest.raises(MachineError, match="no memory for a snapshot"):
        ranks.slots[0].begin(Header(step=2, payload_bytes=1 << 50), b"{}")
    with Slot(slot_paths[0]).reading() as view:
        assert bytes(view.memory[:3]) == b"old", "and the lock was released"


def test_memory_that_cannot_be_asked_for_is_reported_and_the_old_snapshot_stays(slot_paths, tmp_path):
    stage(RankArena(slot_paths[:1]), 1, content=b"old", seal=False)
    with pytest.raises(MachineError, match="cannot grow: No such file or directory"):
        Slot(slot_paths[0], turn=str(tmp_path / "none")).begin(Header(step=2, payload_bytes=1 << 20), b"{}")
    with Slot(slot_paths[0]).reading() as view:
        assert bytes(view.memory[:3]) == b"old", "and the lock was released"


def test_opening_a_slot_of_an_ended_agent_is_an_error():
    with pytest.raises(MachineError, match="has ended"):
        Slot("/proc/self/fd/999999")


def test_nobody_can_shrink_a_slot(slot_paths):
    stage(RankArena(slot_paths), 1)
    with pytest.raises(PermissionError):
        os.truncate(slot_paths[0], 0)


def test_close_releases_the_lock(slot_paths):
    slot = Slot(slot_paths[0])
    view = slot.begin(Header(step=1, payload_bytes=4096), b"{}")
    slot.close()
    assert view is not None, "a view keeps the mapping open"
    assert Slot(slot_paths[0]).begin(Header(step=2, payload_bytes=4096), b"{}") is not None


# A rank's slots


def test_the_newest_sealed_snapshot_is_never_overwritten(slot_paths):
    ranks = RankArena(slot_paths)
    for step in range(1, 20):
        stage(ranks, step)
        assert steps(ranks) == list(range(max(1, step - 2), step + 1))
    stage(ranks, 20, seal=False)
    stage(ranks, 21, seal=False)
    assert steps(ranks) == [19, 20, 21], "nor are later ones, which may be sealed yet"
    assert ranks.claim(wanted(22), b"{}") is None
    assert ranks.seal(21)
    stage(ranks, 22)
    assert steps(ranks) == [20, 21, 22]


def test_no_slot_is_claimed_while_readers_lock_all_of_them(slot_paths):
    ranks, others = RankArena(slot_paths[:2]), RankArena(slot_paths[:2])
    stage(ranks, 1)
    stage(ranks, 2)
    with others.slots[0].reading():
        assert ranks.claim(wanted(3), b"{}") is None
    stage(ranks, 3)
    assert steps(ranks) == [2, 3]


def test_the_newest_snapshot_that_must_go_to_disk_is_not_overwritten(slot_paths):
    ranks = RankArena(slot_paths)
    stage(ranks, 1, durable=True)
    stage(ranks, 2)
    stage(ranks, 3)
    stage(ranks, 4)
    assert steps(ranks) == [1, 3, 4]
    with ranks.slots[0].reading():
        ranks.slots[0].mark_drained()
    stage(ranks, 5)
    assert steps(ranks) == [3, 4, 5]
    assert not ranks.slots[0].header().drained, "that was the snapshot before"


def test_a_snapshot_that_another_rank_overwrote_while_a_newer_one_reached_the_disk_blocks_no_slot(slot_paths):
    """The other rank's claim of step 1's slot came before step 2 was marked as written, and this rank's claim comes after. Step 1 is
    incomplete then, and is never written."""
    ranks, drain = RankArena(slot_paths[:2]), RankArena(slot_paths[:2])
    stage(ranks, 1, durable=True)
    stage(ranks, 2, durable=True)
    with drain.slots[1].reading():
        drain.slots[1].mark_drained()
    stage(ranks, 3, durable=True)
    assert steps(ranks) == [2, 3]


def test_snapshots_in_memory_continue_while_storage_hangs(slot_paths):
    """It has the snapshot of step 1 in hand, and that of step 2 waits for it: one slot is left, and the newest stays."""
    ranks, drain = RankArena(slot_paths), RankArena(slot_paths)
    stage(ranks, 1, durable=True)
    with drain.slots[0].reading():
        stage(ranks, 2, durable=True)
        stage(ranks, 3)
        for now_s in (100.0, 101.0, 100.0 + HUNG_S):
            assert ranks.claim(wanted(4), b"{}", now_s=now_s) is None, "storage may just be slow"
        stage(ranks, 5, now_s=101.0 + HUNG_S)
        for step in range(6, 9):
            stage(ranks, step)
            assert steps(ranks) == [1, step - 1, step]


def test_going_back_frees_later_steps(slot_paths):
    ranks = RankArena(slot_paths)
    for step in (1, 2, 3):
        stage(ranks, step)
    ranks.drop_after(1)
    assert steps(ranks) == [1]
    assert not ranks.seal(2)
    stage(ranks, 2, seal=False, rewinds=1)
    assert ranks.seal(2)
    holding = ranks.holding(2)
    assert holding.header().stamp == Stamp(1, 1, 2)


def test_of_two_lineages_of_a_step_the_newest_is_held_unless_one_is_named(slot_paths):
    ranks = RankArena(slot_paths)
    stage(ranks, 2)
    stage(ranks, 2, rewinds=1)
    found = [ranks.holding(2, course) for course in ((), (1, 0), (1, 1), (2, 0))]
    assert [slot and slot.header().stamp for slot in found] == [Stamp(1, 1, 2), Stamp(1, 0, 2), Stamp(1, 1, 2), None]


# Conclusions from headers

headers = st.builds(
    Header,
    state=st.sampled_from(State),
    generation=st.integers(0, 3),
    rewinds=st.integers(0, 2),
    step=st.integers(0, 5),
    rank=st.integers(0, 8),
    world=st.integers(1, 8),
    durable=st.booleans(),
    drained=st.booleans(),
    table_bytes=st.integers(0, 2**40),
    image_offset=st.integers(0, 2**40),
    payload_bytes=st.integers(1, 2**40),
)


@settings(deadline=None)
@given(headers)
def test_a_header_is_unpacked_as_it_was_packed(header):
    assert Header.unpack(header.pack().ljust(4096, b"\0")) == header


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_any_other_page_is_a_free_slot(page):
    assume(not page.startswith(b"MTSLOT04"))
    assert Header.unpack(page.ljust(4096, b"\0")) == Header()


@settings(deadline=None)
@given(
    st.lists(st.lists(headers, max_size=4), min_size=1, max_size=4), st.sets(st.builds(Stamp, *[st.integers(0, 3)] * 3))
)
def test_what_is_due_is_restorable_wanted_and_missing(by_rank, already):
    stamp = due(by_rank, len(by_rank), already)
    if stamp is not None:
        assert stamp not in already
        assert stamp in complete(by_rank, len(by_rank))
        holders = [header for row in by_rank for header in row if header.whole and header.stamp == stamp]
        assert any(header.durable for header in holders)
        assert not all(header.drained for header in holders)


@settings(deadline=None)
@given(st.lists(headers, max_size=5), st.booleans())
def test_slots_that_may_still_be_needed_are_never_overwritten(slots, hung):
    order = overwrite_order(slots, hung=hung)
    sealed = max((header.stamp for header in slots if header.state is State.SEALED), default=None)
    newest = max((header.stamp for header in slots if header.state in (State.SEALED, State.LIVE)), default=None)
    durable = [header for header in slots if header.whole and header.durable]
    wanted = {h.stamp for h in durable if not any(o.drained and o.stamp >= h.stamp for o in durable)}
    for index, header in enumerate(slots):
        later = newest is None or header.stamp >= newest or header.stamp == sealed
        waiting = not hung and header.stamp == max(wanted, default=None)
        assert (index not in order) == (header.held and (later or waiting))
    held = [slots[index].held for index in order]
    assert held == sorted(held), "free and torn ones first"


SEALED = Header(state=State.SEALED, generation=1, step=10, world=2)
STAGED = replace(SEALED, state=State.STAGED)
LIVE = replace(SEALED, state=State.LIVE)
TORN = replace(SEALED, state=State.STAGING)
FREE = Header()


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ([[SEALED], [SEALED]], {10}),
        ([[SEALED], [STAGED]], {10}),
        ([[STAGED], [STAGED]], set()),
        ([[SEALED], [TORN]], set()),
        ([[SEALED], [LIVE]], set()),
        ([[LIVE], [LIVE]], set()),
        ([[SEALED], [FREE]], set()),
        ([[SEALED], []], set()),
        ([[SEALED], [replace(SEALED, generation=2)]], set()),
        ([[SEALED], [replace(SEALED, rewinds=1)]], set()),
        ([[SEALED, replace(SEALED, step=20)], [replace(STAGED, step=20), STAGED]], {10, 20}),
    ],
)
def test_a_step_is_restorable_if_all_ranks_have_it_and_one_has_sealed_it(by_rank, expected):
    assert {stamp.step for stamp in complete(by_rank, 2)} == expected


def test_only_the_slots_of_the_worker_group_s_ranks_count():
    assert {stamp.step for stamp in complete([[SEALED], [FREE]], 1)} == {10}
    assert complete([[SEALED]], 2) == set()
    assert complete([[SEALED]], 0) == set()
