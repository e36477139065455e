"""Creates situations of a job with real processes, faults and disks, and takes a screenshot of the page of `mt-resilient dashboard` for
each.

.venv/bin/python scripts/dashboard_situations.py DIR [NAME…]

The pictures go to DIR/NAME.png (1280 × 800) and DIR/NAME-phone.png (390 × 844). Needs root for the full disk, which is a small tmpfs.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from dashboard_pictures import _LINE, BIN, ROOT, kill_rank, wait
from playwright.sync_api import sync_playwright

from mt_resilient.agent.launch.ports import free_port

OURS = str(BIN / "mt-resilient")
MINIMAL = (ROOT / "examples/minimal/train.py").read_text()
STEPS = ("--steps", "200000", "--step-delay", "0.05")


class Stage:
    """One situation: its folder, and the processes that it has started."""

    def __init__(self, place: Path) -> None:
        self.place, self.run = place, place / "train"
        self.started: list[subprocess.Popen[str]] = []
        place.mkdir()

    def begin(self, *command: str, **more: int) -> "subprocess.Popen[str]":
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PLACE": str(self.place)}
        with (self.place / "output").open("a") as output:
            streams = {"stdout": output, "stderr": output, **more}
            self.started.append(subprocess.Popen(command, cwd=self.place, env=environment, text=True, **streams))
        return self.started[-1]

    def script(self, inserted: str = "", at: str = _LINE) -> str:
        script = self.place / "train.py"
        script.write_text(MINIMAL.replace(at, f"{at}\n{inserted}"))
        return str(script)

    def train(self, script: str, *options: str) -> "subprocess.Popen[str]":
        words = [OURS, "run", "--run-dir", str(self.run), *options, "--", "torchrun", "--nproc-per-node", "2", script]
        return self.begin(*words, *STEPS)

    def told(self, what: str, times: int = 1) -> Callable[[], bool]:
        return lambda: (self.place / "output").read_text().count(what) >= times

    def end(self) -> None:
        for each in reversed(self.started):
            each.send_signal(signal.SIGINT)
            each.wait(60)


def healthy(stage: Stage) -> None:
    stage.train(stage.script())
    wait(stage.told("step 2500 "))


def recovered(stage: Stage) -> None:
    stage.train(stage.script())
    wait(stage.told("step 1000 "))
    kill_rank(stage.run)
    wait(stage.told("recovered (rung 2"))
    time.sleep(45)


def recovering(stage: Stage) -> None:
    """A rank is killed, and the restarted script needs a long time to read its data."""
    slow = "    time.sleep(150 if os.path.exists(f\"{os.environ['PLACE']}/slow\") else 0)"
    stage.train(stage.script(slow, at="    torch.manual_seed(1234)"))
    wait(stage.told("step 500 "))
    (stage.place / "slow").touch()
    kill_rank(stage.run)
    time.sleep(12)


def waiting(stage: Stage) -> None:
    """One of two nodes is lost with its agent."""
    script, port = stage.script(), free_port()
    for rank, node in enumerate(("gpu-02", "gpu-03")):
        where = ["--run-dir", str(stage.run), "--node", node]
        ours = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank)]
        master = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        stage.begin(OURS, "run", *where, "--", *ours, *master, script, *STEPS)
    wait(stage.told("step 500 "))
    lost = psutil.Process(stage.started.pop().pid)
    for each in [lost, *lost.children(recursive=True)]:
        each.kill()
    lost.wait()
    wait(stage.told("the job waits for"))
    time.sleep(45)


def stopped(stage: Stage) -> None:
    """The script raises an exception at the same batch each time."""
    code = (
        "        if session.data_step == 700:\n            raise ValueError('shard-0017: 3 of 32 labels are missing')"
    )
    job = stage.train(stage.script(code))
    wait(lambda: job.poll() is not None)
    time.sleep(60)


def disk_full(stage: Stage) -> None:
    """Another program fills the disk of the snapshots."""
    disk = stage.place / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", disk], check=True)
    stage.train(stage.script(), "--snapshots", str(disk), "--durable-every", "200")
    wait(stage.told("step 1000 "))
    with (disk / "core.4711").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    wait(stage.told("could not be written"))
    time.sleep(20)


def not_cured(stage: Stage) -> None:
    """From one batch on, all labels are wrong, so no remedy for the diverged loss helps."""
    code = "        if session.data_step >= 600:\n            targets = targets + 50 * inputs.roll(1, 0)[:, :1]"
    stage.train(stage.script(code))
    wait(stage.told("not cured"))
    time.sleep(20)


SITUATIONS = (healthy, recovered, recovering, waiting, stopped, disk_full, not_cured)


def photograph(stage: Stage, target: Path) -> None:
    page = stage.begin(OURS, "dashboard", str(stage.run), "--port", "0", stdout=subprocess.PIPE)
    assert page.stdout
    address = page.stdout.readline().split()[-1]
    with sync_playwright() as here:
        browser = here.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for end, width, height in (("", 1280, 800), ("-phone", 390, 844)):
            shown = browser.new_context(viewport={"width": width, "height": height}).new_page()
            shown.set_default_timeout(120_000)
            shown.goto(address)
            shown.wait_for_selector("#curve .main-svg")
            shown.wait_for_timeout(500)
            shown.screenshot(path=target.with_name(f"{target.name}{end}.png"))
        browser.close()


def main() -> None:
    target, names = Path(sys.argv[1]).absolute(), sys.argv[2:]
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="situations-") as place:
        for play in SITUATIONS:
            if names and play.__name__ not in names:
                continue
            stage = Stage(Path(place) / play.__name__)
            try:
                play(stage)
                photograph(stage, target / play.__name__)
            finally:
                stage.end()
                if os.path.ismount(stage.place / "disk"):
                    subprocess.run(["umount", stage.place / "disk"], check=True)
            print(f"{play.__name__}: {target / play.__name__}.png", flush=True)


if __name__ == "__main__":
    main()
