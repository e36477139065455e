"""Recognizes calls of built-in functions whose result depends on the process or on the moment. Pure.

A call and its Python frame → what the call asks or does, in words.
"""

from __future__ import annotations

import _ctypes
import _posixsubprocess
import _random
import _thread
import datetime
import gc
import io
import os
import random
import socket
import sys
import time
from types import FrameType
from typing import Any

_FILE, _TIME, _RANDOM = "looks at a file", "asks for the time", "asks for random numbers"
_ADDRESS = "asks for an address"
_WORDED: dict[Any, str] = {
    **dict.fromkeys((os.getpid, os.getppid, _thread.get_native_id), "asks for its process id"),
    **dict.fromkeys((os.urandom, os.getrandom), _RANDOM),
    **dict.fromkeys((open, os.open, os.stat, os.lstat, os.access, os.listdir, os.scandir, os.readlink), _FILE),
    **dict.fromkeys((socket.getaddrinfo, socket.gethostbyname, socket.gethostbyaddr, socket.getnameinfo), _ADDRESS),
    input: "reads the standard input",
    gc.freeze: "freezes what the garbage collector knows",
    os.register_at_fork: "is called at each fork",
    _thread.start_new_thread: "starts a thread",
    _posixsubprocess.fork_exec: "runs a program",
    _ctypes.dlopen: "calls a library of C",
}
_MODULES = {"posix": "calls os.{}", "time": _TIME, "_uuid": _RANDOM}
"""By module, what its functions ask or do. The functions in `_WORDED` and `_ALIKE` are exceptions; functions in `_ALIKE` return the same
value in every process."""
_ALIKE = {
    *("fspath", "getcwd", "getcwdb", "putenv", "unsetenv", "strerror", "_path_normpath", "_path_splitroot_ex"),
    *("cpu_count", "uname", "sysconf", "confstr", "getuid", "geteuid", "getgid", "getegid", "getgroups"),
    *("umask", "chdir", "fchdir", "nice", "sched_setaffinity"),  # `Watch` compares their effects
    *("sleep", "strptime", "mktime", "get_clock_info"),
}
_STREAMS = (io.TextIOWrapper, io.BufferedReader, io.BufferedRandom, io.FileIO)
_ON_THE_WAY = {"genericpath", "posixpath", "pathlib", "os", "shutil", "zipfile"}
"""Modules that access files on behalf of their callers."""
_OF_PYTHON = {"importlib", "zipimport", "linecache", "tokenize", "inspect", "pkgutil", "gettext", "argparse"}
"""Parts of Python that access only code, translations, the width of help texts, or the metadata of installed packages."""
_COMPILES = ("torch._dynamo", "torch._inductor")
_RESOLVES = ("_joinrealpath", "resolve")
"""Functions that look for symbolic links in a path, as in `Path(__file__).resolve()`."""
RENEWED = {("megatron.training.training", time.time)}
"""Calls that this program's hooks repeat in each rank (`loops/megatron.py`)."""


def question(called: Any, frame: FrameType) -> str:
    """Return, in words, what `frame` asks or does by its call of the built-in function `called`. Return an empty text if the result does
    not depend on the process or the moment, or does not matter."""
    asked = _asks(called, frame)
    quiet = asked and (_in_vain(frame) or (_module(frame), called) in RENEWED)
    return "" if quiet else asked


def _asks(called: Any, frame: FrameType) -> str:
    owner, name = getattr(called, "__self__", None), called.__name__
    if words := _WORDED.get(called, ""):
        return words
    if (words := _MODULES.get(called.__module__ or "", "")) and name not in _ALIKE:
        return words.format(name)
    if isinstance(owner, type) and issubclass(owner, datetime.date) and name in ("now", "utcnow", "today"):
        return _TIME
    if isinstance(owner, socket.SocketType):
        return "uses a socket"
    if isinstance(owner, _STREAMS) and name not in ("write", "flush"):  # printed output is captured
        return "uses a stream"
    if isinstance(owner, _random.Random):
        unseeded = name == "seed" and frame.f_locals.get("a") is None
        return _RANDOM if unseeded or owner is random.random.__self__ else ""  # type: ignore[attr-defined]
    torch = sys.modules.get("torch")
    if torch and isinstance(owner, getattr(torch, "Generator", ())) and name in ("seed", "initial_seed", "get_state"):
        return _RANDOM
    return ""


def _in_vain(frame: FrameType) -> bool:
    """Whether the result does not matter: Python's own code or torch's compiler makes the call, or the call only resolves a path."""
    asking: FrameType | None = frame
    while asking and _module(asking).partition(".")[0] in _ON_THE_WAY:
        if asking.f_code.co_name in _RESOLVES:
            return True
        asking = asking.f_back
    name = _module(asking) if asking else ""
    return name.partition(".")[0] in _OF_PYTHON or name.startswith(_COMPILES)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
