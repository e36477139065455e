"""What a program can see of itself through the kernel: descriptors, signals, limits, ties to other processes, mappings."""

import ctypes
import os
import re
import resource
import signal
import stat
import sys
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_SELF = Path("/proc/self")
_PRCTL = {"dumpable": 3, "keepcaps": 7, "seccomp": 21, "timerslack": 30, "no_new_privs": 39, "thp_disable": 42}
_PRCTL_INTO = {"pdeathsig": 2, "child_subreaper": 37}
_OF_THE_MOMENT = re.compile(
    r"Pid|Tgid|NStgid|NSpid|NSpgid|NSsid|Ngid|State|Vm|Rss|Hugetlb|.*ctxt|SigQ|untag|x86_Thread|FDSize|PPid"
)
"""Lines of /proc/self/status that no two processes share."""


def observe() -> dict[str, object]:
    return {
        "descriptors": descriptors(),
        "signals": signals(),
        "process": process(),
        "own": own_words(),
        "shared": shared_mappings(),
    }


def descriptors() -> dict[str, object]:
    """Every open descriptor: kind, what it is open on, flags, position of a file. Two that share a pipe or a file say so."""
    first: dict[tuple[int, int], str] = {}
    found: dict[str, object] = {}
    for name in sorted(os.listdir(_SELF / "fd"), key=int):
        try:
            about = os.fstat(int(name))
        except OSError:  # the one that listed them
            continue
        target = os.readlink(_SELF / "fd" / name)
        inode = (about.st_dev, about.st_ino)
        same_as = first.setdefault(inode, name)
        info = dict(line.split(":", 1) for line in (_SELF / "fdinfo" / name).read_text().splitlines() if ":" in line)
        found[name] = {
            "kind": stat.filemode(about.st_mode)[0],
            "target": re.sub(
                r"\[\d+\]|(?<=/)[^/_]+_\w+(?=/attempt_)", "", target
            ),  # inodes, and the name of torchrun's run
            "same_as": same_as if same_as != name else "",
            "flags": info["flags"].strip(),
            "inheritable": os.get_inheritable(int(name)),
        }
    return found


def signals() -> dict[str, object]:
    """What each signal does, as Python knows it and as the kernel knows it, and which are blocked."""
    names = {number: signal.Signals(number).name for number in signal.valid_signals() if number in set(signal.Signals)}
    known = {names.get(n, f"SIG{n}"): repr(signal.getsignal(n)) for n in signal.valid_signals()}
    status = _status()
    masks = {name: _numbers(status[name]) for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")}
    wakeup = signal.set_wakeup_fd(-1)
    timers = {str(which): signal.getitimer(which) for which in (0, 1, 2)}
    handlers = {name: re.sub(r"0x[0-9a-f]+", "", handler) for name, handler in known.items()}
    return {"handlers": handlers, **masks, "wakeup_fd": wakeup, "timers": timers, "alarm": signal.alarm(0)}


def process() -> dict[str, object]:
    """Identity, limits, scheduling, ties to parent, session and terminal, and what `prctl` has set."""
    os.umask(umask := os.umask(0o22))
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    files = ("oom_score_adj", "coredump_filter", "cgroup", "personality", "timerslack_ns", "loginuid", "limits")
    spaces = {entry.name: os.readlink(entry) for entry in (_SELF / "ns").iterdir()}
    status = {k: v for k, v in _status().items() if not _OF_THE_MOMENT.match(k) and not k.startswith(("Sig", "Shd"))}
    parent = Path(f"/proc/{os.getppid()}")
    return {
        "umask": oct(umask),
        "cwd": os.getcwd(),
        "cwd_link": os.readlink(_SELF / "cwd"),
        "exe": os.readlink(_SELF / "exe"),
        "limits": {name: limits[name] for name in sorted(limits)},
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "policy": os.sched_getscheduler(0),
        "ioprio": _LIBC.syscall(252, 1, 0),
        "leads_session": os.getsid(0) == os.getpid(),
        "leads_group": os.getpgrp() == os.getpid(),
        "terminal": _terminal(),
        "parent": (parent / "cmdline").read_bytes().decode(errors="replace").split("\0")[:2],
        "parent_is_in_other_session": os.getsid(os.getppid()) != os.getsid(0),
        "prctl": {n: _LIBC.prctl(k, 0, 0, 0, 0) for n, k in _PRCTL.items()} | _prctl_into(),
        "files": {name: _read(_SELF / name) for name in files if name != "limits"},
        "namespaces": spaces,
        "status": status,
        "tasks": len(os.listdir(_SELF / "task")),
        "children": _read(_SELF / f"task/{os.getpid()}/children").split() and "some",
        "used_children_cpu": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > 0,
        "posix_timers": _read(_SELF / "timers"),
    }


def own_words() -> dict[str, object]:
    """The command line, the name and the environment that others see of this process, and what C sees of its environment."""
    environ, shown = _read(_SELF / "environ"), (_SELF / "cmdline").read_bytes()
    first = ctypes.POINTER(ctypes.c_void_p).in_dll(_LIBC, "environ")[0] or 0
    getenv = _LIBC.getenv
    getenv.restype = ctypes.c_char_p
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONPATH", "PROBED")
    return {
        "cmdline": _read(_SELF / "cmdline").split("\0"),
        "comm": _read(_SELF / "comm").strip(),
        "environ_behind_cmdline": ctypes.string_at(first - len(shown), len(shown)) == shown,  # setproctitle needs it
        "environ": dict(word.split("=", 1) for word in environ.split("\0") if "=" in word),
        "getenv": {name: (getenv(name.encode()) or b"").decode() for name in names},
    }


def shared_mappings() -> list[str]:
    """What is mapped in such a way that another process sees what is written into it."""
    lines = [line.split(maxsplit=5) for line in _read(_SELF / "maps").splitlines()]
    shared = [line[5] if len(line) > 5 else "anonymous" for line in lines if line[1][3] == "s" and "w" in line[1]]
    return sorted(re.sub(r"sem\.mp-\w+", "sem.mp-", name) for name in shared)


def _status() -> dict[str, str]:
    lines = (_SELF / "status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _numbers(mask: str) -> list[int]:
    return [bit + 1 for bit in range(64) if int(mask, 16) >> bit & 1]


def _terminal() -> str:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError as error:
        return str(error.strerror)
    return "has one"


def _prctl_into() -> dict[str, int]:
    value = ctypes.c_int()
    found = {}
    for name, number in _PRCTL_INTO.items():
        _LIBC.prctl(number, ctypes.byref(value), 0, 0, 0)
        found[name] = value.value
    return found


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(sys.getfilesystemencoding(), "surrogateescape")
    except OSError as error:
        return str(error.strerror)
