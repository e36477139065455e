"""Run the demonstration of `scripts/demo`: a real Megatron-Core training that faults do not change by a bit.

The training first runs undisturbed, under plain torchrun. The same training then runs under `mt-resilient run`, gets a NaN, loses a rank,
and loses all its processes. At the end, the SHA-256 of both final states are compared.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from mt_resilient.agent.cli import explain
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.model.node import NodeStatus

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
STEPS, POISONED, KILL_RANK_FROM, KILL_ALL_AFTER = 100, "6:1", 20, 12
TRAINING = ["torchrun", "--nproc-per-node", "2", str(HERE / "gpt" / "pretrain.py"), "--steps", str(STEPS)]
QUIET = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
DIGEST = re.compile(r"final state sha256 (\w+)")


def say(text: str) -> None:
    print(f"\n\033[1m── {text}\033[0m", flush=True)


def undisturbed() -> str:
    """Run the training undisturbed. Return SHA-256 over all its parameters and optimizer state."""
    command = [*TRAINING[:1], "--standalone", *TRAINING[1:]]
    done = subprocess.run(command, env=QUIET, text=True, capture_output=True)
    found = DIGEST.search(done.stdout)
    if not found:  # the exit code is ignored: gloo's threads sometimes abort the interpreter's teardown (torch 2.13)
        sys.exit(f"the undisturbed run failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    print(done.stdout.splitlines()[-2], found[0], sep="\n")
    return found[1]


def start(run: Path, output: Path) -> subprocess.Popen[bytes]:
    options = ["--run-dir", str(run), "--metrics-port", "0", "--snapshot-every", "1", "--durable-every", "10"]
    slow = ["--step-delay", "0.25", "--poison-gradient", POISONED, "--poison-marker", str(run.parent)]
    with output.open("ab") as file:
        return subprocess.Popen(
            [str(BIN / "mt-resilient"), "run", *options, "--", *TRAINING, *slow], env=QUIET, stdout=file
        )


def wait_for_step(agent: subprocess.Popen[bytes], run: Path, step: int) -> NodeStatus:
    """Return the node's status once all its ranks have finished `step` steps."""
    while agent.poll() is None:
        world = explain.look(RunDirectory(run))
        for now in world.status.values() if world else ():
            if now.min_step >= step and all(now.pids):
                return now
        time.sleep(0.1)
    sys.exit(f"the run ended with code {agent.returncode} before step {step}")


def wait_for_warm(agent: subprocess.Popen[bytes], run: Path) -> None:
    """Wait until the warm process is ready, so that the next start can be forked. In a job that runs for days, it always is."""
    deadline = time.time() + 60
    while (
        agent.poll() is None
        and time.time() < deadline
        and "the warm process is ready" not in (run / "journal.jsonl").read_text()
    ):
        time.sleep(0.2)


def kill_everything(agent: subprocess.Popen[bytes]) -> None:
    """Kill the agent and all its descendants with SIGKILL, immediately."""
    everybody = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    for process in everybody:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    agent.wait()
    psutil.wait_procs(everybody, timeout=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", metavar="DIRECTORY", help="folder in which to keep the run directory and the output")
    keep = parser.parse_args().keep
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="mt-resilient-demo-") as temporary:
        place = Path(keep or temporary)
        place.mkdir(parents=True, exist_ok=True)
        run, output = place / "demo", place / "output"
        say(f"the undisturbed training: {' '.join(TRAINING[:3])} examples/gpt/pretrain.py --steps {STEPS}")
        expected = undisturbed()
        say(f"the same under mt-resilient run; a gradient of rank {POISONED[-1]} is poisoned with NaN in its 7th step")
        agent = start(run, output)
        wait_for_step(agent, run, 10)
        wait_for_warm(agent, run)
        now = wait_for_step(agent, run, KILL_RANK_FROM)
        say(f"SIGKILL for rank 1, pid {now.pids[1]}, after step {now.max_step}")
        os.kill(now.pids[1], signal.SIGKILL)
        now = wait_for_step(agent, run, min(STEPS - 8, now.max_step + KILL_ALL_AFTER))
        say(f"SIGKILL for everything, the agent included, after step {now.max_step}; then the same command again")
        kill_everything(agent)
        agent = start(run, output)
        code = agent.wait()
        found = DIGEST.findall(output.read_text())
        if code or not found:
            sys.exit(f"the disturbed run failed with code {code}; see {output}")
        say("what happened")
        subprocess.run([str(BIN / "mt-resilient"), "explain", "--run-dir", str(run)], env=QUIET, check=True)
        subprocess.run([str(BIN / "mt-resilient"), "snapshots", "verify", "--run-dir", str(run)], env=QUIET, check=True)
        same = found[-1] == expected
        say(f"after {time.time() - began:.0f} s")
        print(f"undisturbed {expected}\ndisturbed   {found[-1]}")
        print(
            f"final weights: {'bit-identical to the undisturbed run' if same else 'DIFFERENT FROM THE UNDISTURBED RUN'}"
        )
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
