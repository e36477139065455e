"""Makes docs/img/dashboard-*.png: trains the example of the README, puts a NaN in, kills a rank, and photographs the page with Chromium.

.venv/bin/python scripts/dashboard_pictures.py [DIR]    DIR: a new directory for the job, deleted at the end (default: a temporary one)
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
_LINE = "inputs, targets = batch(session.data_step, device)"
_POISON = f"""{_LINE}
        if step == 500 and not os.path.exists(f"{{os.environ['POISON']}}-{{distributed.get_rank()}}"):
            open(f"{{os.environ['POISON']}}-{{distributed.get_rank()}}", "w").close()
            inputs = inputs * float("nan")"""
PICTURES = (("light", 1280, 1330, ""), ("dark", 1280, 900, "h-incidents"), ("phone", 390, 1330, ""))
"""Name, width and height in pixels, and the heading that is scrolled to; then an incident is opened, too."""


def wait(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 500
    while not true():
        assert time.monotonic() < until, "the job does not go on; look into its directory"
        time.sleep(0.5)


def photograph(address: str) -> None:
    target = ROOT / "docs" / "img"
    target.mkdir(exist_ok=True)
    with sync_playwright() as here:
        browser = here.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, width, height, heading in PICTURES:
            colours = "dark" if name == "dark" else "light"
            page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=colours).new_page()
            page.set_default_timeout(120_000)
            page.goto(f"{address}{'#run=0&incident=2' if heading else ''}")
            page.wait_for_selector("#story-2 .main-svg" if heading else "#curve .main-svg")
            page.wait_for_timeout(3000)
            page.evaluate(f"document.getElementById('{heading}')?.parentElement.scrollIntoView()")
            page.screenshot(path=target / f"dashboard-{name}.png")
        browser.close()


def main() -> None:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    place.mkdir(exist_ok=True)
    script, run = place / "train.py", place / "train"
    script.write_text((ROOT / "examples/minimal/train.py").read_text().replace(_LINE, _POISON))
    poison = {"POISON": str(place / "poison"), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    ours = [str(BIN / "mt-resilient")]
    words = [*ours, "run", "--metrics-port", "0", "--run-dir", str(run), "--", "torchrun"]
    words += ["--nproc-per-node", "2", str(script), "--steps", "100000", "--step-delay", "0.05"]
    started: list[subprocess.Popen[str]] = []

    def begin(command: list[str], **more: int) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(command, env={**os.environ, **poison}, text=True, **more))
        return started[-1]

    def told(what: str) -> bool:
        return (run / "journal.jsonl").exists() and what in (run / "journal.jsonl").read_text()

    try:
        begin(words, stdout=subprocess.DEVNULL)
        wait(lambda: told("recovered (rung 1") and told("the warm process is ready"))
        time.sleep(20)
        status = subprocess.run([*ours, "status", "--json", "--run-dir", str(run)], capture_output=True, check=True)
        (node,) = json.loads(status.stdout)["nodes"].values()
        os.kill(node["pids"][1], signal.SIGKILL)
        wait(lambda: told("recovered (rung 2"))
        time.sleep(20)
        page = begin([*ours, "dashboard", str(run), "--port", "0"], stdout=subprocess.PIPE)
        assert page.stdout
        photograph(page.stdout.readline().split()[-1])
    finally:
        for each in started:
            each.send_signal(signal.SIGINT)
            each.wait(60)
    subprocess.run(["rm", "-rf", str(place)], check=True)


if __name__ == "__main__":
    main()
