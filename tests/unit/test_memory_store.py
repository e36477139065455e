import subprocess
import sys

import pytest

from ..contract_store import Compact, StoreContract, Tick
from ..memory_store import MemoryStore


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock)


@pytest.fixture
def tick(clock: Clock) -> Tick:
    def later() -> None:
        clock.now_s += 0.1

    return later


@pytest.fixture
def other(store: MemoryStore) -> MemoryStore:
    return store


@pytest.fixture
def compact(store: MemoryStore) -> Compact:
    return store.compact


class TestMemoryStore(StoreContract):
    pass


def test_leases_end_when_the_clock_says_so_each_at_its_own_time(store: MemoryStore, clock: Clock) -> None:
    short, long = store.grant(3), store.grant(10)
    store.put("/short", b"", short)
    store.put("/long", b"", long)
    clock.now_s += 2.9
    assert set(store.range("/")) == {"/short", "/long"}
    assert store.keepalive(short) == 3.0
    clock.now_s += 2.9
    assert set(store.range("/")) == {"/short", "/long"}
    clock.now_s += 0.1
    assert set(store.range("/")) == {"/long"}
    clock.now_s += 4.2
    assert set(store.range("/")) == set()


def test_whoever_needs_no_etcd_does_not_load_grpc() -> None:
    modules = ", ".join(
        f"mt_resilient.resilience.{name}" for name in ("store.watch_cache", "store.election", "controller")
    )
    program = f"import sys, {modules}; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
