"""A real etcd behind TLS, client certificates and users: the store contract, and one clear sentence for each way of not being let in."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from mt_resilient.resilience.errors import StoreUnavailable, UsageError
from mt_resilient.resilience.store.etcd.access import PASSWORD, Access, Papers
from mt_resilient.resilience.store.etcd.client import EtcdStore

from ..contract_store import Compact, StoreContract, Tick, taken, told
from ..etcd_cluster import Authority, Cluster, answers, ask, eventually
from ..harness import MINIMAL, Job, cli

pytestmark = pytest.mark.xdist_group("etcd security")

SECRET = "correct horse"
ROOT = "battery staple"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("papers")).found()
    authority.sign("server")
    authority.sign("client")
    authority.sign("elsewhere", names="DNS:etcd.example")
    authority.sign("expired", days=-1)
    return authority


def shown(authority: Authority, name: str = "client", **more: str) -> Access:
    return Access(
        ca=str(authority.ca),
        cert=str(authority.folder / f"{name}.pem"),
        key=str(authority.folder / f"{name}.key"),
        **more,
    )


@pytest.fixture(scope="module")
def guarded(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """TLS, a certificate wanted of clients, and users."""
    wants = ("--client-cert-auth", f"--trusted-ca-file={authority.ca}", "--auth-token-ttl=3")
    cluster = Cluster(tmp_path_factory.mktemp("etcd"), 1, *wants, authority=authority).start()
    cluster.ready(shown(authority))
    cluster.require_users(shown(authority), root=ROOT, mt=SECRET)
    yield cluster
    cluster.stop()


@pytest.fixture
def store(guarded: Cluster, authority: Authority) -> Iterator[EtcdStore]:
    store = EtcdStore(guarded.endpoints, access=shown(authority, user="mt", password=SECRET), deadline_s=30.0)
    store.delete_prefix("")
    yield store
    store.close()


@pytest.fixture
def other(guarded: Cluster, authority: Authority) -> Iterator[EtcdStore]:
    store = EtcdStore(guarded.endpoints, access=shown(authority, user="mt", password=SECRET), deadline_s=30.0)
    yield store
    store.close()


@pytest.fixture
def tick() -> Tick:
    return lambda: time.sleep(0.1)


@pytest.fixture
def compact(guarded: Cluster, authority: Authority) -> Compact:
    access = shown(authority, user="root", password=ROOT)
    return lambda revision: ask(guarded.endpoints[0], "KV", "Compact", access, revision=revision, physical=True)


class TestBehindTlsAndUsers(StoreContract):
    pass


def refused(endpoint: str, access: Access, sentence: str) -> str:
    """What is said once it names the cause by `sentence`: on a busy machine a call may be over before the server has answered."""
    said = ""

    def named() -> bool:
        nonlocal said
        store = EtcdStore([endpoint], deadline_s=2.0, access=access)
        with closing(store), pytest.raises(StoreUnavailable) as caught:
            store.get("/mt/")
        said = str(caught.value)
        print(said)
        return sentence in said

    eventually(named)
    return said


def test_a_token_that_has_expired_is_renewed_and_the_call_made(store: EtcdStore) -> None:
    watch = store.watch("/job/", store.listing("/job/").revision)
    for value in (b"1", b"2"):
        store.put("/job/a", value)
        assert told(taken(watch, 1)) == [("/job/a", value)]
        time.sleep(4.0)
    store.transact([], [])


def test_a_password_that_is_changed_is_taken_up_from_its_file(authority: Authority, tmp_path: Path) -> None:
    cluster, file = Cluster(tmp_path, 1).start(), tmp_path / "password"
    file.write_text(ROOT)
    file.chmod(0o600)
    try:
        cluster.ready()
        cluster.require_users(root=ROOT)
        access = Papers(user="root", password_file=str(file)).access({})
        with closing(EtcdStore(cluster.endpoints, access=access, deadline_s=30.0)) as store:
            lease = store.grant(600)
            ask(cluster.endpoints[0], "Auth", "UserChangePassword", access, name="root", password="another")
            with suppress(StoreUnavailable):  # which finds out
                store.put("/job/a", b"1")
            with pytest.raises(StoreUnavailable, match="correct control"):
                store.put("/job/a", b"1")
            file.write_text("another")
            store.put("/job/a", b"1")
            assert store.keepalive(lease) > 0
    finally:
        cluster.stop()


def test_tokens_die_with_the_server_and_are_had_anew(authority: Authority, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1).start()
    try:
        cluster.ready()
        cluster.require_users(root=ROOT)
        refused(cluster.endpoints[0], Access(), "the server demands a user: name one with control.etcd_user")
        access = Access(user="root", password=ROOT)
        with closing(EtcdStore(cluster.endpoints, access=access, deadline_s=30.0)) as store:
            store.put("/job/a", b"1")
            lease = store.grant(600)
            assert store.keepalive(lease) > 0
            watch = store.watch("/job/", store.listing("/job/").revision)
            cluster.signal(0, signal.SIGKILL)
            cluster.start(0)
            eventually(lambda: answers(store))
            store.put("/job/a", b"2")
            assert told(taken(watch, 1)) == [("/job/a", b"2")]
            assert store.keepalive(lease) > 0
    finally:
        cluster.stop()


def test_authentication_that_is_switched_off_and_on_again_stops_nothing(tmp_path: Path) -> None:
    cluster, root = Cluster(tmp_path, 1).start(), Access(user="root", password=ROOT)
    try:
        cluster.ready()
        cluster.require_users(root=ROOT)
        with closing(EtcdStore(cluster.endpoints, access=root, deadline_s=30.0)) as store:
            lease = store.grant(600)
            assert store.keepalive(lease) > 0
            ask(cluster.endpoints[0], "Auth", "AuthDisable", root)
            store.put("/job/a", b"1")
            assert store.keepalive(lease) > 0
            ask(cluster.endpoints[0], "Auth", "AuthEnable", Access())
            store.put("/job/a", b"2")
            assert store.keepalive(lease) > 0
    finally:
        cluster.stop()


def test_a_wrong_password_is_named(guarded: Cluster, authority: Authority) -> None:
    access = shown(authority, user="mt", password="wrong")
    said = refused(guarded.endpoints[0], access, "correct control.etcd_user or its password")
    assert "wrong" not in said.replace("wrong CA", "")


def test_a_certificate_without_a_user_is_known_by_its_name_which_may_do_nothing(
    guarded: Cluster, authority: Authority
) -> None:
    grant = "grant the user (control.etcd_user, else the name in the certificate) a role"
    refused(guarded.endpoints[0], shown(authority), grant)


def test_a_client_certificate_that_is_missing_is_asked_for(guarded: Cluster, authority: Authority) -> None:
    access = Access(ca=str(authority.ca), user="mt", password=SECRET)
    said = refused(guarded.endpoints[0], access, "the server demands a client certificate, and none is given")
    assert "control.etcd_cert" in said


def test_a_client_certificate_that_is_out_of_date_is_named(guarded: Cluster, authority: Authority) -> None:
    refused(guarded.endpoints[0], shown(authority, "expired"), "the server refuses our certificate")


def test_a_server_of_another_authority_is_named(guarded: Cluster, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger").found()
    access, unsigned = Access(ca=str(stranger.ca)), f"the server's certificate is not signed by {stranger.ca}"
    said = refused(guarded.endpoints[0], access, unsigned)
    assert "control.etcd_ca" in said


def test_plain_text_to_a_server_that_speaks_tls_is_named(guarded: Cluster) -> None:
    address = guarded.endpoints[0].removeprefix("https://")
    refused(address, Access(), f"the server uses TLS, but the client did not: write https://{address}")


def test_tls_to_a_server_that_speaks_plain_text_is_named(authority: Authority, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1).start()
    try:
        (address,) = cluster.ready().endpoints
        plain = f"the server does not use TLS, but the client did: write http://{address}"
        refused(f"https://{address}", Access(ca=str(authority.ca)), plain)
        access = Access(user="mt", password=SECRET)
        refused(address, access, "authentication is not enabled; remove control.etcd_user")
    finally:
        cluster.stop()


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        ("expired", "the server's certificate is out of date"),
        ("elsewhere", "the server's certificate is not for 127.0.0.1"),
    ],
)
def test_a_server_certificate_that_will_not_do_is_named(
    authority: Authority, tmp_path: Path, server: str, sentence: str
) -> None:
    cluster = Cluster(tmp_path, 1, authority=authority, server=server).start()
    try:
        assert cluster.processes[0] is not None
        refused(cluster.endpoints[0], Access(ca=str(authority.ca)), sentence)
    finally:
        cluster.stop()


def test_certificates_that_are_renewed_on_disk_are_taken_up(authority: Authority, tmp_path: Path) -> None:
    """The agent's own has run out; somebody puts another one in its place, and the store goes on by itself."""
    for end in ("pem", "key"):
        (tmp_path / f"own.{end}").write_bytes((authority.folder / f"expired.{end}").read_bytes())
    own = Access(ca=str(authority.ca), cert=str(tmp_path / "own.pem"), key=str(tmp_path / "own.key"))
    wants = ("--client-cert-auth", f"--trusted-ca-file={authority.ca}")
    cluster = Cluster(tmp_path, 1, *wants, authority=authority).start()
    try:
        cluster.ready(shown(authority))
        with closing(EtcdStore(cluster.endpoints, access=own)) as store:
            assert not answers(store)
            for end in ("pem", "key"):
                (tmp_path / f"own.{end}").write_bytes((authority.folder / f"client.{end}").read_bytes())
            eventually(lambda: answers(store))
    finally:
        cluster.stop()


