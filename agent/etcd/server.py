"""An etcd that the agent starts itself if `--etcd` is absent. For one node, it listens on the loopback interface. For a launch on several
hosts, it listens on the launching machine's address.

Data flow: `binary.find_server()` → `EmbeddedEtcd.start` → an endpoint on that address. The server dies with the agent. etcd's data stays in
`data_dir`, and the next server continues with this data.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from ...resilience.clock import monotonic_s, sleep, wall_s
from ...resilience.errors import MachineError, StoreUnavailable
from ...resilience.ipc import die_with_parent
from ...resilience.store.etcd.access import Access
from ...resilience.store.etcd.client import EtcdStore
from ..launch.ports import free_port, is_free
from ..output.terminal import Terminal
from ..run_directory import RunDirectory
from .binary import ServerBinary, clean_environment, find_server

AGAIN_WITHIN_S = 15.0
"""Limit for etcd's answer after a start in the agent's loop, which the start holds up. The loop then tries again."""
_HEALTHY_WITHIN_S = 60.0
_STOPPED_WITHIN_S = 5.0
_LOOPBACK = "127.0.0.1"
_LEAST_BYTES = 64 << 20
"""Bytes of one segment of etcd's log. etcd allocates a whole segment in one piece."""
_PORT_TAKEN = "address already in use"
_KILLED = "exited with code -"
"""How a report begins if a signal has ended etcd, for example from the kernel, which had no memory. etcd is then started once more."""
_FATAL = re.compile(r'panic: | C \| |"level":"(?:fatal|panic)"')


def probe(endpoint: str, deadline_s: float, access: Access | None = None) -> None:
    """Ask the etcd at `endpoint` one question. Raises StoreUnavailable if it does not answer, UsageError if `endpoint` is malformed."""
    with closing(EtcdStore([endpoint], deadline_s=deadline_s, access=access)) as store:
        store.get("/mt/")


class EmbeddedEtcd:
    """One etcd process on `data_dir`, its output appended to `log_path`. etcd's ports are stored beside `data_dir`, in etcd.json."""

    def __init__(
        self,
        binary: ServerBinary,
        data_dir: Path,
        log_path: Path,
        address: str = _LOOPBACK,
        port: int = 0,
        *,
        everywhere: bool = False,
    ) -> None:
        """address: this machine's IPv4 address, at which clients reach etcd. port: the only port for clients; 0: any. everywhere: clients
        reach etcd at all addresses of this machine."""
        self._port, self._everywhere = port, everywhere
        self._binary = binary
        self._address = address
        self._data_dir = data_dir
        self._log_path = log_path
        self._ports_path = data_dir.parent / "etcd.json"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, within_s: float = _HEALTHY_WITHIN_S) -> str:
        """Start etcd, wait until it answers, and return its HOST:PORT. Raises MachineError with the last lines of etcd's log, also if etcd
        does not answer within `within_s`.

        Call `start` from a thread that lives as long as the agent: the kernel kills etcd when that thread ends.
        """
        self.stop()
        trouble: str | None = ""
        try:
            self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            had_data = any(self._data_dir.iterdir())
            with self._log_path.open("ab") as log:
                for client_port, peer_port in self._port_pairs():
                    trouble = self._start_on(client_port, peer_port, log, within_s)
                    if trouble and trouble.startswith(_KILLED):
                        trouble = self._start_on(client_port, peer_port, log, within_s)
                    if trouble is None:
                        self._ports_path.write_text(json.dumps([client_port, peer_port]))
                        return f"{self._address}:{client_port}"
                    if _PORT_TAKEN not in trouble:
                        break
        except OSError as error:
            self.stop()
            raise MachineError(f"etcd cannot write its data or log ({error}); name another run directory") from error
        if full := self.cramped():
            raise MachineError(f"etcd {self._binary.path} {trouble}; {full}")
        advice = (
            f"; if another etcd still runs on {self._data_dir}, stop that one; "
            "if the data is damaged, move it away and start again (no snapshot is in it)"
        )
        raise MachineError(
            f"etcd {self._binary.path} {trouble}; its log is {self._log_path}{_limits() or (advice if had_data else '')}"
        )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def cramped(self) -> str:
        """Return a sentence that says that etcd's disk is full, and what to do; empty: the disk has enough space."""
        with suppress(OSError):
            free = shutil.disk_usage(self._data_dir.parent).free
            if free < _LEAST_BYTES:
                left = f"{free / 1e6:.1f} MB are left, and etcd allocates {_LEAST_BYTES / 1e6:.0f} MB at a time"
                return f"the disk of {self._data_dir} is full ({left}): make room there"
        return ""

    @contextmanager
    def naming_its_disk(self) -> Iterator[None]:
        """Run a block that asks etcd. If etcd does not answer and its disk is full, raise MachineError instead of StoreUnavailable, and say
        so."""
        try:
            yield
        except StoreUnavailable as error:
            if full := self.cramped():
                raise MachineError(f"etcd does not answer, and {full}") from error
            raise

    def stop(self) -> None:
        """End the etcd process and reap it; kill it after 5 s. Its data stays on disk."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # etcd's disk hangs: the process ends when the disk answers
                self._process.wait(_STOPPED_WITHIN_S)
        self._process = None

    def _start_on(self, client_port: int, peer_port: int, log: IO[bytes], within_s: float) -> str | None:
        """Start etcd on these ports. Return None once it answers on `client_port`. If etcd does not answer, end it, and return what went
        wrong."""
        log_from = log.seek(0, os.SEEK_END)
        self._process = die_with_parent.spawn(
            self._command(client_port, peer_port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=clean_environment(),
            start_new_session=True,  # Ctrl-C must reach only the agent, which still needs etcd to stop the others
        )
        try:
            if self._answers(self._process, client_port, within_s):
                return None
        except BaseException:
            self.stop()
            raise
        code = self._process.poll()
        self.stop()
        outcome = f"did not answer within {within_s:.0f} s" if code is None else f"exited with code {code}"
        return f"{outcome}: {self._last_words(log_from)}"

    def _answers(self, process: subprocess.Popen[bytes], client_port: int, within_s: float) -> bool:
        """Wait until etcd answers. Return False if it exits first, or takes too long."""
        ends_s = monotonic_s() + within_s
        with closing(EtcdStore([f"{self._address}:{client_port}"], deadline_s=0.5)) as store:
            while process.poll() is None and monotonic_s() < ends_s:
                # Another process's server may answer, if it took the port a moment ago.
                if _listens(process.pid, client_port):
                    with suppress(StoreUnavailable):
                        store.get("/mt/")
                        return True
                sleep(0.02)
        return False

    def _command(self, client_port: int, peer_port: int) -> list[str]:
        client, peer = f"http://{self._address}:{client_port}", f"http://{_LOOPBACK}:{peer_port}"
        flags = {
            "name": "embedded",
            "data-dir": str(self._data_dir),
            "listen-client-urls": f"http://0.0.0.0:{client_port}" if self._everywhere else client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            # etcd reads these two flags only at its first start. Later, the data of a single-member cluster opens under any peer address.
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"embedded={peer}",
            # With these, a killed etcd is healthy again in 0.5–1.0 s (measured).
            "heartbeat-interval": "50",
            "election-timeout": "500",
            # etcd compacts every 5 minutes, and history grows by 0.5 KB per put: 4 GiB suffice for 5 minutes at etcd's highest rate.
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": "1000",
            "quota-backend-bytes": str(4 << 30),
        }
        return [str(self._binary.path), *(f"--{flag}={value}" for flag, value in flags.items())]

    def _port_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of a client port and a peer port. The previous server's ports come first, so that its clients find the new server.
        Free ports follow."""
        with suppress(OSError, ValueError, TypeError):  # no file yet, or half a file
            client_port, peer_port = json.loads(self._ports_path.read_text())
            if not self._port and is_free(client_port, self._address) and is_free(peer_port, _LOOPBACK):
                yield client_port, peer_port
        taken = self._port and not is_free(self._port, self._address)  # another try would not help
        for _ in range(1 if taken else 5):
            client_port, peer_port = self._port or free_port(self._address), free_port(_LOOPBACK)
            if client_port != peer_port:
                yield client_port, peer_port

    def _last_words(self, log_from: int) -> str:
        lines = self._log_path.read_bytes()[log_from:].decode(errors="replace").splitlines()
        said = [line for line in lines if _FATAL.search(line)][-1:] or lines[-3:]
        return " | ".join(map(_plain, said)) or "its log says nothing"


