"""Workers that run beside each other and share nothing but a folder; and what every test leaves behind: nothing."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from .once import SHARED

settings.register_profile("drawn anew", deadline=None)  # scripts/test --all
settings.register_profile("the same each time", deadline=None, derandomize=True)
settings.load_profile("the same each time")

_NEW_MOUNTS, _NEW_NETWORK = 0x20000, 0x40000000  # CLONE_NEWNS, CLONE_NEWNET of sched.h; Python 3.12 has os.unshare


os.register_at_fork(after_in_child=gc.freeze)
"""What other tests have left must not be finalized in a DataLoader's worker, which has none of the threads that it needs."""


_OF_THE_RUNNER = re.compile(
    r"(SLURM|PET|PMI|OMPI|TORCHELASTIC)_|MT_RESILIENT_(?!ETCD$|TEST)|KUBERNETES_SERVICE_HOST$|\w+_VISIBLE_DEVICES$"
    r"|(https?|all)_proxy$|RANK$|LOCAL_RANK$|WORLD_SIZE$|MASTER_(ADDR|PORT)$",
    re.IGNORECASE,
)
"""Variables with which whatever has started the tests would tell our programs about itself."""


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its jobs in the background ignore these two
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for name in filter(_OF_THE_RUNNER.match, [*os.environ]):
        os.environ.pop(name)
    if hasattr(config, "workerinput"):
        for name in ("COLUMNS", "LINES"):  # readline has put them there for the workers; tests ask the terminal
            os.environ.pop(name, None)
        _in_namespaces_of_its_own()
    elif SHARED not in os.environ:
        os.environ[SHARED] = tempfile.mkdtemp(prefix="mt-resilient-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(SHARED)))
        if not config.getoption("numprocesses", None) and not ctypes.CDLL(None).unshare(_NEW_MOUNTS):
            _run(*_OWN_SHARED_MEMORY)  # what other programs of the machine leave there is none of our business


_OWN_SHARED_MEMORY = "mount --make-rprivate /", "mount -t tmpfs tmpfs /dev/shm"


def _run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True)


def _in_namespaces_of_its_own() -> None:
    """From now on this worker of xdist, with all that it starts, has a /dev/shm and a loopback interface that no other one sees."""
    address = "127.0.0.1"
    with suppress(OSError):  # nobody knows this host's name
        address = socket.gethostbyname(socket.gethostname())
    if not shutil.which("ip") or ctypes.CDLL(None).unshare(_NEW_MOUNTS | _NEW_NETWORK):
        raise pytest.UsageError(
            "tests run side by side in namespaces, which takes root and iproute2; without them: -n 0"
        )
    names = Path(os.environ[SHARED], "nsswitch.conf")
    names.write_text("hosts: files\n")  # no name server is there to ask, and torch would warn that none answers
    if address.startswith("127."):
        address = "198.51.100.1"  # of those for documentation
    _run(
        *_OWN_SHARED_MEMORY,
        f"mount --bind {names} /etc/nsswitch.conf",
        "ip link set lo up",
        f"ip addr add {address}/32 dev lo",  # this host has an address, and a way to others that leads nowhere
        f"ip route add default dev lo src {address}",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups stay on one worker each. xdist 3.8 ends a test's id with its group, by a field that pytest 9.2 no longer reads."""
    for item in items:
        groups = [mark.args[0] for mark in item.iter_markers("xdist_group")]
        if item.get_closest_marker("timing"):
            groups = ["timing"]
        if groups and hasattr(item.config, "workerinput"):
            item._id = type(item.id).parse(f"{item.nodeid}@{groups[0]}")


MARK = "MT_RESILIENT_TEST"
"""Environment variable that every process started by a test inherits, however far down."""


def marked(mark: str) -> list[str]:
    """Command lines of the living processes that carry `mark`, this one excepted."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append(f"{process.name}: " + (process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


_NAMED_BY_RANKS = ("mt-resilient", "torch_", "__KMP_REGISTERED_LIB_")
"""What we and our ranks may leave in shared memory. Other programs use it too, at the same time, so no other name is counted."""


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No orphan process (and so no socket), no file in shared memory, after any test."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + 60  # a drain process whose parent is gone first finishes what it has
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes left behind: {left}"
    shared = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(_NAMED_BY_RANKS)}
    assert not shared, f"files left in /dev/shm: {shared}"
