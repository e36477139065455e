"""`run --hostfile`: reads the hosts, starts an etcd if none is named, and starts an agent on each host.

The launching process holds the run directory's lock, runs its etcd, and writes its `endpoint` file. Node N uses the folder `nodes/N` in
that directory, on the node's own disk or on a shared one. All nodes use one place (a directory or object store) for the snapshots.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...checkpoint.backend import place as stores
from ...checkpoint.durable.save_interval import SnapshotPolicy
from ...resilience.clock import wall_s
from ...resilience.errors import MachineError, ResilientError, UsageError
from ...resilience.membership.rank_assignment import sizes
from ...resilience.model.generation import GenerationRecord
from ...resilience.report.journal import Journal
from ...resilience.store.codec import loads
from ...resilience.store.etcd.access import Papers
from ...resilience.store.etcd.client import EtcdStore
from ...resilience.store.keys import Keys
from ...resilience.text import formatting
from ..etcd.revival import Revival
from ..etcd.server import started
from ..join.registration import forget_leaving
from ..launch import scheduler_env
from ..launch.ports import address_towards
from ..launch.torchrun import Launch
from ..output.terminal import Recorded, Terminal
from ..run_directory import RunDirectory
from . import ssh
from .hostfile import Host, alike, parse
from .ssh import SshLaunch, Start

EXPORTED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "LANG",
    "LC_ALL",
    "TZ",
    "ACCELERATOR_BACKEND",
)
EXPORTED_PREFIXES = ("CUDA_", "GLOO_", "HF_", "MCCL_", "MKL_", "MTHREADS_", "MT_RESILIENT_", "MUDNN_", "MUSA_", "NCCL_", "NVTE_", "OMP_",
                     "PYTHON", "PYTORCH_", "TORCH", "TRITON_", "UCX_")  # fmt: skip
"""Environment variables that the agents get from this terminal. The agents get all other variables from ssh on their own host. `--export
NAME` adds a variable."""
_RESOLVE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The command line's settings for a launch with `--hostfile`."""

    hostfile: Path
    ssh_options: tuple[str, ...] = ()
    """Options for `ssh -o`."""
    export: tuple[str, ...] = ()
    """Names of further environment variables that the agents get."""
    endpoints: str = ""
    """Endpoints of a running etcd; empty: start an etcd."""
    papers: Papers
    """Paths of the certificates and password file that this terminal's commands use for that etcd."""
    nodes: str = ""
    """Number of nodes, as in `--nodes`. Empty: torchrun's `--nnodes`, or all hosts except the spares."""
    spares: int = 0
    job: str = ""
    """Name of the job. Empty: name it after the run directory."""
    snapshots: str = ""
    """Place for the snapshots. Empty: the run directory."""
    kept: SnapshotPolicy = field(default_factory=SnapshotPolicy)
    """Settings for snapshots. The endpoint and region in it select the object store."""
    ending_s: float
    """Seconds that an agent may take to exit after its connection is gone."""
    words: tuple[str, ...] = ()
    """Options of `run` as the user gave them. Each agent gets them too."""


def launch_on_hosts(wanted: Wanted, launch: Launch, command: Sequence[str], directory: Path, terminal: Terminal) -> int:
    """Start the agents, wait until all have exited, and return the job's exit code. Raises ResilientError if the job cannot start."""
    hosts = _hosts(wanted.hostfile)
    nodes, spares = seats(wanted, launch, len(hosts))
    environment = exported(os.environ, wanted.export)
    run = RunDirectory(directory)
    with ExitStack() as stack:
        run.take()
        stack.callback(run.release)
        if run.finished.exists():
            raise UsageError(f"the run in {run.root} is finished; name another directory with --run-dir to train anew")
        journal = Journal(run.journal)
        terminal = Recorded(terminal, journal)
        _slots_told(hosts, launch.ranks, terminal)
        endpoints, watch = _etcd(wanted, hosts, run, terminal, stack)
        job = wanted.job or named_after(run.root.name, _identity(run))
        if not wanted.endpoints:
            with suppress(ResilientError), closing(EtcdStore([endpoints])) as store:
                # An earlier launch may have requested that its agents exit, when its terminal was killed.
                forget_leaving(store, Keys(job))
        place = stores.at(stores.address(wanted.snapshots or str(run.root), wanted.kept.endpoint, wanted.kept.region))
        journal.write("start", wall_s(), command=list(command), snapshots=place.address, pid=os.getpid())
        run.publish(job, endpoints.split(","), wanted.papers)
        terminal.say(
            f"job {job}: an agent on each of {formatting.count(len(hosts), 'host')}, etcd at {endpoints}; everything "
            f"about it in {run.root}",
            wall_s(),
        )

        def agent(host: Host) -> list[str]:
            fixed = ["--node", host.node, "--nodes", nodes, "--spares", str(spares), "--job", job, "--etcd", endpoints]
            places = [
                "--run-dir",
                str(run.root / "nodes" / host.node),
                "--snapshots",
                wanted.snapshots or str(run.root),
            ]
            said = [word for key, value in host.labels.items() for word in ("--label", f"{key}={value}")]
            run_here = [sys.executable, "-P", "-m", "mt_resilient", "run"]
            return [*run_here, *wanted.words, *fixed, *said, *places, "--", *command]

        def last() -> GenerationRecord | None:
            with closing(EtcdStore(endpoints.split(","), access=wanted.papers.access(os.environ))) as store:
                entry = store.get(Keys(job).generation)
                return loads(GenerationRecord, entry.value) if entry else None

        begun = Begun(last)
        least = min(sizes(nodes))
        start = Start(wanted.ssh_options, agent, environment)
        code = SshLaunch(hosts, start, least, wanted.ending_s, terminal, watch, begun).run()
        complete = False
        with suppress(ResilientError):
            record = last()
            complete = record is not None and record.complete
        if complete:
            run.finished.touch()
        how = "is complete" if complete else "has not reached its end"
        terminal.say(f"the launch has ended with code {code}: the training {how}", wall_s())
        journal.write("end", wall_s(), code=code)
        return code


