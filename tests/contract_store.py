"""What every Store does, whatever is behind it: subclass `StoreContract` beside the fixtures `store` (empty) and `tick`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mt_resilient.resilience.errors import InternalError
from mt_resilient.resilience.store import CreatedAt, Delete, KeyAbsent, LeaseGone, ModifiedAt, Put, Store

Tick = Callable[[], None]
"""Lets a tenth of a second pass for the store's leases."""


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
        lease = store.grant(1)
        store.put("/a", b"", lease)
        for _ in range(20):
            tick()
            assert 0.0 < store.keepalive(lease) <= 2.0
        entry = store.get("/a")
        assert entry is not None
        assert entry.lease == lease
        for _ in range(50):
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
