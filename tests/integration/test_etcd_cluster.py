"""An etcd cluster of three: the store contract; and calls, watches and mirrors while members are killed, stopped, deposed and come back."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

from mt_resilient.resilience.errors import StoreUnavailable
from mt_resilient.resilience.store.etcd.client import EtcdStore
from mt_resilient.resilience.store.protocol import Change, Store
from mt_resilient.resilience.store.watch_cache import Mirror

from ..contract_store import Compact, StoreContract, Tick, taken, told
from ..etcd_cluster import Cluster, answers, ask, eventually

pytestmark = pytest.mark.xdist_group("etcd cluster")
_Found = TypeVar("_Found")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For tests that leave its members alone."""
    cluster = Cluster(tmp_path_factory.mktemp("etcd"), 3).start()
    yield cluster.ready()
    cluster.stop()


@pytest.fixture
def store(shared: Cluster) -> Iterator[EtcdStore]:
    store = EtcdStore(shared.endpoints, deadline_s=30.0)
    store.delete_prefix("")
    yield store
    store.close()


@pytest.fixture
def other(shared: Cluster) -> Iterator[EtcdStore]:
    """Speaks with another member first."""
    store = EtcdStore([*shared.endpoints[1:], shared.endpoints[0]], deadline_s=30.0)
    yield store
    store.close()


@pytest.fixture
def tick() -> Tick:
    return lambda: time.sleep(0.1)


@pytest.fixture
def compact(shared: Cluster) -> Compact:
    return lambda revision: ask(shared.endpoints[0], "KV", "Compact", revision=revision, physical=True)


class TestThreeMembers(StoreContract):
    pass


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """For tests that hurt it."""
    cluster = Cluster(tmp_path, 3).start()
    yield cluster.ready()
    cluster.stop()


class Scribe:
    """Writes /job/count again and again, through a store of its own, until it is stopped."""

    def __init__(self, endpoints: list[str]) -> None:
        self.store = EtcdStore(endpoints, deadline_s=1.0)
        self.made = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        while not self._done.is_set():
            try:
                self.store.put("/job/count", b"%d" % self.made)
                self.made += 1
            except StoreUnavailable:
                pass
            time.sleep(0.01)

    def goes_on(self) -> None:
        before = self.made
        eventually(lambda: self.made > before + 5)

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        self.store.close()


def kill_one(cluster: Cluster) -> None:
    cluster.signal(0, signal.SIGKILL)


def stop_one(cluster: Cluster) -> None:
    cluster.signal(0, signal.SIGSTOP)


def lose_the_majority_for_a_while(cluster: Cluster) -> None:
    for member in (0, 1):
        cluster.signal(member, signal.SIGKILL)
    time.sleep(2.0)
    cluster.start(0, 1)


def stop_the_majority_for_a_while(cluster: Cluster) -> None:
    for member in (0, 2):
        cluster.signal(member, signal.SIGSTOP)
    time.sleep(2.0)
    for member in (0, 2):
        cluster.signal(member, signal.SIGCONT)