def started(
    run: RunDirectory,
    terminal: Terminal,
    closing: ExitStack,
    address: str = "",
    port: int = 0,
    *,
    everywhere: bool = False,
) -> tuple[EmbeddedEtcd, str]:
    """Start an etcd in the run directory, which `closing` stops. Return the server and its endpoint. address: at which other hosts
    reach this etcd; empty: only this agent uses it. Raises MachineError."""
    binary = find_server()
    if binary.warning:
        terminal.say(binary.warning, wall_s(), "warn")
    server = EmbeddedEtcd(binary, run.etcd, run.logs / "etcd.log", address or _LOOPBACK, port, everywhere=everywhere)

    def stop() -> None:
        server.stop()
        if not address and run.finished.exists():  # a finished run never continues, and a script may leave many
            shutil.rmtree(run.etcd, ignore_errors=True)

    closing.callback(stop)
    return server, server.start()


def _plain(line: str) -> str:
    """Return the message of a log line. etcd 3.5 and newer wrap it in JSON, with a stack trace."""
    try:
        record = json.loads(line)
        return ": ".join(record[field] for field in ("msg", "error") if field in record)
    except ValueError:
        return line


def _listens(pid: int, port: int) -> bool:
    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr[1] == port for each in sockets)


def _limits() -> str:
    """Return which of the shell's limits may keep etcd from running, and what to do; empty: no limit does. etcd needs at least 151 open
    files."""
    least = {
        "-n": (resource.RLIMIT_NOFILE, 151),
        "-f": (resource.RLIMIT_FSIZE, math.inf),
        "-v": (resource.RLIMIT_AS, math.inf),
    }
    limits = {option: (resource.getrlimit(limit)[0], wanted) for option, (limit, wanted) in least.items()}
    low = [
        f"ulimit {option}" for option, (now, wanted) in limits.items() if now != resource.RLIM_INFINITY and now < wanted
    ]
    return (
        f"; this shell limits what etcd may use: raise {' and '.join(low)}, or name an etcd of your own with --etcd"
        if low
        else ""
    )
