"""A campaign: the user's command without faults, twice, then with the faults of a plan; and its history."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..resilience.clock import sleep
from ..resilience.errors import MachineError, UserError
from ..resilience.text import formatting
from . import settings
from .judgement import checker, draw, page
from .judgement.history import History, Run
from .judgement.plan import Plan
from .live import leftovers, small_disk
from .live.cluster import etcd_place
from .live.job import Job, incidents, left_out
from .nemesis import registry
from .nemesis.registry import Need
from .nemesis.strike import Nemesis
from .rank import injector
from .runs import LOOK_S, Runs

_LEAST_S = 8.0
"""For how long the training should last for each fault."""
_PATIENT_S, _FAULT_S = 300.0, 120.0
"""How much longer than expected a run may take, before it counts as hung; and how much more with each fault."""
_SNAPSHOTS, _ETCD_BYTES = 12, 256 << 20
"""How many snapshots a small disk holds; and the size of one for the data of each etcd, which takes 128 MiB at once."""


@dataclass(frozen=True)
class Outcome:
    page: str
    violated: tuple[str, ...]
    """The promises that were not kept."""


class Campaign:
    def __init__(self, runs: Runs, say: Callable[[str], None]) -> None:
        self.runs, self.say = runs, say
        self._snapshot_bytes = 0
        self._again: dict[str, Run] = {}
        """Second runs without faults, by the data that they left out and for how long each step was held up."""
        self.plain = self.clean = Run(exit_code=-1)

    @property
    def root(self) -> Path:
        return self.runs.root

    def undisturbed(self) -> None:
        """Run the command under torchrun alone, then under this program. Raises MachineError or UserError if that does not go well."""
        self.say("running the command under torchrun alone")
        self.plain = self.runs.alone("plain")
        if self.plain.exit_code:  # gloo's threads abort one teardown in twenty (torch 2.13)
            self.say(f"it ended with exit code {self.plain.exit_code}; running it once more")
            self.plain = self.runs.alone("plain-again")
        if self.plain.exit_code:
            raise UserError(
                f"the command itself ends with exit code {self.plain.exit_code}, without mt-resilient; no fault was injected. Its output "
                f"is in {self.root / 'plain-again'}"
            )
        self.say(f"it took {self.plain.seconds:.1f} s; running it under mt-resilient, without a fault")
        self.clean = self.runs.undisturbed("clean")
        if self.clean.exit_code:
            apart = "; its nodes had a network without a route out (docs/chaos.md)" if self.runs.namespaces else ""
            raise MachineError(
                f"without any fault, the command ends with exit code {self.clean.exit_code} under mt-resilient; no fault was injected. Its "
                f"output is in {self.root / 'clean'}{apart}"
            )
        found = (self.root / "clean").glob("*/snapshots/*-g*")
        sizes = [sum(file.stat().st_size for file in each.rglob("*") if file.is_file()) for each in found]
        self._snapshot_bytes = max(sizes, default=0)

    def disturbed(self, plan: Plan, name: str = "faults") -> Outcome:
        """Run the command with the faults of the plan. name: of the folder for this run."""
        steps, plan, root = self._steps(), self.settled(plan), self.root / name
        delay_s = draw.delay_s(len(plan.injections), steps, self._trained_s(), _LEAST_S)
        held = f"; each step takes {delay_s:g} s longer, so that all faults strike before the end" if delay_s else ""
        self.say(f"running it with {formatting.count(len(plan.injections), 'fault')}{held}")
        disks = self._disks(root, registry.needs(plan))
        try:
            history, job = self._with_faults(root, plan, delay_s, disks)
        finally:
            self.runs.end()
            for disk in filter(None, disks):
                small_disk.unmount(disk)
        history, findings = self._compared(history, name, job, plan)
        (root / "history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in history.told()))
        text = page.page(history, findings, incidents(job.journal), job.began_wall_s)
        return Outcome(text, checker.violated(findings))

    def _disks(self, root: Path, needs: set[Need]) -> tuple[Path | None, Path | None]:
        """Mount what the faults of the disk need: for the snapshots, and for etcd's data."""
        small, size, device = needs & {Need.ROOT, Need.DEVICE}, _SNAPSHOTS * self._snapshot_bytes, Need.DEVICE in needs
        disk = small_disk.mounted(root / "disk", size, device) if small else None
        place, size = etcd_place(root, self.runs.every), _ETCD_BYTES * self.runs.every
        return disk, small_disk.mounted(place, size, True) if Need.ETCD_DEVICE in needs else None

    def _with_faults(
        self, root: Path, plan: Plan, delay_s: float, disks: tuple[Path | None, Path | None]
    ) -> tuple[History, Job]:
        steps, start_s, clocks = self._steps(), self.clean.start_s, Need.CLOCK in registry.needs(plan)
        watch = leftovers.Watch(self.runs.temporary)
        job = self.runs.job(root, settings.quick(plan, steps, start_s), delay_s, disks, clocks, start_s)
        nemesis = Nemesis(job, plan.injections, registry.FAULTS, self.say)
        limit_s = job.patience_s(_PATIENT_S) + 3 * self.clean.seconds + 3 * delay_s * steps
        limit_s += job.patience_s(_FAULT_S) * len(plan.injections)
        while job.goes_on():
            nemesis.tick(job.look())
            if job.now_s() > limit_s:
                job.unexpected.append(f"the job had not ended after {limit_s:.0f} s, and was killed")
                leftovers.end_everything()
                break
            sleep(LOOK_S)
        nemesis.give_up("the training had ended before")
        job.look()
        code, seconds = job.failed, job.now_s()
        job.cluster.stop_etcd()
        left = watch.left()
        self.runs.end()
        run = self.runs.finished([agent.place for agent in job.agents], code, seconds)
        history = History(
            plain=self.plain,
            clean=self.clean,
            faults=replace(run, left=left),
            struck=tuple(nemesis.struck),
            seen=tuple(job.seen),
            journal=tuple(job.journal),
            unexpected=tuple(job.unexpected),
            damaged=_damaged(job, {each.damaged for each in nemesis.struck}),
            spares=self.runs.spares,
            delay_s=delay_s,
        )
        return history, job

    def _compared(self, history: History, name: str, job: Job, plan: Plan) -> tuple[History, list[checker.Finding]]:
        """Check the history. If data was left out, a run without faults leaves it out, too. If the results differ, find out whether the
        script repeats them: a second run without faults is held up just as the run with faults."""
        spoiled = any(each.fault == injector.SPIKE for each in plan.injections)
        skips = [word for window in left_out(job.journal) for word in ("--skip-data", window)] if spoiled else []
        if skips:
            self.say(f"running it once more without a fault, and without the data that was left out ({skips[-1]})")
            history = replace(history, clean=self.runs.undisturbed(f"{name}-left-out", skips))
            if code := history.clean.exit_code:
                raise MachineError(
                    f"without the data that was left out, the run without faults ended with exit code {code}"
                )
        findings = checker.checked(history)
        if checker.differs(findings) and not history.faults.exit_code:
            self.say("the results differ; running it once more without a fault, to see whether it repeats")
            key = f"{skips} {history.delay_s}"
            if key not in self._again:
                self._again[key] = self.runs.undisturbed(f"{name}-again", skips, history.delay_s)
            if code := self._again[key].exit_code:
                raise MachineError(
                    f"the second run without faults ended with exit code {code}, so nothing can be compared"
                )
            history = replace(history, again=self._again[key])
            findings = checker.checked(history)
        return history, findings

    def settled(self, plan: Plan) -> Plan:
        """Return the plan with each rank, node and step chosen. Raises UserError."""
        runs, kinds = self.runs, registry.kinds(self.runs.every)
        return draw.settled(plan, runs.nodes * runs.ranks, self._steps(), kinds, runs.every)

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


def _damaged(job: Job, on_purpose: set[str]) -> tuple[str, ...]:
    """Return the snapshots that do not verify, and that no fault has damaged."""
    done = _cli("snapshots", "verify", "--run-dir", str(job.agents[0].directory.root))
    lines = (done.stdout + done.stderr).splitlines() if done.returncode and job.on_disk() else []
    bad = [line for line in lines if not line.endswith("every byte read")]
    return tuple(line for line in bad if not any(name and name in line for name in on_purpose))


def _cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mt_resilient", *words], capture_output=True, text=True, check=False)