def move_the_leader(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.move_leader()
        time.sleep(0.3)


def kill_them_one_by_one(cluster: Cluster) -> None:
    for member in range(3):
        cluster.signal(member, signal.SIGKILL)
        time.sleep(0.7)
        cluster.start(member)
        eventually(lambda member=member: up(cluster.endpoints[member]))


def up(endpoint: str) -> bool:
    with closing(EtcdStore([endpoint], deadline_s=0.5)) as store:
        return answers(store)


FAULTS = (
    kill_one,
    stop_one,
    lose_the_majority_for_a_while,
    stop_the_majority_for_a_while,
    move_the_leader,
    kill_them_one_by_one,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_watch_and_mirror_miss_nothing_and_calls_go_on(cluster: Cluster, fault: Callable[[Cluster], None]) -> None:
    scribe = Scribe(cluster.endpoints)
    # An agent asks the store for something once a second at least: that is how it finds out about a member that is silent.
    asking = EtcdStore(cluster.endpoints, deadline_s=1.0)
    with closing(asking), closing(Mirror(asking, "/job/")) as mirror:
        lease = answered(lambda: asking.grant(600))
        scribe.goes_on()
        since = len(answered(lambda: dict(mirror.entries()))) and mirror.revision
        watch = asking.watch("/job/", since)
        fault(cluster)
        scribe.goes_on()
        eventually(lambda: renewed(asking, lease))
        scribe.stop()
        found = taken(watch, 1)
        with closing(EtcdStore(cluster.endpoints[1:2])) as witness:
            eventually(lambda: answers(witness))
            last = answered(lambda: witness.listing("/job/"))
            while found[-1].revision < last.entries["/job/count"].mod_revision:
                found += taken(watch, 1)
            whole = history(witness, since, last.entries["/job/count"].mod_revision)
        assert told(found) == told(whole)
        assert [change.revision for change in found] == [change.revision for change in whole]
        eventually(lambda: answered(lambda: dict(mirror.entries())) == last.entries)


def answered(call: Callable[[], _Found]) -> _Found:
    """What a call finds, as soon as one is answered: on a busy machine an answer may take longer than the store waits."""
    ends = time.monotonic() + 60
    while True:
        try:
            return call()
        except StoreUnavailable:
            assert time.monotonic() < ends
            time.sleep(0.05)


def renewed(store: Store, lease: int) -> bool:
    try:
        return store.keepalive(lease) > 0.0
    except StoreUnavailable:
        return False


def history(store: Store, since: int, until: int) -> list[Change]:
    """What etcd itself remembers."""
    with closing(store.watch("/job/", since)) as watch:
        found: list[Change] = []
        while not found or found[-1].revision < until:
            found += taken(watch, 1)
        return found


@pytest.mark.timing
def test_a_watch_hears_of_a_change_within_milliseconds(cluster: Cluster) -> None:
    one, other = (EtcdStore(cluster.endpoints[first:], deadline_s=30.0) for first in (0, 1))
    with closing(one) as reader, closing(other) as writer:
        watch = reader.watch("/job/", reader.listing("/job/").revision)
        took = []
        for _ in range(50):
            writer.put("/job/a", b"")
            began = time.monotonic()
            taken(watch, 1)
            took.append(time.monotonic() - began)
        assert sorted(took)[5] < 0.05  # a busy machine delays most of them


def used(seconds: float) -> float:
    """The share of a core that this process takes meanwhile."""
    before, began = sum(os.times()[:2]), time.monotonic()
    time.sleep(seconds)
    return (sum(os.times()[:2]) - before) / (time.monotonic() - began)


@pytest.mark.timing
def test_a_store_whose_cluster_is_away_takes_no_processor(cluster: Cluster) -> None:
    with closing(EtcdStore(cluster.endpoints, deadline_s=30.0)) as store:
        watches = [store.watch(f"/{number}/", store.listing("").revision) for number in range(5)]
        usual = used(2.0)  # other tests' threads may still run
        for member in range(3):
            cluster.signal(member, signal.SIGKILL)
        time.sleep(0.5)
        more = used(3.0) - usual
        assert more < 0.3, f"{more:.2f} of a core"
        cluster.start()
        eventually(lambda: answers(store))
        for number, watch in enumerate(watches):
            store.put(f"/{number}/a", b"")
            assert told(taken(watch, 1)) == [(f"/{number}/a", b"")]


def test_a_write_that_had_no_answer_is_looked_for(cluster: Cluster) -> None:
    with closing(EtcdStore(cluster.endpoints, deadline_s=1.0)) as store, closing(Mirror(store, "/job/")) as mirror:
        answered(mirror.entries)
        for member in (1, 2):
            cluster.signal(member, signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            store.put("/job/a", b"perhaps")
        with pytest.raises(StoreUnavailable):  # it has to be listed, and cannot
            mirror.entries()
        for member in (1, 2):
            cluster.signal(member, signal.SIGCONT)
        eventually(lambda: answers(store))
        # Not at once: etcd may still write what had no answer.
        eventually(lambda: answered(lambda: dict(mirror.entries())) == answered(lambda: store.range("/job/")))


def test_another_cluster_among_the_endpoints_is_found(shared: Cluster, tmp_path: Path) -> None:
    """By what it does not have, for two etcds with the usual names have the same cluster id; a member that is down is of no cluster."""
    alone = Cluster(tmp_path, 1).start().ready()
    down = "127.0.0.1:1"
    with closing(EtcdStore([*shared.endpoints, down], deadline_s=30.0)) as store:
        store.put("/job/spec", b"here")
        assert store.elsewhere("/job/spec") == []
    for endpoints in ([*shared.endpoints, *alone.endpoints], [down, *shared.endpoints, *alone.endpoints]):
        with closing(EtcdStore(endpoints, deadline_s=30.0)) as store:
            assert store.elsewhere("/job/spec") == alone.endpoints
    with closing(EtcdStore([*alone.endpoints, shared.endpoints[0]], deadline_s=30.0)) as store:
        store.put("/job/spec", b"there")
        assert store.elsewhere("/job/spec") == [shared.endpoints[0]]
    alone.stop()
