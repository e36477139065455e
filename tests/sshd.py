"""A real sshd of this user's on the loopback interface, with keys made for it."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from mt_resilient.agent.launch.ports import free_port

PROGRAM = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


class Sshd:
    """`options`: for `ssh -o`, so that any host name leads to it."""

    def __init__(self, place: Path, settings: str = "") -> None:
        """settings: further lines of sshd_config(5)."""
        self.port = free_port("127.0.0.1")
        self.log = place / "sshd.log"
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / name], check=True)
        (place / "authorized").write_text((place / "user.pub").read_text())
        known = (place / "host.pub").read_text()
        (place / "known").write_text(f"[127.0.0.1]:{self.port} {known}")
        (place / "config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {place / 'host'}\nAuthorizedKeysFile {place / 'authorized'}\n"
            f"PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\nPermitRootLogin yes\nLogLevel ERROR\n"
            f"MaxStartups 100\n{settings}\n"
        )
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd as root gives its privileges up
        assert PROGRAM
        with self.log.open("wb") as log:
            command = [PROGRAM, "-D", "-e", "-f", str(place / "config")]
            self.process = subprocess.Popen(command, stderr=log, start_new_session=True)
        self.options = [
            "HostName=127.0.0.1",
            f"Port={self.port}",
            f"User={getpass.getuser()}",
            f"IdentityFile={place / 'user'}",
            "IdentitiesOnly=yes",
            f"UserKnownHostsFile={place / 'known'}",
            f"HostKeyAlias=[127.0.0.1]:{self.port}",
        ]
        self._wait()

    def _wait(self) -> None:
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            assert self.process.poll() is None, self.log.read_text()
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"sshd does not listen: {self.log.read_text()}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
