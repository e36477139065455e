"""The checks before a node joins, on real disks, processes and sockets."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mt_resilient.agent.etcd.binary import find_server
from mt_resilient.agent.etcd.server import EmbeddedEtcd
from mt_resilient.agent.preflight import probes
from mt_resilient.agent.preflight.link_test import Listener, Meeting, Present, Roster, measure
from mt_resilient.agent.preflight.rules import Link, PreflightPolicy, neighbours
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.resilience.model.types import NodeId
from mt_resilient.resilience.store.codec import dumps
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.protocol import Entry
from mt_resilient.resilience.store.seat import Seat

from ..harness import MINIMAL, Job, cli, environment
from ..memory_store import MemoryStore

QUICK = PreflightPolicy(enabled=True, link_s=0.05, wait_s=60.0)


# -- storage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "/dev/shm"])
def test_storage_is_measured_and_nothing_is_left(folder: str, tmp_path: Path) -> None:
    place = Path(folder, tmp_path.name) if folder else tmp_path / "new"
    read = probes.storage(Files(place), 2)
    assert read.error == ""
    assert read.free_bytes > 0
    assert read.mb_per_s > 0
    assert [*place.iterdir()] == []
    place.rmdir()


def test_storage_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert probes.storage(Files(tmp_path / "file"), 2).error == "File exists"
    assert probes.storage(Files(tmp_path / "file" / "below"), 2).error == "Not a directory"


# -- devices ---------------------------------------------------------------------------------------------------------------


def test_the_devices_are_checked_by_a_process_of_its_own() -> None:
    found = probes.devices(sys.executable, 0.1, environment())
    assert [(each.error, each.wrong) for each in found] == [("", 0)] * len(found)
    assert all(each.products >= 2 for each in found)


def test_a_python_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    (found,) = probes.devices(sys.executable, 0.1, environment(PYTHONPATH=str(tmp_path)))
    assert found.error == "ImportError: no torch here"


# -- links -----------------------------------------------------------------------------------------------------------------


def meet(
    store: MemoryStore, names: Sequence[str], expected: int, policy: PreflightPolicy
) -> dict[str, tuple[Link, ...]]:
    found: dict[str, tuple[Link, ...]] = {}

    def one(name: str) -> None:
        meeting = Meeting(Seat(store, Keys("job"), NodeId(name)), "127.0.0.1", policy)
        found[name] = meeting.links(expected, f"session-{name}")

    threads = [threading.Thread(target=one, args=(name,), name=name) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_agents_that_were_killed_while_they_measured_keep_nobody_from_measuring() -> None:
    store, keys = MemoryStore(time.monotonic), Keys("job")
    killed = tuple(Present(node=name, address="127.0.0.1", port=9) for name in ("n0", "n1", "n2"))
    store.put(keys.roster, dumps(Roster(session="old", nodes=killed)))
    for each in killed:
        store.put(keys.met(NodeId(each.node)), dumps(each))
    found = meet(store, ["n0", "n1", "n2"], 3, QUICK)
    assert [len(links) for links in found.values()] == [2, 2, 2]
    assert not any(link.error for links in found.values() for link in links)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_all_nodes_see_the_same_links_of_both_pairings(count: int) -> None:
    store = MemoryStore(time.monotonic)
    found = meet(store, [f"n{i}" for i in range(count)], count, QUICK)
    links = found["n0"]
    assert len(links) == (1 if count == 2 else 2 * (count // 2))
    assert all(
        {(each.one, each.other) for each in theirs} == {(each.one, each.other) for each in links}
        for theirs in found.values()
    )
    for each in links:
        assert each.error == ""
        assert each.mb_per_s > 0
        assert abs(each.ahead_s) <= each.within_s + 0.001  # one clock
    assert not [
        key for key in store.range(Keys("job").root) if "/links/" not in key
    ]  # who comes next meets nobody of these


def test_who_is_not_awaited_measures_with_those_that_are_there() -> None:
    found = meet(MemoryStore(time.monotonic), ["a", "b", "c"], 4, replace(QUICK, wait_s=5.0))
    assert all(len(links) == 2 for links in found.values())


def test_who_is_alone_knows_nothing_against_its_links() -> None:
    assert meet(MemoryStore(time.monotonic), ["a"], 2, replace(QUICK, wait_s=0.2)) == {"a": ()}


def test_who_reads_late_finds_the_roster_still() -> None:
    class Late(MemoryStore):
        def get(self, key: str) -> Entry | None:
            time.sleep(0.5 if threading.current_thread().name == "b" else 0.0)
            return super().get(key)

    assert all(len(links) == 1 for links in meet(Late(time.monotonic), ["a", "b"], 2, QUICK).values())


def test_who_is_told_to_leave_while_it_measures_does(tmp_path: Path) -> None:
    """As the first process of a container it would hear nothing, but for a handler."""
    server = EmbeddedEtcd(find_server(), tmp_path / "etcd", tmp_path / "etcd.log")
    try:
        several = ("--nodes", "2", "--etcd", server.start(), "--job", "j", "--snapshots", str(tmp_path / "shared"))
        checks = ("--preflight", "--set", "preflight.device_s=0", "--set", "preflight.wait_s=600")
        job = Job(tmp_path, [str(MINIMAL)], *several, *checks)
        job.until_said("checked storage")
        time.sleep(1.0)
        job.agent.terminate()
        assert job.agent.wait(300) == 143
        assert "SIGTERM before this node has joined" in job.said()
    finally:
        server.stop()


def test_a_second_meeting_after_the_first() -> None:
    store = MemoryStore(time.monotonic)
    for _ in range(2):
        assert all(len(links) == 1 for links in meet(store, ["a", "b"], 2, QUICK).values())


def test_a_port_where_nobody_listens_and_one_that_hangs_up() -> None:
    gone = Listener("127.0.0.1", 0.05)
    gone.close()
    assert measure("a", Present(node="b", address="127.0.0.1", port=gone.port), 0.05).error == "Connection refused"
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        link = measure("a", Present(node="b", address="127.0.0.1", port=server.getsockname()[1]), 0.05)
    assert link.error


def test_a_clock_that_is_wrong() -> None:
    """A peer whose clock is an hour ahead, as far as it says."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as peer:
                while peer.recv(1):
                    peer.sendall(struct.pack("!d", time.time() + 3600))
            with server.accept()[0] as peer:
                peer.recv(1)
                peer.sendall(b"\0" * 1000000)
            with server.accept()[0] as peer:
                while peer.recv(1 << 20):
                    pass
                peer.sendall(struct.pack("!d", 100.0))

        threading.Thread(target=answer, daemon=True).start()
        wrong = measure("a", Present(node="b", address="127.0.0.1", port=server.getsockname()[1]), 0.05)
    assert wrong.error == ""
    assert wrong.ahead_s == pytest.approx(3600, abs=0.5)
    fine = Link(one="a", other="c", mb_per_s=100.0)
    assert neighbours("b", [wrong, fine], QUICK)[-1] == "its clock is 3600.0 s ahead of the others'"


