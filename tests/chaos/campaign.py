"""Drawn states (`drawn.py`): python -m tests.chaos.campaign [--states 0:500]. Each meets a SIGKILL of rank 1, a SIGTERM of the agent, a
NaN, and a SIGKILL of the agent. After the agent's end the same command is given again. The SIGTERM is the hardest: no step is computed
twice, so nothing can be compared.

Many states share a job. One that is refused before the first step is counted, and the others begin again without it.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..harness import Job, environment

SCRIPT = Path(__file__).with_name("drawn.py")
_STATE = re.compile(r"^state (\d+) (\w+)$", re.MULTILINE)
_NAMED = re.compile(r"\bs(\d+)_")


@dataclass
class Outcome:
    equal: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)
    """With the sentence."""
    silent: set[int] = field(default_factory=set)
    """Other bits, and no word."""
    failed: str = ""
    """How the job ended, where it did not come to its end."""


def play(first: int, end: int, place: Path, device: str = "cpu") -> Outcome:
    outcome = Outcome()
    words = ["--states", f"{first}:{end}", "--device", device]
    command = [sys.executable, str(SCRIPT), *words, "--marks", str(place)]
    plain = subprocess.run(command, env=environment(), text=True, capture_output=True, check=True)
    expected = dict(_STATE.findall(plain.stdout))
    while len(outcome.refused) < end - first:
        without = ",".join(map(str, outcome.refused))
        run = place / f"without-{len(outcome.refused)}"
        run.mkdir()
        faults = ["--kill-at", "5", "--drain-at", "7", "--nan-at", "9", "--stop-at", "12", "--marks", str(place)]
        command = ["--nproc-per-node", "2", str(SCRIPT), *words, "--without", without, *faults]
        job = Job(run, command, "--durable-every", "5")
        for step, number in ((7, signal.SIGTERM), (12, signal.SIGKILL)):
            while job.agent.poll() is None and not (place / f"struck-{step}").exists():
                time.sleep(0.1)
            if job.agent.poll() is None:
                job.agent.send_signal(number)
                if number == signal.SIGTERM:
                    job.until_said("SIGTERM: ending the job")
                    (place / "asked").touch()
                job.agent.wait()
                job.start()
        code = job.finish(180)
        if code == 0:
            break
        sentence = next((line for line in job.said().splitlines() if _NAMED.search(line)), "")
        named = _NAMED.search(sentence)
        if code != 2 or (place / "struck-5").exists() or not named or int(named[1]) in outcome.refused:
            outcome.failed = f"code {code}: {job.said()[-3000:]}"
            return outcome
        outcome.refused[int(named[1])] = sentence
    came = dict(_STATE.findall(job.printed()))
    for seed in set(range(first, end)) - set(outcome.refused):
        same = came.get(str(seed)) == expected[str(seed)]
        (outcome.equal if same else outcome.silent).add(seed)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", default="0:500")
    parser.add_argument("--together", type=int, default=25, help="states in a job")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keep", type=Path, help="leave what each state was at the end there")
    args = parser.parse_args()
    first, end = map(int, args.states.split(":"))
    totals = [0, 0, 0, 0]
    for begin in range(first, end, args.together):
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(args.keep or scratch) / str(begin)
            place.mkdir(parents=True)
            came = play(begin, min(end, begin + args.together), place, args.device)
        print(
            f"{begin}: {len(came.equal)} equal, {len(came.refused)} refused, silent {sorted(came.silent)}", flush=True
        )
        for seed, sentence in came.refused.items():
            print(f"  {seed} refused: {sentence}", flush=True)
        if came.failed:
            print(came.failed, flush=True)
        found = (len(came.equal), len(came.refused), len(came.silent), bool(came.failed))
        totals = [total + number for total, number in zip(totals, found, strict=True)]
    print("{} equal, {} refused before the first step, {} silent, {} jobs failed".format(*totals))
    return bool(totals[2] or totals[3])


if __name__ == "__main__":
    sys.exit(main())
