"""Scripts as people write them (examples/everyday), and what each is put through: a rank killed, a NaN, the agent killed and the same
command given again; forked or started cold. `endure` says how it ended, in the words of the table that scripts/conformance prints.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..harness import ROOT, Job, digest_of, undisturbed

EVERYDAY = ROOT / "examples" / "everyday"
SHIM = Path(__file__).parent / "shim"
STEPS = 60
STRUCK_AT = 15
"""The step behind which it happens."""
PACE_S = "0.05"
EQUAL, OTHER = "bits equal", "other bits"


class Fault(Enum):
    KILL = "rank killed"
    NAN = "NaN"
    AGENT = "agent killed, same command again"


@dataclass(frozen=True, kw_only=True)
class Script:
    name: str
    needs: str = "torch"
    """A module without which it does not run here,"""
    compiler: bool = False
    """or a C++ compiler."""
    passes: int = 1
    """Backward passes in a step."""
    session: bool = True
    nan: str = EQUAL
    """What comes of a NaN; where it is not EQUAL, it ends with other bits, and this is why."""
    resumes_at: int = 0
    """Its own resume does not end with the bits of a run that goes through, under torchrun neither: it is compared with one that has been
    resumed at this step. The ranks go no further than `held_at`, so that no other checkpoint is the newest."""
    held_at: int = 25
    folder: Path = EVERYDAY

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.py"

    @property
    def lacks(self) -> str:
        """What it lacks here; empty when it can run."""
        if importlib.util.find_spec(self.needs) is None:
            return self.needs
        return "a C++ compiler" if self.compiler and not (shutil.which("g++") or shutil.which("c++")) else ""


SCRIPTS = [
    Script(name="compiled", compiler=True),
    Script(name="fsdp2"),
    Script(name="accelerated", needs="accelerate", passes=2),
    Script(name="fabric", needs="lightning"),
    Script(name="curves", needs="tensorboard"),
    Script(name="progress", needs="tqdm"),
    Script(name="gan", passes=2),
    Script(name="accumulation", passes=4, nan="the loss scaler leaves the step out"),
    Script(name="evaluation"),
    Script(name="checkpoints"),
    Script(name="plain", session=False, nan="not seen without a Session"),
    Script(
        name="trainer", needs="lightning", session=False, nan="not seen without a Session", resumes_at=10, held_at=18
    ),
]


def expected(script: Script, place: Path) -> str:
    """The digest of the run that nothing happens to, or that only its own resume happens to."""
    kept = place / "undisturbed"
    kept.mkdir()
    lives = filter(None, (script.resumes_at, STEPS))
    return [undisturbed(script.path, "--steps", str(steps), "--folder", str(kept))[0] for steps in lives][-1]


def begin(script: Script, place: Path, *options: str) -> Job:
    kept = place / "kept"
    kept.mkdir()
    command = ["--nproc-per-node", "2", str(script.path), "--steps", str(STEPS), "--folder", str(kept)]
    path = os.pathsep.join(filter(None, (str(SHIM), os.environ.get("PYTHONPATH"))))
    gate = {"GATE_AFTER": str(script.held_at * script.passes), "PACE_S": PACE_S, "POISON": str(place / "poison")}
    return Job(place, command, "--durable-every", "10", *options, PYTHONPATH=path, **gate)


def strike(job: Job, script: Script, fault: Fault, place: Path) -> None:
    """Behind STRUCK_AT, in steps of the ranks that run now."""
    if script.session:
        job.until(lambda now: now.min_step >= STRUCK_AT and now.stepped_s > 0 and all(now.pids))
    else:
        job.until(lambda now: f"step {STRUCK_AT} " in job.printed() and all(now.pids))
    if fault is Fault.KILL:
        job.kill_rank(0)
    elif fault is Fault.NAN:
        (place / "poison").touch()
    else:
        job.agent.send_signal(signal.SIGKILL)
        job.agent.wait()
        job.start()


def endure(script: Script, faults: Sequence[Fault], place: Path, want: str, *options: str) -> tuple[Job, str]:
    """The job that all `faults` have befallen, one after the other; and how it ended, in words: EQUAL, or what differs."""
    job = begin(script, place, *options)
    try:
        for number, fault in enumerate(faults, 1):
            job.until(lambda now, life=number: now.generation >= life)
            if script.session and "--no-warm" not in options:
                job.until_said("the next start will be")
            strike(job, script, fault, place)
        code = job.finish()
    finally:
        if job.agent.poll() is None:
            job.kill_everything()
    if code:
        return job, f"exit code {code}"
    if Fault.NAN in faults and not (place / "poison.taken").exists():
        return job, "the NaN came too late"
    return job, EQUAL if digest_of(job.printed()) == want else OTHER
