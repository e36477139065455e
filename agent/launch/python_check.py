"""Checks before the start whether the interpreters of the launcher and the ranks find torch and mt_resilient.

launch → a probe in its Python, which takes milliseconds and imports neither → the launch, adapted if needed, or an error
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from subprocess import DEVNULL, PIPE, CompletedProcess, TimeoutExpired

from ...resilience.errors import MachineError
from ...resilience.ipc import die_with_parent
from .torchrun import Launch

AS_THE_LAUNCHER = """
import sys
if sys.argv[1] == "script" and sys.path[:1] == [""]:
    del sys.path[0]
"""
"""This code runs at the start of each probe of the launcher's Python. Python puts the working directory on sys.path for `-m` and `-c`, but
not for a script file."""
_PROBE = f"""{AS_THE_LAUNCHER}
from importlib.machinery import PathFinder
from importlib.util import find_spec
known = [find_spec("torch"), find_spec("mt_resilient")]
for name in ("distributed", "run"):
    known[0] = known[0] and PathFinder.find_spec(name, known[0].submodule_search_locations or [])
print()
print(*map(bool, known))
"""
_IMPORT = f"{AS_THE_LAUNCHER}import torch.distributed.run"
_FAILS_S = 5.0
"""Seconds that the import of torch may take. The launcher has just read the same files."""
ANSWERS_S = 60.0
"""Seconds that a probe may take: the interpreter may be on a shared file system. If a probe takes longer, the check assumes that torch and
mt_resilient are there."""


def versions() -> dict[str, str]:
    """Return the versions of the packages that this interpreter has. The ranks' interpreter may be another one."""
    found = {"python": platform.python_version(), "linux": platform.release()}
    for name in ("mt-resilient", "torch", "megatron-core", "numpy"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def checked(launch: Launch, environ: Mapping[str, str]) -> Launch:
    """Return the launch. If the ranks' Python does not have mt_resilient, the result does not use the hook. Raises MachineError if the
    launcher cannot start."""
    if not launch.interpreter:
        return launch
    kind = as_what(launch)
    torch, ours = _ask(launch.interpreter, kind, environ)
    if not torch:
        raise MachineError(
            f"{launch.python} has no torch (torch.distributed.run); nothing was started. Install torch there, or let PATH begin "
            "with an environment that has torch"
        )
    ranks = launch.rank_python or launch.python
    if launch.interpreter[1:] or launch.rank_python:
        _, ours = _ask([ranks], kind, environ)
    if ours or launch.own_programs:
        return launch
    return replace(launch, hooked=False, rank_command=(), warm_refused=f"mt_resilient is not installed for {ranks}")


def unimportable(launch: Launch, environ: Mapping[str, str]) -> str:
    """Return why the launcher's Python cannot import torch; empty: it can, or takes too long. The import takes seconds, so the agent checks
    this only if a launcher ended before it started a rank."""
    if not launch.interpreter:
        return ""
    done = run([*launch.interpreter, "-c", _IMPORT, as_what(launch)], environ, _FAILS_S)
    if done is None or not done.returncode:
        return ""
    return f"{launch.python} cannot import torch: {last_line(done)}"


def as_what(launch: Launch) -> str:
    """Return the first argument of a probe: how the launcher is started."""
    return "module" if "-m" in launch.program else "script"


def _ask(interpreter: Sequence[str], kind: str, environ: Mapping[str, str]) -> tuple[bool, bool]:
    """Return whether the interpreter finds torch's launcher, and whether it finds mt_resilient."""
    done = run([*interpreter, "-c", _PROBE, kind], environ, ANSWERS_S)
    if done is None:
        return True, True
    if done.returncode:
        raise MachineError(f"{interpreter[0]} does not run Python ({last_line(done)}); nothing was started")
    torch, ours = done.stdout.split()[-2:]
    return torch == b"True", ours == b"True"


def run(command: Sequence[str], environ: Mapping[str, str], patience_s: float) -> CompletedProcess[bytes] | None:
    """Run `command`, and return its result. None: it took longer than patience_s, and was killed."""
    process = die_with_parent.spawn(command, env=dict(environ), stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    try:
        out, err = process.communicate(timeout=patience_s)
    except TimeoutExpired:
        process.kill()
        process.wait()
        return None
    return CompletedProcess(command, process.returncode, out, err)


def last_line(done: CompletedProcess[bytes]) -> str:
    """Return the last line that the process wrote to stderr, or else its exit code."""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
