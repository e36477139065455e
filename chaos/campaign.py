"""A campaign: the user's command without faults, twice, then with the faults of a plan; and its history."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..agent.launch import rank_count
from ..agent.launch.ports import free_port
from ..agent.launch.torchrun import understand
from ..agent.run_directory import RunDirectory
from ..checkpoint.durable import catalog
from ..resilience.clock import monotonic_s, sleep
from ..resilience.errors import MachineError, SnapshotError, UserError
from ..resilience.inprocess.tally import COURSE, RANDOMNESS
from ..resilience.text import formatting
from . import settings
from .judgement import checker, draw, page
from .judgement.history import History, Run
from .judgement.plan import Plan
from .live import clock, leftovers, small_disk
from .live.agent import Agent, Place
from .live.cluster import Cluster, etcd_place
from .live.job import Job, failed, incidents, left_out
from .nemesis import registry
from .nemesis.registry import Need
from .nemesis.strike import Nemesis
from .rank import injector

_SITE = str(Path(__file__).parent / "site")
_RUN = "{run}"
"""In the user's command, this stands for a folder of each run's own."""
_LOOK_S = 0.02
_LEAST_S = 8.0
"""For how long the training should last for each fault."""
_PATIENT_S = 300.0
"""How much longer than expected a run may take, before it counts as hung."""
_FAULT_S = 120.0
_SNAPSHOTS, _ETCD_BYTES = 12, 256 << 20
"""How many snapshots a small disk holds; and the size of one for the data of each etcd, which takes 128 MiB at once."""


@dataclass(frozen=True)
class Outcome:
    page: str
    violated: tuple[str, ...]
    """The promises that were not kept."""


class Campaign:
    def __init__(
        self,
        root: Path,
        launch: Sequence[str],
        options: Sequence[str],
        say: Callable[[str], None],
        nodes: int = 1,
        namespaces: bool = False,
        spares: int = 0,
    ) -> None:
        """root: an empty folder for all files. launch: the user's command. options: further ones of `mt-resilient run`. nodes: on how many
        nodes each run is played. namespaces: whether these have a network of their own under mt-resilient. spares: nodes that stand by."""
        self.root, self._launch, self._options, self.say, self.nodes = root, launch, options, say, nodes
        self.spares, self._every = spares, nodes + spares
        self._several = settings.several(self._every)
        self._namespaces, self._snapshot_bytes = namespaces, 0
        self._ranks = rank_count.counted(understand(launch, os.environ), os.environ).ranks
        self._cluster: Cluster | None = None
        """What the present run's nodes share."""
        self.temporary = Path(tempfile.mkdtemp(prefix="mt-chaos-"))
        self._usual: list[str] = []
        """Temporary files that a run without faults leaves."""
        self._again: dict[str, Run] = {}
        """Second runs without faults, by the data that they left out."""
        self.plain = self.clean = Run(exit_code=-1)

    def undisturbed(self) -> None:
        """Run the command under torchrun alone, then under this program. Raises MachineError or UserError if that does not go well."""
        self.say("running the command under torchrun alone")
        self.plain = self._alone("plain")
        if self.plain.exit_code:  # gloo's threads abort one teardown in twenty (torch 2.13)
            self.say(f"it ended with exit code {self.plain.exit_code}; running it once more")
            self.plain = self._alone("plain-again")
        if self.plain.exit_code:
            raise UserError(
                f"the command itself ends with exit code {self.plain.exit_code}, without mt-resilient; no fault was injected. Its output "
                f"is in {self.root / 'plain-again'}"
            )
        self.say(f"it took {self.plain.seconds:.1f} s; running it under mt-resilient, without a fault")
        self.clean = self._undisturbed("clean")
        if self.clean.exit_code:
            apart = "; its nodes had a network without a route out (docs/chaos.md)" if self._namespaces else ""
            raise MachineError(
                f"without any fault, the command ends with exit code {self.clean.exit_code} under mt-resilient; no fault was injected. Its "
                f"output is in {self.root / 'clean'}{apart}"
            )
        self._usual = os.listdir(self.temporary)
        found = (self.root / "clean").glob("*/snapshots/*-g*")
        sizes = [sum(file.stat().st_size for file in each.rglob("*") if file.is_file()) for each in found]
        self._snapshot_bytes = max(sizes, default=0)

    def disturbed(self, plan: Plan, name: str = "faults") -> Outcome:
        """Run the command with the faults of the plan. name: of the folder for this run."""
        steps, plan, root = self._steps(), self.settled(plan), self.root / name
        (root / "orders").mkdir(parents=True)
        delay_s = draw.delay_s(len(plan.injections), steps, self._trained_s(), _LEAST_S)
        held = f"; each step takes {delay_s:g} s longer, so that all faults strike before the end" if delay_s else ""
        self.say(f"running it with {formatting.count(len(plan.injections), 'fault')}{held}")
        needs = registry.needs(plan)
        small, size = needs & {Need.ROOT, Need.DEVICE}, _SNAPSHOTS * self._snapshot_bytes
        disk = small_disk.mounted(root / "disk", size, Need.DEVICE in needs) if small else None
        place, size = etcd_place(root, self._every), _ETCD_BYTES * self._every
        etcd_disk = small_disk.mounted(place, size, True) if Need.ETCD_DEVICE in needs else None
        shared, disks = leftovers.shared_files(), (disk, etcd_disk)
        job = self._job(root, [*settings.quick(plan, steps), *self._several], delay_s, disks, Need.CLOCK in needs)
        nemesis = Nemesis(job, plan.injections, registry.FAULTS, self.say)
        limit_s = _PATIENT_S + 3 * self.clean.seconds + 3 * delay_s * steps + _FAULT_S * len(plan.injections)
        while job.goes_on():
            nemesis.tick(job.look())
            if job.now_s() > limit_s:
                job.unexpected.append(f"the job had not ended after {limit_s:.0f} s, and was killed")
                leftovers.end_everything()
                break
            sleep(_LOOK_S)
        nemesis.give_up("the training had ended before")
        job.look()
        code, seconds = job.failed, job.now_s()
        job.cluster.stop_etcd()
        left = leftovers.left_over(shared, self.temporary, self._usual)
        self._end()
        run = self._finished([agent.place for agent in job.agents], code, seconds)
        history = History(
            plain=self.plain,
            clean=self.clean,
            faults=run,
            struck=tuple(nemesis.struck),
            seen=tuple(job.seen),
            journal=tuple(job.journal),
            unexpected=tuple(job.unexpected),
            left_over=left,
            damaged=self._damaged(job, {each.damaged for each in nemesis.struck}),
            spares=self.spares,
        )
        spoiled = any(each.fault == injector.SPIKE for each in plan.injections)
        skips = [word for window in left_out(job.journal) for word in ("--skip-data", window)] if spoiled else []
        if skips:
            self.say(f"running it once more without a fault, and without the data that was left out ({skips[-1]})")
            history = replace(history, clean=self._undisturbed(f"{name}-left-out", skips))
            if code := history.clean.exit_code:
                raise MachineError(
                    f"without the data that was left out, the run without faults ended with exit code {code}"
                )
        findings = checker.checked(history)
        if self.clean.digest and not checker.repeats(history.clean, run) and not run.exit_code:
            self.say("the results differ; running it once more without a fault, to see whether it repeats")
            self._again[str(skips)] = self._again.get(str(skips)) or self._undisturbed(f"{name}-again", skips)
            history = replace(history, again=self._again[str(skips)])
            findings = checker.checked(history)
        (root / "history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in history.told()))
        return Outcome(
            page.page(history, findings, incidents(job.journal), job.began_wall_s), checker.violated(findings)
        )

    def settled(self, plan: Plan) -> Plan:
        """Return the plan with each rank, node and step chosen. Raises UserError."""
        return draw.settled(plan, self.nodes * self._ranks, self._steps(), registry.kinds(self._every), self._every)

    def close(self) -> None:
        """End all processes, and delete the temporary files."""
        self._end()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _end(self) -> None:
        if self._cluster:
            self._cluster.thaw()
        leftovers.end_everything()
        if self._cluster:
            self._cluster.close()
            self._cluster = None

    # -- one run --------------------------------------------------------------------------------------------------------

    def _job(
        self,
        root: Path,
        options: Sequence[str],
        delay_s: float,
        disks: tuple[Path | None, Path | None] = (None, None),
        clocks: bool = False,
    ) -> Job:
        """Start the command under mt-resilient, on all nodes. delay_s: for which each step is held up. disks: for the snapshots, and for
        etcd's data, if they have one of their own. clocks: whether faults set them."""
        disk, etcd_disk = disks
        nodes = self.nodes, self.spares
        self._cluster = Cluster(root, *nodes, namespaces=self._namespaces, disk=disk, etcd_disk=etcd_disk)
        library = clock.built(root) if clocks else None
        agents = []
        for name in self._cluster.names:
            place = Place(root / name)
            place.root.mkdir(parents=True, exist_ok=True)
            run = [*self._cluster.options(root, name), *options, *self._options, "--", *self._words(root)]
            environ = self._environment() | self._cluster.environment(name)
            if (root / "orders").exists():
                environ[injector.VARIABLE] = json.dumps(
                    {"folder": str((root / "orders").absolute()), "delay_s": delay_s}
                )
                environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SITE, environ.get("PYTHONPATH"))))
            environ |= clock.variables(library, place.clock) if library else {}
            inside = self._cluster.hosts.inside(name)
            agents.append(Agent(name, place, [*inside, sys.executable, "-m", "mt_resilient", "run", *run], environ))
        return Job(root, agents, self._cluster, self._ranks * self.nodes)

    def _words(self, root: Path) -> list[str]:
        return [word.replace(_RUN, str(root / "own")) for word in self._launch]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}

    def _alone(self, name: str) -> Run:
        """Run the command under torchrun alone, once for each node."""
        root = self.root / name
        words, environ = self._words(root), self._environment()
        commands = {"": words}
        if self.nodes > 1:
            launch, port = replace(understand(words, os.environ), ranks=self._ranks), free_port()
            meet = {"nodes": self.nodes, "master_addr": "127.0.0.1", "master_port": port, "run": "chaos"}
            each = {f"n{at + 1}": launch.arguments(node_rank=at, **meet) for at in range(self.nodes)}  # type: ignore[arg-type]
            commands = {node: [*launch.program, *arguments] for node, arguments in each.items()}
            environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        began_s = monotonic_s()
        places = {node: Place(root / node) for node in commands}
        processes = [places[node].start(command, environ) for node, command in commands.items()]
        while not (code := failed(processes)) and None in [process.poll() for process in processes]:
            sleep(_LOOK_S)
        if code:  # the other nodes may wait for the one that has failed
            leftovers.end_everything()
        return self._finished([*places.values()], code, monotonic_s() - began_s)

    def _undisturbed(self, name: str, options: Sequence[str] = ()) -> Run:
        """Run the command under mt-resilient, without a fault."""
        job = self._job(self.root / name, [*self._several, *options], 0.0)
        while job.goes_on() and not job.failed:
            sleep(_LOOK_S)
        code, seconds = job.failed, job.now_s()
        run = self._finished([agent.place for agent in job.agents], code, seconds)
        self._end()
        return run

    def _finished(self, places: Sequence[Place], code: int, seconds: float) -> Run:
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

    def _steps(self) -> int:
        if self.clean.step < 1:
            raise UserError(
                "the script reports no steps (it has no Session, and no loop that mt-resilient knows), so faults cannot strike at one; no "
                "fault was injected. docs/session.md says how to add a Session"
            )
        return self.clean.step

    def _trained_s(self) -> float:
        """Return how long the ranks of the run without faults trained."""
        files = (self.root / "clean").rglob("journal.jsonl")
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        spent = [line["spent"].get("training", 0.0) for line in lines if line["kind"] == "progress"]
        return max(spent, default=0.0)

    def _damaged(self, job: Job, on_purpose: set[str]) -> tuple[str, ...]:
        """Return the snapshots that do not verify, and that no fault has damaged."""
        done = _cli("snapshots", "verify", "--run-dir", str(job.agents[0].directory.root))
        lines = (done.stdout + done.stderr).splitlines() if done.returncode and job.on_disk() else []
        bad = [line for line in lines if not line.endswith("every byte read")]
        return tuple(line for line in bad if not any(name and name in line for name in on_purpose))


def _cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mt_resilient", *words], capture_output=True, text=True, check=False)
