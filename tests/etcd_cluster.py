"""Real etcd for tests, of one member or several, in plain text or with TLS and users; and what happens to its members."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from mt_resilient.agent.etcd.binary import clean_environment, find_server
from mt_resilient.agent.launch.ports import free_ports
from mt_resilient.resilience.errors import StoreUnavailable
from mt_resilient.resilience.store.etcd.access import Access, parse_endpoint
from mt_resilient.resilience.store.etcd.client import EtcdStore
from mt_resilient.resilience.store.etcd.member import Member
from mt_resilient.resilience.store.etcd.messages import method


def eventually(true: Callable[[], bool], within_s: float = 60.0) -> None:
    ends = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < ends, f"not so after {within_s} s"
        time.sleep(0.05)


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a folder, which signs what it is asked to."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def found(self) -> Authority:
        self.folder.mkdir(exist_ok=True)
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-subj", "/CN=test-ca", "-keyout", str(self.folder / "ca.key"), "-out", str(self.ca),
        )  # fmt: skip
        return self

    def sign(self, name: str, names: str = "IP:127.0.0.1,DNS:localhost", days: int = 2) -> tuple[Path, Path]:
        """Certificate and key. days: negative for one that is out of date."""
        cert, key, request = (self.folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        _openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
            "-keyout", str(key), "-out", str(request),
        )  # fmt: skip
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        now = datetime.datetime.now(datetime.UTC)
        since, until = (f"{now + datetime.timedelta(days=d):%Y%m%d%H%M%SZ}" for d in (min(-1, days - 1), days))
        index, serial = self.folder / f"{name}.index", self.folder / f"{name}.serial"
        index.write_text("")
        serial.write_text(f"{int.from_bytes(os.urandom(8)):032x}\n")
        settings = self.folder / f"{name}.cnf"
        settings.write_text(
            f"[ca]\ndefault_ca=c\n[c]\ndatabase={index}\nserial={serial}\nnew_certs_dir={self.folder}\ndefault_md=sha256\n"
            "policy=p\n[p]\ncommonName=supplied\n"
        )
        _openssl(
            "ca", "-batch", "-config", str(settings), "-cert", str(self.ca), "-keyfile", str(self.folder / "ca.key"),
            "-in", str(request), "-out", str(cert), "-extfile", str(extensions), "-startdate", since, "-enddate", until,
            "-notext",
        )  # fmt: skip
        return cert, key


def _openssl(*words: str) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


class Cluster:
    """Members on this machine. flags: further ones of each. authority: TLS for clients, with `server` as the members' certificate."""

    def __init__(
        self, folder: Path, members: int, *flags: str, authority: Authority | None = None, server: str = "server"
    ) -> None:
        self.folder, self._flags, self._tls = folder, flags, authority is not None
        if authority:
            names = [str(authority.folder / f"{server}.{end}") for end in ("pem", "key")]
            self._flags = (*flags, f"--cert-file={names[0]}", f"--key-file={names[1]}")
        ports = free_ports(2 * members, "127.0.0.1")
        self.ports = list(zip(ports[::2], ports[1::2], strict=True))
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * members

    @property
    def endpoints(self) -> list[str]:
        return [f"{'https://' if self._tls else ''}127.0.0.1:{client}" for client, _ in self.ports]

    def start(self, *which: int) -> Cluster:
        """All members, or these."""
        peers = ",".join(f"m{number}=http://127.0.0.1:{peer}" for number, (_, peer) in enumerate(self.ports))
        for number in which or range(len(self.ports)):
            client, peer = self.ports[number]
            urls = [f"http{'s' if self._tls else ''}://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"]
            command = [
                str(find_server().path), f"--name=m{number}", f"--data-dir={self.folder}/m{number}",
                f"--listen-client-urls={urls[0]}", f"--advertise-client-urls={urls[0]}",
                f"--listen-peer-urls={urls[1]}", f"--initial-advertise-peer-urls={urls[1]}",
                f"--initial-cluster={peers}", "--heartbeat-interval=50", "--election-timeout=500", *self._flags,
            ]  # fmt: skip
            with (self.folder / f"m{number}.log").open("ab") as log:
                self.processes[number] = subprocess.Popen(command, stdout=log, stderr=log, env=clean_environment())
        return self

    def ready(self, access: Access | None = None, within_s: float = 60.0) -> Cluster:
        for endpoint in self.endpoints:
            store = EtcdStore([endpoint], deadline_s=1.0, access=access)
            eventually(lambda store=store: answers(store), within_s)
            store.close()
        return self

    def signal(self, number: int, what: int) -> None:
        process = self.processes[number]
        assert process is not None
        process.send_signal(what)
        if what == signal.SIGKILL:
            process.wait()
        if what == signal.SIGSTOP:  # it reaches a thread when it next leaves the kernel
            threads = psutil.Process(process.pid).threads()
            eventually(lambda: all(psutil.Process(each.id).status() == "stopped" for each in threads))

    def stop(self) -> None:
        for process in filter(None, self.processes):
            process.kill()
            process.wait()

    def leader(self) -> int:
        """Which member leads; all of them are up."""
        said = [ask(endpoint, "Maintenance", "Status") for endpoint in self.endpoints]
        return [status.header.member_id for status in said].index(said[0].leader)

    def move_leader(self) -> int:
        """Another member leads from now on; which. It is asked for again if the leader changes by itself meanwhile."""
        ends = time.monotonic() + 60
        while True:
            try:
                old = self.leader()
                new = (old + 1) % len(self.endpoints)
                target = ask(self.endpoints[new], "Maintenance", "Status")
                ask(self.endpoints[old], "Maintenance", "MoveLeader", targetID=target.header.member_id)
                return new
            except (ValueError, grpc.RpcError):  # none leads, or another one than a moment ago
                assert time.monotonic() < ends, "no other member comes to lead"
                time.sleep(0.1)

    def require_users(self, access: Access | None = None, **passwords: str) -> None:
        """Switch authentication on. passwords: by user, root among them; each may do everything."""
        for name, password in passwords.items():
            ask(self.endpoints[0], "Auth", "UserAdd", access, name=name, password=password)
        ask(self.endpoints[0], "Auth", "RoleAdd", access, name="root")
        for name in passwords:
            ask(self.endpoints[0], "Auth", "UserGrantRole", access, user=name, role="root")
        ask(self.endpoints[0], "Auth", "AuthEnable", access)


def answers(store: EtcdStore) -> bool:
    try:
        store.get("/a")
    except StoreUnavailable:
        return False
    return True


def ask(endpoint: str, service: str, rpc_name: str, access: Access | None = None, /, **fields: Any) -> Any:
    """A call that the program itself has no use for."""
    member = Member(parse_endpoint(endpoint), access or Access())
    rpc = method(service, rpc_name)
    try:
        member.renew(60.0)
        call = member.channel.unary_unary(
            rpc.path, request_serializer=rpc.request.SerializeToString, response_deserializer=rpc.response.FromString
        )
        return call(rpc.request(**fields), timeout=60.0, metadata=member.identity())
    finally:
        member.close()
