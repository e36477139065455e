"""Creates docs/img/dashboard-*.png: trains the README's example, puts a NaN into a batch, kills a rank, and takes screenshots of the page
with Chromium.

.venv/bin/python scripts/dashboard_pictures.py [DIR]    DIR: a new directory for the job, deleted at the end (default: a temporary one)
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
_LINE = "inputs, targets = batch(session.data_step, device)"
_POISON = f"""{_LINE}
        if step == 500 and not os.path.exists(f"{{os.environ['POISON']}}-{{distributed.get_rank()}}"):
            open(f"{{os.environ['POISON']}}-{{distributed.get_rank()}}", "w").close()
            inputs = inputs * float("nan")"""
PICTURES = (
    ("light", 1280, 1330, ""),
    ("dark", 1280, 900, "h-incidents"),
    ("phone", 390, 1330, ""),
    ("jobs", 1280, 360, "all"),
    ("further", 1280, 900, "risk"),
    ("prometheus", 1280, 1000, "h-asked"),
    ("prometheus-dark", 1280, 1000, "h-asked"),
    ("further-phone", 390, 1330, "risk"),
)
"""For each picture: its name, its width and height in pixels, and the element to scroll to. For the incidents, one incident is also opened.
`all`: the list of the jobs."""


def wait(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 500
    while not true():
        assert time.monotonic() < until, "the job makes no progress; look into its directory"
        time.sleep(0.5)


def kill_rank(run: Path) -> None:
    words = [str(BIN / "mt-resilient"), "status", "--json", "--run-dir", str(run)]
    status = subprocess.run(words, capture_output=True, check=True)
    (node,) = json.loads(status.stdout)["nodes"].values()
    os.kill(node["pids"][1], signal.SIGKILL)


def photograph(address: str) -> None:
    target = ROOT / "docs" / "img"
    target.mkdir(exist_ok=True)
    with urllib.request.urlopen(f"{address}api/runs") as answer:
        run = next(each["run"] for each in json.load(answer) if each["job"] == "train")
    with sync_playwright() as here:
        browser = here.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, width, height, place in PICTURES:
            colours = "dark" if "dark" in name else "light"
            page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=colours).new_page()
            page.set_default_timeout(120_000)
            incident = "&incident=2" if place == "h-incidents" else ""
            page.goto(address if place == "all" else f"{address}#run={run}{incident}")
            drawn = {
                "all": "#jobs li",
                "h-incidents": "#story-2 .main-svg",
                "h-asked": "#panels > :nth-child(8) .main-svg",
            }
            page.wait_for_selector(drawn.get(place, "#curve .main-svg"))
            page.wait_for_timeout(5000)
            if place not in ("", "all"):
                page.evaluate(f"document.getElementById('{place}').closest('section').scrollIntoView()")
            file = target / f"dashboard-{name}.png"
            page.screenshot(path=file)
            with Image.open(file) as taken:
                taken.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(file, optimize=True)
        browser.close()


def main() -> None:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    place.mkdir(exist_ok=True)
    script, run = place / "train.py", place / "train"
    script.write_text((ROOT / "examples/minimal/train.py").read_text().replace(_LINE, _POISON))
    poison = {"POISON": str(place / "poison"), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    ours = [str(BIN / "mt-resilient")]
    ranks = ["torchrun", "--nproc-per-node", "2"]
    words = [
        *ours,
        "run",
        "--run-dir",
        str(run),
        "--",
        *ranks,
        str(script),
        "--steps",
        "100000",
        "--step-delay",
        "0.05",
    ]
    earlier = [*ours, "run", "--run-dir", str(place / "earlier"), "--", *ranks, str(ROOT / "examples/minimal/train.py")]
    started: list[subprocess.Popen[str]] = []

    def begin(command: list[str], **more: int) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(command, env={**os.environ, **poison}, text=True, **more))
        return started[-1]

    def told(what: str) -> bool:
        return (run / "journal.jsonl").exists() and what in (run / "journal.jsonl").read_text()

    try:
        assert begin([*earlier, "--steps", "200"], stdout=subprocess.DEVNULL).wait(300) == 0
        begin(words, stdout=subprocess.DEVNULL)
        wait((run / "endpoint").exists)
        page = begin([*ours, "dashboard", str(place), "--port", "0"], stdout=subprocess.PIPE)
        wait(lambda: told("recovered (rung 1") and told("the warm process is ready"))
        time.sleep(20)
        kill_rank(run)
        wait(lambda: told("recovered (rung 2"))
        time.sleep(60)
        assert page.stdout
        photograph(page.stdout.readline().split()[-1])
    finally:
        for each in started:
            each.send_signal(signal.SIGINT)
            each.wait(60)
    subprocess.run(["rm", "-rf", str(place)], check=True)


if __name__ == "__main__":
    main()
