"""Plays the user's command once: under torchrun alone, or under `mt-resilient run`; and what came of it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..agent.launch import rank_count
from ..agent.launch.ports import free_port
from ..agent.launch.torchrun import understand
from ..agent.run_directory import RunDirectory
from ..checkpoint.durable import catalog
from ..resilience.clock import monotonic_s, sleep
from ..resilience.errors import SnapshotError
from ..resilience.inprocess.tally import COURSE, RANDOMNESS
from . import settings
from .judgement import pace
from .judgement.history import Run
from .live import clock, leftovers
from .live.agent import Agent, Place
from .live.cluster import Cluster
from .live.job import Job, failed
from .rank import injector

_SITE = str(Path(__file__).parent / "site")
_RUN = "{run}"
"""In the user's command, this stands for a folder of each run's own."""
LOOK_S = 0.02


class Runs:
    def __init__(
        self,
        root: Path,
        launch: Sequence[str],
        options: Sequence[str] = (),
        nodes: int = 1,
        namespaces: bool = False,
        spares: int = 0,
    ) -> None:
        """root: an empty folder for all files. launch: the user's command. options: further ones of `mt-resilient run`. nodes: on how many
        nodes each run is played. namespaces: whether these have a network of their own under mt-resilient. spares: nodes that stand by."""
        self.root, self.launch, self.options, self.nodes = root, launch, options, nodes
        self.spares, self.every = spares, nodes + spares
        self.namespaces = namespaces
        self.ranks = rank_count.counted(understand(launch, os.environ), os.environ).ranks
        """Of each node."""
        self.temporary = Path(tempfile.mkdtemp(prefix="mt-chaos-"))
        self._cluster: Cluster | None = None
        """What the present run's nodes share."""

    def close(self) -> None:
        """End all processes, and delete the temporary files."""
        self.end()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def end(self) -> None:
        """End all processes of the present run."""
        if self._cluster:
            self._cluster.thaw()
        leftovers.end_everything()
        if self._cluster:
            self._cluster.close()
            self._cluster = None

    def alone(self, name: str) -> Run:
        """Run the command under torchrun alone, once for each node."""
        root, watch = self.root / name, leftovers.Watch(self.temporary)
        words, environ = self._words(root), self._environment()
        commands = {"": words}
        if self.nodes > 1:
            launch, port = replace(understand(words, os.environ), ranks=self.ranks), free_port()
            meet = {"nodes": self.nodes, "master_addr": "127.0.0.1", "master_port": port, "run": "chaos"}
            each = {f"n{at + 1}": launch.arguments(node_rank=at, **meet) for at in range(self.nodes)}  # type: ignore[arg-type]
            commands = {node: [*launch.program, *arguments] for node, arguments in each.items()}
            environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        began_s = monotonic_s()
        places = {node: Place(root / node) for node in commands}
        processes = [places[node].start(command, environ) for node, command in commands.items()]
        while not (code := failed(processes)) and None in [process.poll() for process in processes]:
            sleep(LOOK_S)
        seconds = monotonic_s() - began_s
        left = () if code else watch.left()
        leftovers.end_everything()  # the other nodes may wait for the one that has failed
        return replace(self.finished([*places.values()], code, seconds), left=left)

    def undisturbed(self, name: str, options: Sequence[str] = (), delay_s: float | None = None) -> Run:
        """Run the command under mt-resilient, without a fault. delay_s: for which each step is held up, by the injector of the run with
        faults; None: without it."""
        watch = leftovers.Watch(self.temporary)
        job = self.job(self.root / name, options, delay_s)
        while job.goes_on() and not job.failed:
            job.look()
            sleep(LOOK_S)
        code, seconds = job.failed, job.now_s()
        job.cluster.stop_etcd()
        left = () if code else watch.left()
        run = self.finished([agent.place for agent in job.agents], code, seconds)
        self.end()
        return replace(run, left=left, start_s=pace.started_s(job.seen), pause_s=pace.usual_pause_s(job.seen))

    def job(
        self,
        root: Path,
        options: Sequence[str],
        delay_s: float | None,
        disks: tuple[Path | None, Path | None] = (None, None),
        clocks: bool = False,
        start_s: float = 0.0,
    ) -> Job:
        """Start the command under mt-resilient, on all nodes. delay_s: for which each step is held up; None: the ranks have no injector.
        disks: for the snapshots, and for etcd's data, if they have one of their own. clocks: whether faults set them. start_s: how long
        the run without faults took to its first step."""
        more = [*settings.several(self.every), *options, *self.options]
        environ = self._environment()
        if delay_s is not None:
            orders = root / "orders"
            orders.mkdir(parents=True)
            environ[injector.VARIABLE] = json.dumps({"folder": str(orders.absolute()), "delay_s": delay_s})
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SITE, environ.get("PYTHONPATH"))))
        disk, etcd_disk = disks
        nodes = self.nodes, self.spares
        self._cluster = Cluster(root, *nodes, namespaces=self.namespaces, disk=disk, etcd_disk=etcd_disk)
        library = clock.built(root) if clocks else None
        agents = []
        for name in self._cluster.names:
            place = Place(root / name)
            place.root.mkdir(parents=True, exist_ok=True)
            run = [*self._cluster.options(root, name), *more, "--", *self._words(root)]
            own = environ | self._cluster.environment(name)
            own |= clock.variables(library, place.clock) if library else {}
            inside = self._cluster.hosts.inside(name)
            agents.append(Agent(name, place, [*inside, sys.executable, "-m", "mt_resilient", "run", *run], own))
        return Job(root, agents, self._cluster, self.ranks * self.nodes, start_s)

    def finished(self, places: Sequence[Place], code: int, seconds: float) -> Run:
        """Return what came of a run. code: its exit code."""
        run = Run(exit_code=code, lines=tuple(line for place in places for line in place.lines()), seconds=seconds)
        if not (places[0].run / "journal.jsonl").exists():
            return run
        root = RunDirectory(places[0].run).kept()
        for newest in catalog.look(root).durable:
            with suppress(SnapshotError):  # of a job that has failed, a fault may have damaged the newest
                # A generator that the script has not seeded differs from run to run; a seeded one shows in the parameters.
                digest = catalog.digest(newest.under(root), exclude=[f"{COURSE}/", f"{RANDOMNESS}/"])
                return replace(run, digest=digest, step=newest.stamp.step)
        return run

    def _words(self, root: Path) -> list[str]:
        """Return the user's command. The folder that {run} stands for exists then."""
        own = root / "own"
        if any(_RUN in word for word in self.launch):
            own.mkdir(parents=True, exist_ok=True)
        return [word.replace(_RUN, str(own)) for word in self.launch]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