def _etcd(
    wanted: Wanted, hosts: Sequence[Host], run: RunDirectory, terminal: Terminal, stack: ExitStack
) -> tuple[str, Callable[[], None]]:
    """Return the endpoints of the etcd that the user named, or of an etcd started here. Also return a function that restarts an etcd that
    was started here, if it dies."""
    if wanted.endpoints:
        return wanted.endpoints, lambda: None
    server, endpoint = started(run, terminal, stack, reachable(hosts, wanted.ssh_options))
    return endpoint, Revival(server, endpoint, set(), lambda sentence, mood: terminal.say(sentence, wall_s(), mood))


def seats(wanted: Wanted, launch: Launch, hosts: int) -> tuple[str, int]:
    """Return how many nodes train, as in `--nodes`, and how many are spares. Raises UsageError."""
    if not wanted.nodes:
        return scheduler_env.reconciled(launch.nodes, wanted.spares, hosts, "the hostfile has"), wanted.spares
    numbers = sizes(wanted.nodes)
    if min(numbers) + wanted.spares > hosts:
        spares = f" and --spares {wanted.spares}" if wanted.spares else ""
        raise UsageError(
            f"--nodes {wanted.nodes}{spares}: the hostfile has {formatting.count(hosts, 'host')}; nothing was started. "
            f"Name more hosts in it{', or ask for fewer spares' if spares else ''}"
        )
    return wanted.nodes, wanted.spares or max(0, hosts - max(numbers))


def _slots_told(hosts: Sequence[Host], ranks: int, terminal: Terminal) -> None:
    """Warn if the hostfile's `slots` differ from `ranks`: the number of ranks per node in the command; 0: each host counts them."""
    slots = max(host.slots for host in hosts)
    if slots and ranks and slots != ranks:
        terminal.say(
            f"the hostfile gives slots={slots}, and by the command a node has {formatting.count(ranks, 'rank')}: slots is ignored, "
            "and --nproc-per-node decides",
            wall_s(),
            "warn",
        )


def exported(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the environment variables for the agents. Raises UsageError if a variable in `names` is not set here."""
    for name in names:
        if name not in environ:
            raise UsageError(f"--export {name}: there is no such variable here; nothing was started")
    return {
        name: value
        for name, value in environ.items()
        if name in EXPORTED or name in names or name.startswith(EXPORTED_PREFIXES)
    }


def reachable(hosts: Sequence[Host], options: Sequence[str]) -> str:
    """Return this machine's IPv4 address on the route to the hosts. If routes use several addresses, return the one that leads to the most
    hosts. Raises MachineError."""
    found = Counter(_address_towards(host, options) for host in hosts)
    others = {address: count for address, count in found.items() if not address.startswith("127.")}
    return max(others or found, key=lambda address: found[address])


def _address_towards(host: Host, options: Sequence[str]) -> str:
    """Return this machine's address on the route to `host`. ssh resolves its own aliases."""
    asked = [*ssh.command(host, options), "-G", host.host]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=_RESOLVE_S, check=True).stdout
        name = next((line.split()[1] for line in told.splitlines() if line.startswith("hostname ")), host.host)
        return address_towards(name, 9, socket.AF_INET)
    except subprocess.CalledProcessError as error:
        words = ssh.last_words(error.stderr.splitlines()) or f"it ended with code {error.returncode}"
        raise UsageError(
            f"ssh refuses its options for {host.node} ({words}); nothing was started. Correct --ssh-option, or ssh's configuration"
        ) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineError(
            f"this machine finds no route to {host.node} ({error}), so it cannot choose an address for its own etcd; nothing was started. "
            "Name an etcd that all hosts reach, with --etcd HOST:PORT"
        ) from error


def _hosts(file: Path) -> tuple[Host, ...]:
    try:
        hosts = parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the hostfile {file} cannot be read ({error}); nothing was started") from error
    alike(hosts)
    return hosts


def named_after(folder: str, identity: str) -> str:
    """Return a name for a job to which the user gave no name."""
    return re.sub(r"[^\w.:@-]", "_", f"{folder}-{identity}", flags=re.ASCII)


def _identity(run: RunDirectory) -> str:
    """Return eight hexadecimal digits, which are the same for each launch from this run directory, and differ between run directories."""
    file = run.root / "launch"
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    return file.read_text()[:8]


class Begun:
    """Tells whether the job has begun since this object was created: there is a new generation. The result is also True while etcd does not
    answer, because the job may have begun."""

    def __init__(self, last: Callable[[], GenerationRecord | None]) -> None:
        """last: returns the newest generation's record, or raises ResilientError if etcd does not answer."""
        self._last = last
        self._before = self._number()

    def __call__(self) -> bool:
        return (now := self._number()) != self._before or now is None

    def _number(self) -> int | None:
        """Return the number of the newest generation; 0: there is no generation yet; None: etcd does not answer."""
        with suppress(ResilientError):
            record = self._last()
            return record.number if record else 0
        return None
