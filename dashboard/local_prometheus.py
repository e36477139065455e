"""Runs Debian's Prometheus for the page, if the user names none. This Prometheus keeps its data in the run directory, and finds the agents
in a file that a thread of the dashboard updates. The file names the agents on this machine, and, from their /sd/own, the agents on the
other nodes of their jobs."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

from ..agent.cli.explain import run_roots
from ..agent.launch.ports import free_port
from ..agent.run_directory import RunDirectory
from ..resilience.clock import monotonic_s, sleep
from ..resilience.errors import UsageError
from ..resilience.ipc import die_with_parent
from ..resilience.report.metrics import OWN, Target
from .prometheus import opened

FOLDER = "prometheus"
_EVERY_S, _READY_S, _ANSWER_S = 5.0, 20.0, 2.0
_CONFIG = """\
global: {scrape_interval: 5s}
scrape_configs:
  - job_name: mt-resilient
    honor_labels: true
    file_sd_configs: [{files: [targets.json]}]
"""


@contextmanager
def running(given: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Run a Prometheus for these run directories, or folders of them, within the block. Yield its address, and a sentence about it. The
    address is empty if no Prometheus runs."""
    program = shutil.which("prometheus")
    folder = ([*given] or [Path("mt-runs")])[0].absolute() / FOLDER
    alone = "the page shows only what is in the journals"
    if program is None:
        yield "", f"no Prometheus is named (--prometheus URL) or installed here (Debian: prometheus): {alone}"
        return
    if not _targets(given) and not (folder / "data").exists():
        yield "", f"no agent runs here, so no Prometheus was started: {alone}"
        return
    ended, why = threading.Event(), ""
    try:
        folder.mkdir(exist_ok=True)
        lock = (folder / "lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "prometheus.yml").write_text(_CONFIG)
        _write(folder, given)
        log = (folder / "prometheus.log").open("wb")
    except BlockingIOError:
        why = f"another dashboard runs a Prometheus in {folder}; name its address with --prometheus. Here, {alone}"
    except OSError as error:
        why = f"{folder} cannot be written ({error.strerror}), so no Prometheus was started: {alone}"
    if why:
        yield "", why
        return
    address = f"127.0.0.1:{free_port()}"
    words = [
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with log:
        process = die_with_parent.spawn(
            [program, *words, "--storage.tsdb.retention.time=90d", "--storage.tsdb.retention.size=2GB"],
            stdout=log,
            stderr=log,
        )
    threading.Thread(target=_renew, args=(folder, given, ended), name="targets", daemon=True).start()
    try:
        ready = _ready(process, address)
        if process.poll() is None:
            late = "" if ready else f". It has not answered yet (see {log.name})"
            yield f"http://{address}", f"Prometheus runs at http://{address}; its data is in {folder}{late}"
        else:
            yield "", f"Prometheus did not start (see {log.name}): {alone}"
    finally:
        ended.set()
        process.terminate()
        process.wait()
        lock.close()


def _ready(process: subprocess.Popen[bytes], address: str) -> bool:
    until = monotonic_s() + _READY_S
    while process.poll() is None and monotonic_s() < until:
        with suppress(OSError, HTTPException):
            opened(f"http://{address}/-/ready", _ANSWER_S).close()
            return True
        sleep(0.1)
    return False


def _renew(folder: Path, given: Sequence[Path], ended: threading.Event) -> None:
    while not ended.wait(_EVERY_S):
        with suppress(OSError):
            _write(folder, given)


def _write(folder: Path, given: Sequence[Path]) -> None:
    fresh = folder / "targets.json.new"
    fresh.write_text(json.dumps(_targets(given)))
    fresh.replace(folder / "targets.json")


def _targets(given: Sequence[Path]) -> list[Target]:
    """Return the agents of all jobs that have an agent on this machine, in the format of Prometheus' target files."""
    found: list[Target] = []
    with suppress(UsageError):
        for root in run_roots(given):
            port = (RunDirectory(root).agent() or {}).get("metrics_port")
            with suppress(OSError, HTTPException, ValueError):
                if port:
                    with opened(f"http://127.0.0.1:{int(port)}{OWN}", _ANSWER_S) as answer:
                        found += json.load(answer)
    return found
