"""On a machine with two devices: how soon each kind of hang is found, who is named, and whether healthy work is left alone.

    python tests/device/hangs.py [--device cuda] [--seconds 530] [--limit 100] [--repeat 1] [case …]

Needs torch, this package on PYTHONPATH, and etcd (on PATH, or named by $MT_RESILIENT_ETCD). Each case is a job of its own (`train.py`) with
hang.floor_s=5 and confirm_s=2. A case that takes too long is ended, and its output's tail is in the result. Prints what it does to stderr,
and one line of JSON to stdout:

    found_s      from the fault to the agent's decision; limit: floor + 3 x confirm = 11 s
    back_s       from the fault to the next finished step
    summary      the incident: which rank, and why
    incidents    of the healthy cases: must be none

To try the driver itself without devices: --device cpu, or --device musa with tests/musa/standin on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FLOOR_S, CONFIRM_S = 5, 2
HEALTHY = {"healthy": 240.0, "long": 1320.0}
"""Seconds that the healthy cases may take. `long` takes steps that vary by 10 x, with evaluations, saves and compilations, for 1,200 s."""
OPTIONS = {"sleep": {"hang.idle_s": "3"}}
EXTRA = {"timed": {"TORCH_NCCL_ENABLE_TIMING": "1"}}
"""Environment variables by case. With this one, the flight recorder also sees which device has not begun a collective.
`behind` is the same case without it."""
CASES = ("collective", "kernel", "stop", "sleep", "healthy", "timed", "forward", "behind")
"""In the order of their weight: if time runs out, the last ones are skipped."""


def say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def noted(folder: Path, name: str) -> list[tuple[float, str]]:
    with suppress(OSError):
        lines = (folder / name).read_text().splitlines()
        return [(float(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in lines if " " in line]
    return []


def start(case: str, device: str, folder: Path) -> subprocess.Popen[bytes]:
    settings = {
        "hang.floor_s": str(FLOOR_S),
        "hang.confirm_s": str(CONFIRM_S),
        "hang.idle_s": "600",
        "hang.warmup_steps": "5",
        "hang.start_s": "120",
        **OPTIONS.get(case, {}),
    }
    command = [sys.executable, "-m", "mt_resilient", "run", "--run-dir", str(folder / "run"), "--metrics-port", "0"]
    command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command += ["--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(HERE / "train.py"), device, case, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **EXTRA.get(case, {})}
    with (folder / "output").open("wb") as output, (folder / "errors").open("wb") as errors:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=errors, start_new_session=True)


def end(agent: subprocess.Popen[bytes]) -> None:
    """End the agent; its ranks die with it."""
    for sent, patience_s in ((signal.SIGTERM, 8), (signal.SIGKILL, 10)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            agent.send_signal(sent)
            agent.wait(patience_s)
            return


def play(case: str, device: str, folder: Path, limit_s: float) -> dict[str, Any]:
    began_s, decided_s = time.time(), 0.0
    agent = start(case, device, folder)
    back: list[float] = []
    try:
        while agent.poll() is None and time.time() - began_s < limit_s:
            time.sleep(0.1)
            fault = noted(folder, "fault")
            if not fault:
                continue
            said = (folder / "errors").read_text(errors="replace")
            if not decided_s and "restart the worker group" in said:
                decided_s = time.time()
            back = [at_s for at_s, _ in noted(folder, "steps") if decided_s and at_s > decided_s]
            if back and "recovered (rung" in said:
                break
        code = agent.poll()
    finally:
        end(agent)
    result: dict[str, Any] = {"took_s": round(time.time() - began_s, 1), "exit": code}
    fault = noted(folder, "fault")
    if case not in HEALTHY:
        result["found_s"] = round(decided_s - fault[0][0], 2) if fault and decided_s else None
        result["back_s"] = round(back[0] - fault[0][0], 2) if fault and back else None
    else:
        steps = noted(folder, "steps")
        result["steps"] = len(steps)
        result["done"] = [words for _, words in noted(folder, "done")]
    result |= incidents(folder)
    result["said"] = [
        line.partition("mt-resilient ")[2][:400]
        for line in (folder / "errors").read_text(errors="replace").splitlines()
        if any(
            word in line
            for word in ("no sign of life", "hangs", "ranks wait", "slow, and not", "signs of life", "recovered")
        )
    ]
    if code != 0 if case in HEALTHY else result.get("found_s") is None:
        result["tail"] = (folder / "errors").read_text(errors="replace")[-2500:]
        result["stacks"] = stacks(folder)
    return result


def incidents(folder: Path) -> dict[str, Any]:
    """Read what the journal says. Anything that goes wrong with that is a word of the result, and ends nothing."""
    try:
        from mt_resilient.agent.cli import explain
        from mt_resilient.agent.run_directory import RunDirectory

        found = list(explain.incidents(RunDirectory(folder / "run")).values())
        told = [
            {"cause": each.cause, "rung": each.rung, "summary": each.summary, "evidence": each.evidence[:6]}
            for each in found
        ]
    except Exception as error:
        return {"incidents": repr(error)}
    return {"incidents": told}


def stacks(folder: Path) -> str:
    """Return what the ranks' main threads, and their flight recorders, said last."""
    found = sorted((folder / "run" / "logs").glob("stacks-*.txt"), key=os.path.getmtime)
    lines = found[-1].read_text(errors="replace").splitlines() if found else []
    kept = [line for line in lines if line.startswith(("local rank", "flight recorder"))]
    for number, line in enumerate(lines):
        if line.startswith("Current thread"):
            kept += lines[number : number + 6]
    return "\n".join(kept)[:4000]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="case", help=f"of {', '.join(CASES)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "musa", "cpu"))
    parser.add_argument("--seconds", type=float, default=530.0, help="for all cases together")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for one hang, start and recovery included")
    parser.add_argument("--repeat", type=int, default=1, help="how often to play each hang")
    options = parser.parse_args()
    until_s = time.time() + options.seconds
    results: dict[str, Any] = {"device": options.device, "limit_s": FLOOR_S + 3 * CONFIRM_S}
    with suppress(Exception):
        import torch

        results["torch"] = torch.__version__
        results["name"] = torch.cuda.get_device_name(0) if options.device == "cuda" else options.device
    names = [case for case in options.cases for _ in range(1 if case in HEALTHY else options.repeat)]
    place = Path(tempfile.mkdtemp(prefix="spin-"))
    for number, case in enumerate(names):
        limit_s = min(HEALTHY.get(case, options.limit), until_s - time.time() - 15)
        key = case if case not in results else f"{case}-{number}"
        if limit_s < 30:
            results[key] = "skipped: no time left"
            continue
        folder = place / key
        folder.mkdir()
        try:
            results[key] = play(case, options.device, folder, limit_s)
        except Exception as error:
            results[key] = repr(error)
        say(f"{key}: {json.dumps(results[key])[:1500]}")
        out = os.environ.get("OUT")
        if out and (found := sorted((folder / "run" / "logs").glob("stacks-*.txt"), key=os.path.getmtime)):
            shutil.copy(found[-1], Path(out) / f"stacks-{key}.txt")
    shutil.rmtree(place, ignore_errors=True)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