# -- the whole -------------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_has_checked(tmp_path: Path) -> None:
    quick = ["--run-dir", str(tmp_path / "runs"), "--set", "preflight.device_s=0.1", "--set", "preflight.disk_mib=1"]
    done = cli("preflight", *quick)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * len(done.stdout.splitlines())
    assert "memory: " in done.stdout
    assert f"storage {tmp_path / 'runs'}: " in done.stdout
    assert "products, 0 wrong" in done.stdout
    done = cli("preflight", *quick, "--set", "preflight.disk_free_mib=999999999")
    assert done.returncode == 8
    assert "FAILED  storage " in done.stdout
    assert done.stderr.startswith("mt-resilient: this node is not fit to train (1 of the checks above have failed)")


def test_a_job_of_one_node_does_not_start_on_one_that_is_not_fit(tmp_path: Path) -> None:
    unfit = ["--set", "preflight.memory_free_mib=999999999", "--set", "preflight.device_s=0"]
    job = Job(tmp_path, [str(MINIMAL), "--steps", "1"], "--preflight", *unfit)
    assert job.agent.wait(180) == 8
    assert "is not fit: only " in job.said()
    assert "nothing was started" in job.said()


def test_a_job_on_a_node_that_is_fit(tmp_path: Path) -> None:
    job = Job(tmp_path, [str(MINIMAL), "--steps", "5"], "--preflight", "--set", "preflight.device_s=0.1")
    assert job.agent.wait(300) == 0, job.said()
    assert "checked devices: cpu " in job.said()
