"""What every Store does, whatever is behind it: subclass `StoreContract` beside the fixtures `store` (empty), `other` (another client of
it), `tick` and `compact`."""

import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from mt_resilient.resilience.errors import InternalError
from mt_resilient.resilience.store.protocol import (
    MOST_OPERATIONS,
    Change,
    CreatedAt,
    Delete,
    HistoryGone,
    KeyAbsent,
    LeaseGone,
    ModifiedAt,
    Put,
    Store,
    UnchangedSince,
    Watch,
)
from mt_resilient.resilience.store.watch_cache import Mirror

Tick = Callable[[], None]
"""Lets a tenth of a second pass for the store's leases."""
Compact = Callable[[int], None]
"""Makes the store forget what was changed before a revision."""


def taken(watch: Watch, count: int, within_s: float = 60.0) -> list[Change]:
    """The next `count` changes, or more, as a loop that polls gets them."""
    found: list[Change] = []
    ends = time.monotonic() + within_s
    while len(found) < count:
        assert select.select([watch], [], [], max(0.0, ends - time.monotonic()))[0], f"only {found} came"
        found += watch.take()
    return found


def told(changes: list[Change]) -> list[tuple[str, bytes | None]]:
    return [(change.key, change.entry.value if change.entry else None) for change in changes]


@contextmanager
def mirroring(store: Store, prefix: str) -> Iterator[Mirror]:
    with closing(Mirror(store, prefix)) as mirror:
        yield mirror


def until(mirror: Mirror, wanted: dict[str, bytes], within_s: float = 60.0) -> None:
    ends = time.monotonic() + within_s
    while (seen := {key: entry.value for key, entry in mirror.entries().items()}) != wanted:
        assert select.select(mirror.fds(), [], [], max(0.0, ends - time.monotonic()))[0], f"{seen}, not {wanted}"


