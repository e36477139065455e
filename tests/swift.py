"""A real object store for tests: OpenStack Swift with its S3 interface, on loopback, one replica, four processes."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mt_resilient.agent.launch.ports import free_ports

from .conftest import MARK
from .harness import ROOT

BIN = ROOT / ".venv" / "swift" / "bin"
"""Where scripts/swift installs it."""
KEYS = {"AWS_ACCESS_KEY_ID": "test:tester", "AWS_SECRET_ACCESS_KEY": "testing"}
REGION = "us-east-1"
_STARTS_S = 90.0

_SWIFT = """
[swift-hash]
swift_hash_path_prefix = test
swift_hash_path_suffix = test
[storage-policy:0]
name = one
default = yes
"""
_SERVER = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {etc}
devices = {devices}
mount_check = false
workers = 0
user = {user}
log_level = WARNING
log_address = /nonexistent
[pipeline:main]
pipeline = {pipeline}
[app:{kind}-server]
use = egg:swift#{kind}
account_autocreate = true
"""
_FILTERS = f"""
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:s3api]
use = egg:swift#s3api
location = {REGION}
s3_acl = false
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {KEYS["AWS_SECRET_ACCESS_KEY"]} .admin
"""
_RINGS = """
import sys
from swift.common.ring import RingBuilder
for name, port in zip(("account", "container", "object"), map(int, sys.argv[2:])):
    ring = RingBuilder(4, 1, 1)
    here = {"ip": "127.0.0.1", "port": port, "replication_ip": "127.0.0.1", "replication_port": port}
    ring.add_dev({"region": 1, "zone": 1, "device": "disk", "weight": 1, **here})
    ring.rebalance()
    ring.get_ring().save(f"{sys.argv[1]}/{name}.ring.gz")
"""
_BUCKET = """
import sys
from swift.common.internal_client import InternalClient
from swift.common.utils import set_swift_dir
set_swift_dir(sys.argv[1])
InternalClient(f"{sys.argv[1]}/inner.conf", "test", 1).create_container("AUTH_test", sys.argv[2])
"""


class Swift:
    """Its servers, running until `close`. root: an empty directory."""

    def __init__(self, root: Path) -> None:
        self._etc, self._logs = root / "etc", root
        for directory in (self._etc, root / "devices" / "disk"):
            directory.mkdir(parents=True)
        self._environment = {key: value for key, value in os.environ.items() if key != MARK}
        self._environment["SWIFT_DIR"] = str(self._etc)
        kinds = ("account", "container", "object", "proxy")
        self._ports = dict(zip(kinds, free_ports(len(kinds), "127.0.0.1"), strict=True))
        (self._etc / "swift.conf").write_text(_SWIFT)
        for kind in kinds:
            before = "catch_errors s3api tempauth " if kind == "proxy" else ""
            self._configure(kind, kind, f"{before}{kind}-server")
        rings = [str(self._ports[kind]) for kind in kinds[:3]]
        subprocess.run([BIN / "python", "-c", _RINGS, self._etc, *rings], env=self._environment, check=True)
        self._running = {kind: self._start(kind) for kind in kinds}
        try:
            for kind in kinds:
                self._wait(kind)
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['proxy']}"

    def make_bucket(self, name: str) -> None:
        """Inside of Swift, where its containers are the buckets and nobody asks for a key."""
        self._configure("inner", "proxy", "proxy-server")
        subprocess.run([BIN / "python", "-c", _BUCKET, self._etc, name], env=self._environment, check=True)

    @contextmanager
    def down(self) -> Iterator[None]:
        """Nobody listens."""
        self._running["proxy"].kill()
        self._running["proxy"].wait()
        try:
            yield
        finally:
            self._running["proxy"] = self._start("proxy")
            self._wait("proxy")

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """It takes connections, and answers nothing."""
        self._running["proxy"].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._running["proxy"].send_signal(signal.SIGCONT)

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def _configure(self, name: str, kind: str, pipeline: str) -> None:
        text = _SERVER.format(
            port=self._ports[kind],
            etc=self._etc,
            devices=self._etc.parent / "devices",
            user=pwd.getpwuid(os.getuid()).pw_name,
            pipeline=pipeline,
            kind=kind,
        )
        (self._etc / f"{name}.conf").write_text(text + _FILTERS)

    def _start(self, kind: str) -> subprocess.Popen[bytes]:
        command = [BIN / f"swift-{kind}-server", self._etc / f"{kind}.conf", "-v"]
        with (self._logs / f"{kind}.log").open("ab") as log:
            return subprocess.Popen(command, env=self._environment, stdout=log, stderr=log, start_new_session=True)

    def _wait(self, kind: str) -> None:
        until = time.monotonic() + _STARTS_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._ports[kind])).close()
                return
            except OSError:
                assert time.monotonic() < until, (self._logs / f"{kind}.log").read_text()[-3000:]
                time.sleep(0.05)