# -- a job ----------------------------------------------------------------------------------------------------------------------


def test_a_job_and_the_commands_beside_it_are_let_in(guarded: Cluster, authority: Authority, tmp_path: Path) -> None:
    """The password is in nobody's arguments, in no file of the run directory, and not in the ranks' environment."""
    file = tmp_path / "password"
    file.write_text(SECRET)
    file.chmod(0o600)
    names = {"ca": authority.ca, "cert": authority.folder / "client.pem", "key": authority.folder / "client.key"}
    papers = {**names, "user": "mt", "password_file": file}
    options = [word for name, value in papers.items() for word in ("--set", f"control.etcd_{name}={value}")]
    script = ["--nproc-per-node", "1", str(MINIMAL), "--steps", "100000", "--step-delay", "0.05"]
    job = Job(tmp_path, script, "--etcd", guarded.endpoints[0], "--no-warm", *options, **{PASSWORD: SECRET})
    try:
        now = job.until_step(3)
        secret = SECRET.encode()
        assert secret not in Path(f"/proc/{now.pids[0]}/environ").read_bytes()
        files = (Path(folder, name) for folder, _, names in os.walk(job.directory) for name in names)
        assert not [path for path in files if secret in small(path)]
        assert cli("status", "--run-dir", str(job.directory)).returncode == 0
        stopped = cli("stop", "--run-dir", str(job.directory))
        assert stopped.returncode == 0, stopped.stderr
        assert job.agent.wait(120) == 130
    finally:
        if job.agent.poll() is None:
            job.kill_everything()