class StoreContract:
    def test_an_entry_remembers_the_revisions_that_created_and_last_changed_it(self, store: Store) -> None:
        assert store.get("/a") is None
        store.put("/a", b"one")
        created = store.get("/a")
        store.put("/a", b"two")
        changed = store.get("/a")
        assert created is not None
        assert changed is not None
        assert (created.key, created.value, created.lease) == ("/a", b"one", 0)
        assert created.create_revision == created.mod_revision == changed.create_revision
        assert (changed.value, changed.mod_revision) == (b"two", created.mod_revision + 1)

    def test_deleting_and_creating_anew_makes_a_new_entry(self, store: Store) -> None:
        store.put("/a", b"")
        first = store.get("/a")
        assert store.delete("/a")
        assert not store.delete("/a")
        store.put("/a", b"")
        second = store.get("/a")
        assert first is not None
        assert second is not None
        # One revision for the delete that found something, none for the one that did not.
        assert second.create_revision == first.create_revision + 2

    def test_a_range_holds_the_keys_under_its_prefix_in_order(self, store: Store) -> None:
        for key in ("/job/b", "/job/a", "/job/\U0010ffff", "/joc", "/job"):
            store.put(key, key.encode())
        assert list(store.range("/job/")) == ["/job/a", "/job/b", "/job/\U0010ffff"]
        assert store.range("/job/b")["/job/b"] == store.get("/job/b")
        assert len(store.range("")) == 5
        assert list(store.range("/job/", limit=2)) == ["/job/a", "/job/b"]
        assert len(store.range("/job/", limit=9)) == 3
        assert store.range("/nothing") == {}

    def test_deleting_a_prefix_counts_and_spares_the_rest(self, store: Store) -> None:
        for key in ("/job/b", "/job/a", "/joc"):
            store.put(key, b"")
        assert store.delete_prefix("/job/") == 2
        assert store.delete_prefix("/job/") == 0
        assert list(store.range("")) == ["/joc"]

    def test_a_compare_holds_or_does_not(self, store: Store) -> None:
        store.put("/a", b"one")
        store.put("/a", b"two")
        entry = store.get("/a")
        assert entry is not None
        created, modified = entry.create_revision, entry.mod_revision
        for compare, holds in {
            KeyAbsent("/a"): False,
            KeyAbsent("/b"): True,
            CreatedAt("/a", created): True,
            CreatedAt("/a", modified): False,
            CreatedAt("/b", created): False,
            ModifiedAt("/a", modified): True,
            ModifiedAt("/a", created): False,
            ModifiedAt("/b", modified): False,
            ModifiedAt("/b", 0): True,
        }.items():
            assert store.transact([compare], []) is holds, compare

    def test_a_transaction_makes_everything_in_one_revision_or_nothing(self, store: Store) -> None:
        store.put("/old", b"")
        assert not store.transact([KeyAbsent("/new"), KeyAbsent("/old")], [Put("/new", b""), Delete("/old")])
        assert list(store.range("")) == ["/old"]
        assert store.transact([KeyAbsent("/new")], [Put("/new", b"1"), Put("/newer", b"2"), Delete("/old")])
        entries = store.range("")
        assert {key: entry.value for key, entry in entries.items()} == {"/new": b"1", "/newer": b"2"}
        assert entries["/new"].mod_revision == entries["/newer"].mod_revision

    def test_a_transaction_that_names_a_key_twice_is_our_error(self, store: Store) -> None:
        with pytest.raises(InternalError, match="twice"):
            store.transact([], [Put("/a", b""), Delete("/a")])

    def test_a_transaction_of_too_many_operations_is_our_error(self, store: Store) -> None:
        many = [Put(f"/{number}", b"") for number in range(MOST_OPERATIONS + 1)]
        assert store.transact([], many[1:])
        with pytest.raises(InternalError, match="100 are the most"):
            store.transact([], many)

    def test_concurrent_swaps_lose_no_update(self, store: Store) -> None:
        store.put("/count", b"0")

        def add_ten() -> None:
            done = 0
            while done < 10:
                entry = store.get("/count")
                assert entry is not None
                done += store.transact(
                    [ModifiedAt("/count", entry.mod_revision)], [Put("/count", b"%d" % (int(entry.value) + 1))]
                )

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(add_ten) for _ in range(4)]:
                future.result()
        entry = store.get("/count")
        assert entry is not None
        assert entry.value == b"40"

    def test_an_entry_lives_as_long_as_its_lease_is_renewed(self, store: Store, tick: Tick) -> None:
        lease = store.grant(10)
        store.put("/a", b"", lease)
        for _ in range(110):
            tick()
            assert 0.0 < store.keepalive(lease) <= 10.0
        entry = store.get("/a")
        assert entry is not None
        assert entry.lease == lease
        for _ in range(600):
            tick()
            if store.get("/a") is None:
                break
        assert store.get("/a") is None
        assert store.keepalive(lease) == 0.0

    def test_revoking_deletes_what_the_lease_holds_and_may_be_repeated(self, store: Store) -> None:
        lease = store.grant(60)
        store.put("/bound", b"", lease)
        store.put("/freed", b"", lease)
        store.put("/freed", b"")
        store.revoke(lease)
        store.revoke(lease)
        assert list(store.range("")) == ["/freed"]
        assert store.keepalive(lease) == 0.0

    def test_a_put_on_a_lease_that_is_gone_writes_nothing(self, store: Store) -> None:
        lease = store.grant(60)
        store.revoke(lease)
        with pytest.raises(LeaseGone, match="grant a new"):
            store.put("/a", b"", lease)
        with pytest.raises(LeaseGone, match="grant a new"):
            store.transact([KeyAbsent("/a")], [Put("/b", b""), Put("/a", b"", lease)])
        assert not store.transact([CreatedAt("/a", 1)], [Put("/a", b"", lease)])
        assert store.range("") == {}

    def test_a_compare_holds_while_nothing_under_a_prefix_is_written(self, store: Store) -> None:
        assert store.transact([UnchangedSince("/a/", 0)], [Put("/a/x", b"")])
        entry = store.get("/a/x")
        assert entry is not None
        written = entry.mod_revision
        store.put("/b", b"")
        assert store.transact([UnchangedSince("/a/", written)], [])
        assert not store.transact([UnchangedSince("/a/", written - 1)], [Put("/a/y", b"")])
        store.put("/a/y", b"")
        assert not store.transact([UnchangedSince("/a/", written)], [Delete("/a/x")])
        assert set(store.range("/a/")) == {"/a/x", "/a/y"}

    # -- watching -----------------------------------------------------------------------------------------------------------------

    def test_a_listing_says_of_which_revision_it_is(self, store: Store) -> None:
        store.put("/job/a", b"")
        store.put("/other", b"")
        found, last = store.listing("/job/"), store.get("/other")
        assert last is not None
        assert (list(found.entries), found.revision) == (["/job/a"], last.mod_revision)

    def test_a_watch_has_each_change_under_its_prefix_once_and_in_order(self, store: Store) -> None:
        store.put("/job/before", b"")
        with closing(store.watch("/job/", store.listing("/job/").revision)) as watch:
            store.put("/job/a", b"one")
            store.put("/joc", b"")
            store.put("/job/a", b"two")
            store.delete("/job/a")
            changes = taken(watch, 3)
            assert told(changes) == [("/job/a", b"one"), ("/job/a", b"two"), ("/job/a", None)]
            assert [c.revision for c in changes] == sorted(c.revision for c in changes)
            assert changes[0].entry is not None
            assert changes[0].entry.create_revision == changes[0].revision
            assert not select.select([watch], [], [], 0.05)[0]
            assert watch.take() == []

    def test_a_watch_that_is_readable_has_something(self, store: Store, other: Store) -> None:
        many, came = 2000, 0
        with closing(store.watch("/job/", store.listing("/job/").revision)) as watch, ThreadPoolExecutor(4) as pool:
            writing = [pool.submit(other.put, "/job/a", b"") for _ in range(many)]
            while came < many:
                assert select.select([watch], [], [], 60.0)[0]
                changes = watch.take()
                assert changes
                came += len(changes)
            assert all(each.result() is None for each in writing)

    def test_a_watch_begins_where_it_is_told_to(self, store: Store) -> None:
        since = store.listing("/job/").revision
        for value in (b"1", b"2", b"3"):
            store.put("/job/a", value)
        with closing(store.watch("/job/", since)) as watch:
            assert told(taken(watch, 3)) == [("/job/a", b"1"), ("/job/a", b"2"), ("/job/a", b"3")]
        with closing(store.watch("/job/", since + 2)) as watch:
            assert told(taken(watch, 1)) == [("/job/a", b"3")]

    def test_the_changes_of_one_revision_come_together(self, store: Store, other: Store) -> None:
        with closing(store.watch("/job/", store.listing("/job/").revision)) as watch:
            many = [Put(f"/job/{number}", b"x" * 10_000) for number in range(100)]
            for _ in range(5):
                other.transact([], many)
            found: list[Change] = []
            while len(found) < 500:
                assert select.select([watch], [], [], 60.0)[0]
                found += watch.take()
                assert len(found) % 100 == 0

    def test_a_watch_has_what_ends_with_a_lease(self, store: Store, tick: Tick) -> None:
        revoked, ended = store.grant(60), store.grant(10)
        store.put("/job/revoked", b"", revoked)
        store.put("/job/ended", b"", ended)
        with closing(store.watch("/job/", store.listing("/job/").revision)) as watch:
            store.revoke(revoked)
            assert told(taken(watch, 1)) == [("/job/revoked", None)]
            found: list[Change] = []
            for _ in range(600):
                tick()
                found += watch.take()
                if found:
                    break
            assert told(found) == [("/job/ended", None)]

    def test_a_watch_of_what_is_forgotten_says_so_and_nothing_else(self, store: Store, compact: Compact) -> None:
        since = store.listing("/job/").revision
        for value in (b"1", b"2", b"3", b"4"):
            store.put("/job/a", value)
        compact(since + 3)
        with closing(store.watch("/job/", since)) as watch:
            for _ in range(2):
                assert select.select([watch], [], [], 60.0)[0]
                with pytest.raises(HistoryGone, match="anew"):
                    watch.take()

    def test_a_watch_from_a_revision_that_is_yet_to_come_says_that_the_store_has_begun_anew(self, store: Store) -> None:
        with closing(store.watch("/job/", store.listing("").revision + 1000)) as watch:
            assert select.select([watch], [], [], 60.0)[0]
            with pytest.raises(HistoryGone, match="anew"):
                watch.take()

    # -- the mirror ---------------------------------------------------------------------------------------------------------------

    def test_a_mirror_shows_what_is_there_and_what_becomes_of_it(self, store: Store, other: Store) -> None:
        other.put("/job/a", b"1")
        with mirroring(store, "/job/") as mirror:
            assert mirror.fds() == ()
            until(mirror, {"/job/a": b"1"})
            other.put("/job/b", b"2")
            other.put("/joc", b"")
            until(mirror, {"/job/a": b"1", "/job/b": b"2"})
            other.delete_prefix("/job/")
            other.put("/job/c", b"3")
            until(mirror, {"/job/c": b"3"})
            assert dict(mirror.entries()) == store.range("/job/")
            assert mirror.revision == store.range("/job/")["/job/c"].mod_revision

    def test_a_mirror_shows_at_once_what_was_written_through_its_own_store(self, store: Store) -> None:
        with mirroring(store, "/job/") as mirror:
            mirror.entries()
            for number in range(50):
                store.put("/job/a", b"%d" % number)
                assert mirror.entries()["/job/a"].value == b"%d" % number
                store.put("/elsewhere", b"")
            assert store.transact([], [Put("/job/b", b""), Delete("/job/a")])
            assert list(mirror.entries()) == ["/job/b"]
            lease = store.grant(60)
            store.put("/job/bound", b"", lease)
            store.revoke(lease)
            assert list(mirror.entries()) == ["/job/b"]

    def test_a_mirror_lists_anew_what_it_cannot_follow(self, store: Store, other: Store, compact: Compact) -> None:
        with mirroring(store, "/job/") as mirror:
            mirror.entries()
            mirror.close()  # as one whose stream was broken for long
            for number in range(10):
                other.put("/job/a", b"%d" % number)
            compact(store.listing("").revision)
            assert mirror.entries()["/job/a"].value == b"9"
            other.put("/job/a", b"10")
            until(mirror, {"/job/a": b"10"})
