"""A campaign: the user's command without faults, twice, then with the faults of a plan; and its history."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..agent.run_directory import RunDirectory
from ..checkpoint.durable import catalog
from ..resilience.clock import monotonic_s, sleep
from ..resilience.errors import MachineError, UserError
from ..resilience.inprocess.tally import COURSE, RANDOMNESS
from ..resilience.text import formatting
from .judgement import checker, draw, page
from .judgement.history import History, Run
from .judgement.plan import Plan
from .live import leftovers, small_disk
from .live.job import Job, Place, incidents
from .nemesis import registry
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
_WAITS = {"hang.floor_s": "5", "hang.confirm_s": "2", "hang.idle_s": "8", "hang.busy_s": "15", "hang.teardown_s": "20"}
"""A campaign does not wait for minutes before it calls a silence a hang, as a training may."""


@dataclass(frozen=True)
class Outcome:
    page: str
    violated: tuple[str, ...]
    """The promises that were not kept."""


class Campaign:
    def __init__(self, root: Path, launch: Sequence[str], options: Sequence[str], say: Callable[[str], None]) -> None:
        """root: an empty folder for all files. launch: the user's command. options: further ones of `mt-resilient run`."""
        self.root, self._launch, self._options, self.say = root, launch, options, say
        self.temporary = Path(tempfile.mkdtemp(prefix="mt-chaos-"))
        self._usual: list[str] = []
        """Temporary files that a run without faults leaves."""
        self._snapshot_bytes = 0
        self.plain = self.clean = Run(exit_code=-1)

    def undisturbed(self) -> None:
        """Run the command under torchrun alone, then under this program. Raises MachineError or UserError if that does not go well."""
        self.say("running the command under torchrun alone")
        self.plain = self._undisturbed("plain", self._words("plain"))
        if self.plain.exit_code:  # gloo's threads abort one teardown in twenty (torch 2.13)
            self.say(f"it ended with exit code {self.plain.exit_code}; running it once more")
            self.plain = self._undisturbed("plain-again", self._words("plain-again"))
        if self.plain.exit_code:
            raise UserError(
                f"the command itself ends with exit code {self.plain.exit_code}, without mt-resilient; no fault was injected. Its output "
                f"is in {self.root / 'plain-again'}"
            )
        self.say(f"it took {self.plain.seconds:.1f} s; running it under mt-resilient, without a fault")
        self.clean = self._undisturbed("clean", self._ours("clean"))
        if self.clean.exit_code:
            raise MachineError(
                f"without any fault, the command ends with exit code {self.clean.exit_code} under mt-resilient; no fault was injected. Its "
                f"output is in {self.root / 'clean'}"
            )
        self._usual = os.listdir(self.temporary)
        run = self.root / "clean" / "run" / "snapshots"
        sizes = [sum(file.stat().st_size for file in each.rglob("*") if file.is_file()) for each in run.glob("*-g*")]
        self._snapshot_bytes = max(sizes, default=0)

    def disturbed(self, plan: Plan, ranks: int, name: str = "faults") -> Outcome:
        """Run the command with the faults of the plan. name: of the folder for this run."""
        steps = self._steps()
        plan = self.settled(plan, ranks)
        place = Place(self.root / name)
        orders = place.root / "orders"
        orders.mkdir(parents=True)
        delay_s = draw.delay_s(len(plan.injections), steps, self._trained_s(), _LEAST_S)
        held = f"; each step takes {delay_s:g} s longer, so that all faults strike before the end" if delay_s else ""
        self.say(f"running it with {formatting.count(len(plan.injections), 'fault')}{held}")
        small = any(registry.FAULTS[each.fault].root for each in plan.injections)
        disk = small_disk.mounted(place.root / "disk", self._snapshot_bytes) if small else None
        shared = leftovers.shared_files()
        further = [*self._quick(plan, steps), *(["--snapshots", str(disk)] if disk else [])]
        job = Job(place, self._ours(name, *further), self._environment(orders, delay_s), orders)
        job.disk = disk
        nemesis = Nemesis(job, plan.injections, registry.FAULTS, self.say)
        limit_s = _PATIENT_S + 3 * self.clean.seconds + 3 * delay_s * steps + _FAULT_S * len(plan.injections)
        while job.agent.poll() is None:
            nemesis.tick(job.look())
            if job.now_s() > limit_s:
                job.unexpected.append(f"the job had not ended after {limit_s:.0f} s, and was killed")
                leftovers.end_everything()
                break
            sleep(_LOOK_S)
        nemesis.give_up("the training had ended before")
        job.look()
        code, seconds = job.agent.wait(), job.now_s()
        left = leftovers.left_over(shared, self.temporary, self._usual)
        leftovers.end_everything()
        run = self._finished(place, code, seconds)
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
        )
        findings = checker.checked(history)
        if self.clean.digest and not checker.repeats(self.clean, run) and not run.exit_code:
            self.say("the results differ; running it once more without a fault, to see whether it repeats")
            folder = f"{name}-again"
            history = replace(history, again=self._undisturbed(folder, self._ours(folder)))
            findings = checker.checked(history)
        _write(place.root / "history.jsonl", history)
        text = page.page(history, findings, incidents(job.journal), job.began_wall_s)
        return Outcome(text, checker.violated(findings))

    def settled(self, plan: Plan, ranks: int) -> Plan:
        """Return the plan with each rank and step chosen. Raises UserError."""
        return draw.settled(plan, ranks, self._steps(), registry.kinds())

    def close(self) -> None:
        """End all processes, and delete the temporary files."""
        leftovers.end_everything()
        shutil.rmtree(self.temporary, ignore_errors=True)

    # -- one run --------------------------------------------------------------------------------------------------------

    def _ours(self, name: str, *options: str) -> list[str]:
        run = ["--run-dir", str(self.root / name / "run"), "--metrics-port", "0"]
        return [sys.executable, "-m", "mt_resilient", "run", *run, *options, *self._options, "--", *self._words(name)]

    def _words(self, name: str) -> list[str]:
        return [word.replace(_RUN, str(self.root / name / "own")) for word in self._launch]

    def _environment(self, orders: Path | None = None, delay_s: float = 0.0) -> dict[str, str]:
        environ = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        if orders:
            environ[injector.VARIABLE] = json.dumps({"folder": str(orders.absolute()), "delay_s": delay_s})
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SITE, environ.get("PYTHONPATH"))))
        return environ

    def _undisturbed(self, name: str, command: Sequence[str]) -> Run:
        place = Place(self.root / name)
        began_s = monotonic_s()
        process = place.start(command, self._environment())
        code = process.wait()
        return self._finished(place, code, monotonic_s() - began_s)

    def _finished(self, place: Place, code: int, seconds: float) -> Run:
        run = Run(exit_code=code, lines=place.lines(), seconds=seconds)
        if not (place.run / "journal.jsonl").exists():
            return run
        root = RunDirectory(place.run).kept()
        newest = next(iter(catalog.look(root).durable), None)
        if newest is None:
            return run
        # A generator that the script has not seeded differs from run to run; a seeded one shows in the parameters.
        digest = catalog.digest(newest.under(root), exclude=[f"{COURSE}/", f"{RANDOMNESS}/"])
        return replace(run, digest=digest, step=newest.stamp.step)

    def _steps(self) -> int:
        if self.clean.step < 1:
            raise UserError(
                "the script reports no steps (it has no Session, and no loop that mt-resilient knows), so faults cannot strike at one; no "
                "fault was injected. docs/session.md says how to add a Session"
            )
        return self.clean.step

    def _trained_s(self) -> float:
        """Return how long the ranks of the run without faults trained."""
        lines = [json.loads(line) for line in (self.root / "clean" / "run" / "journal.jsonl").read_text().splitlines()]
        spent = [line["spent"].get("training", 0.0) for line in lines if line["kind"] == "progress"]
        return max(spent, default=0.0)

    def _quick(self, plan: Plan, steps: int) -> list[str]:
        budget = 3 + 2 * len(plan.injections)
        budgets = dict.fromkeys(("recovery.max_without_progress", "recovery.max_mismatches"), str(budget))
        flags = {**_WAITS, **budgets, "snapshots.durable_every_steps": str(max(1, steps // 10))}
        return [word for key, value in flags.items() for word in ("--set", f"{key}={value}")]

    def _damaged(self, job: Job, on_purpose: set[str]) -> tuple[str, ...]:
        """Return the snapshots that do not verify, and that no fault has damaged."""
        done = _cli("snapshots", "verify", "--run-dir", str(job.directory.root))
        lines = (done.stdout + done.stderr).splitlines() if done.returncode and job.on_disk() else []
        bad = [line for line in lines if not line.endswith("every byte read")]
        return tuple(line for line in bad if not any(name and name in line for name in on_purpose))


def _cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mt_resilient", *words], capture_output=True, text=True, check=False)


def _write(file: Path, history: History) -> None:
    """Write what was done and seen, a line each."""
    lines = [
        {"did": each.did or each.why_not, "fault": str(each.injection), "at_s": each.at_s} for each in history.struck
    ]
    lines += [{"seen": {"at_s": s.at_s, "generation": s.generation, "steps": s.steps}} for s in history.seen]  # type: ignore[misc]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