def small(path: Path) -> bytes:
    """What a small file holds; nothing of one that has gone meanwhile."""
    with suppress(FileNotFoundError):
        if path.is_file() and path.stat().st_size < 1 << 20:
            return path.read_bytes()
    return b""


# -- what the configuration says ------------------------------------------------------------------------------------------------


def test_the_password_comes_from_a_file_that_nobody_else_may_read_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    papers = Papers(user="mt", password_file=str(file))
    assert papers.access({}).password == SECRET
    assert SECRET not in repr(papers.access({}))
    assert Papers(user="mt").access({PASSWORD: SECRET}).password == SECRET
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        papers.access({})
    file.chmod(0o640)
    file.write_text(SECRET)
    with pytest.raises(UsageError, match=r"may be read by others.*chmod 600"):
        papers.access({})


def test_what_is_missing_is_the_users_to_give(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"there is no password.*etcd_password_file.*{PASSWORD}"):
        Papers(user="mt").access({})
    with pytest.raises(UsageError, match=r"etcd_cert and control\.etcd_key belong together"):
        Papers(cert="client.pem").access({})
    with pytest.raises(UsageError, match=r"control.etcd_ca: .*absent.pem cannot be read \(No such file"):
        Papers(ca=str(tmp_path / "absent.pem")).access({})


def test_paths_hold_in_another_directory() -> None:
    papers = Papers(ca="ca.pem", user="mt", password_file="~/pw").absolute()
    assert papers == Papers(ca=f"{os.getcwd()}/ca.pem", user="mt", password_file=f"{os.getcwd()}/~/pw")
