"""Proves on this machine's devices, that a disturbed training ends with the bits of an undisturbed one.

    scripts/prove-on-device [--device musa|cuda|cpu] [--ranks N] [case …]

Run it with the Python that trains: `PYTHON=/opt/conda/bin/python scripts/prove-on-device`. It needs torch (and torch_musa), what this
package needs, and etcd on PATH. Each case trains proof.py for 60 steps and is compared with a run under plain torchrun:

    repeat   a second run under plain torchrun: whether this stack repeats to the bit at all
    wrapped  behind `mt-resilient run`, without a fault
    kill     a rank is killed
    nan      a gradient becomes NaN
    hang     a rank stops for ever
    agent    the agent is killed, and the same command is given again

It prints a table, and exits with 0 if all cases are equal to the bit, each fault has struck, and each run has ended with code 0. A run is
ended after 150 s, so all seven take at most 20 minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = ("repeat", "wrapped", "kill", "nan", "hang", "agent")
FAULTS = ("kill", "nan", "hang")
QUICK = {"hang.floor_s": "5", "hang.confirm_s": "2", "hang.idle_s": "3", "hang.warmup_steps": "5"}
LIMIT_S = 150.0
"""Seconds for one run."""


def steps(folder: Path) -> dict[int, tuple[float, str]]:
    """Step → when it was finished last, and the bits of its loss then."""
    with suppress(OSError):
        rows = [line.split() for line in (folder / "steps").read_text().splitlines()]
        return {int(step): (float(at_s), bits) for at_s, step, bits in rows}
    return {}


def outcome(folder: Path) -> tuple[str, list[str]]:
    """The SHA-256 at the end, empty if there is none; and the losses."""
    found = re.findall(r"final state sha256 (\w+)", (folder / "output").read_text(errors="replace"))
    return (found[-1] if found else ""), [bits for _, (_, bits) in sorted(steps(folder).items())]


def start(folder: Path, device: str, ranks: int, fault: str, wrapped: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", *(() if wrapped else ("--standalone",))]
    command += ["--nproc-per-node", str(ranks), str(HERE / "proof.py"), device, fault, str(folder)]
    if wrapped:
        ours = [sys.executable, "-m", "mt_resilient", "run", "--run-dir", str(folder / "run"), "--metrics-port", "0"]
        ours += ["--snapshot-every", "1", "--durable-every", "10"]
        command = [*ours, *(word for pair in QUICK.items() for word in ("--set", "=".join(pair))), "--", *command]
    environment = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
    with (folder / "output").open("ab") as output, (folder / "errors").open("ab") as errors:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=errors, start_new_session=True)


def play(case: str, folder: Path, device: str, ranks: int) -> tuple[int, float | None]:
    """Run one case to its end. Return its exit code, and the seconds from the fault to the next finished step; None: there was no fault."""
    folder.mkdir()
    until_s = time.monotonic() + LIMIT_S
    running = start(folder, device, ranks, case if case in FAULTS else "none", case not in ("plain", "repeat"))
    struck_s = None
    while running.poll() is None:
        if case == "agent" and struck_s is None and len(steps(folder)) > 25:
            running.kill()
            running.wait()
            struck_s = time.time()
            running = start(folder, device, ranks, "none", wrapped=True)
        if time.monotonic() > until_s:
            running.terminate()  # an agent ends its ranks
            with suppress(subprocess.TimeoutExpired):
                running.wait(20)
            running.kill()
            running.wait()
        time.sleep(0.1)
    if (folder / "fault").exists():
        struck_s = float((folder / "fault").read_text())
    after = [at_s for at_s, _ in steps(folder).values() if struck_s and at_s > struck_s]
    return running.returncode, min(after) - struck_s if struck_s and after else None


def verdict(
    case: str, code: int, took_s: float | None, found: tuple[str, list[str]], expected: tuple[str, list[str]]
) -> str:
    if not found[0]:
        return "**did not end**"
    if case in (*FAULTS, "agent") and took_s is None:
        return "**the fault did not strike**"
    if code:
        return f"**exit code {code}**"
    return "equal" if found == expected else "**other bits**"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; without one, all")
    parser.add_argument("--device", choices=("musa", "cuda", "cpu"))
    parser.add_argument("--ranks", type=int, help="at most one for each device; by default up to 8")
    options = parser.parse_args()
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}, only {', '.join(CASES)}; nothing was run")
    import torch

    device = options.device
    if device is None:
        device = "musa" if importlib.util.find_spec("torch_musa") else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "musa":
        import torch_musa  # noqa: F401
    count = 2 if device == "cpu" else getattr(torch, device).device_count()
    ranks = options.ranks or min(count, 8)
    name = "" if device == "cpu" else f" ({getattr(torch, device).get_device_name(0)})"
    print(f"{ranks} ranks on {device}{name}, torch {torch.__version__}\n")
    print("| case | bits | seconds to the next step |\n|---|---|---|", flush=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="prove-") as scratch:
        code, _ = play("plain", Path(scratch, "plain"), device, ranks)
        expected = outcome(Path(scratch, "plain"))
        if code or not expected[0]:
            print((Path(scratch, "plain") / "errors").read_text(errors="replace")[-4000:], file=sys.stderr)
            sys.exit("the training does not run under plain torchrun; what it said is above")
        for case in dict.fromkeys(options.cases) or CASES:
            folder = Path(scratch, case)
            code, took_s = play(case, folder, device, ranks)
            said = verdict(case, code, took_s, outcome(folder), expected)
            print(f"| {case} | {said} | {'' if took_s is None else f'{took_s:.1f}'} |", flush=True)
            if said != "equal":
                failed = True
                print((folder / "errors").read_text(errors="replace")[-6000:], file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
