"""Measure how long the page of `mt-resilient dashboard` takes to load: in Chromium, from the request to the words on the screen.

    python benchmarks/page_load.py [--jobs N] [--incidents N] [--repeat N]

The jobs are journals of one day each: a `progress` line a minute, and their share of the incidents. Then one more job has all incidents.
The list counts as loaded when all jobs are shown. A job's page counts as loaded when its sentence and the first rows of its table are
shown. Charts appear later, because plotly's script has 4 MB. The server reads the journals once, before it answers the first visitor. This
time is reported as a separate figure.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path

from measure import Result, arguments, count, median, report, say
from playwright.sync_api import Page, sync_playwright

from mt_resilient.resilience.model.incident import PHASES, Incident
from mt_resilient.resilience.model.types import Generation, Step
from mt_resilient.resilience.report.journal import Journal

_DAY_S = 86400.0


def journal(root: Path, incidents: int) -> None:
    root.mkdir(parents=True)
    chance, begin, written = random.Random(incidents), time.time() - _DAY_S, Journal(root / "journal.jsonl")
    written.write("start", begin, command=["torchrun", "--nproc-per-node", "8", "train.py"])
    at_s = sorted(begin + chance.uniform(60, _DAY_S - 60) for _ in range(incidents))
    for number, at in enumerate(at_s, 1):
        fault = Incident(
            id=f"{number:04d}",
            generation=Generation(number),
            cause="rank_killed",
            rung=2,
            summary=f"rank {number % 8} on gpu-01 was killed by signal 9",
            evidence=("also seen, as a consequence: rank 0 on gpu-01 exited with code 1: DistBackendError",),
            at_s=at,
            step_at_fault=Step(int(at - begin)),
            resume_step=Step(int(at - begin) - 2),
            phases_s=dict.fromkeys(PHASES, 1.5),
            open=False,
        )
        written.write("incident", at, incident=asdict(fault))
    for minute in range(1, int(_DAY_S / 60)):
        line = {"state": "training", "step": 60 * minute, "total": 10**6, "loss": 2 + chance.random(), "step_s": 1.0}
        written.write(
            "progress", begin + 60 * minute, **line, spent={"training": 59.0 * minute, "replay": 1.0 * minute}
        )
    written.write("end", begin + _DAY_S, code=0)
    (root / "finished").touch()


def loaded(page: Page, address: str, words: str) -> float:
    """Return the seconds until the JavaScript expression `words` is true on the page."""
    page.goto("about:blank")
    began = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.wait_for_function(words, polling="raf")
    return time.perf_counter() - began


def main() -> None:
    parser = arguments(__doc__)
    for name, usual in (("--jobs", 50), ("--incidents", 5000), ("--repeat", 9)):
        parser.add_argument(name, type=count, default=usual, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for job in range(options.jobs):
            journal(Path(place) / f"job-{job:02d}", options.incidents // options.jobs)
        journal(Path(place) / "job-all", options.incidents)
        say("the journals are written")
        command = [sys.executable, "-m", "mt_resilient", "dashboard", "--port", "0", "--prometheus", "none", place]
        began = time.perf_counter()
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout
        try:
            address = server.stdout.readline().split()[-1]
            with sync_playwright() as here:
                browser = here.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
                page = browser.new_context(bypass_csp=True).new_page()  # to ask the page whether it is loaded
                page.set_default_timeout(120_000)
                many = f"document.querySelectorAll('#jobs li').length == {options.jobs + 1}"
                loaded(page, address, many)
                first = time.perf_counter() - began
                with urllib.request.urlopen(f"{address}api/runs") as told:
                    run = next(each["run"] for each in json.load(told) if each["job"] == "job-all")
                one, row = f"{address}#run={run}", "document.querySelectorAll('#incidents [data-row]').length == 50"
                loaded(page, one, row)
                times: dict[str, list[float]] = {"list": [], "job": []}
                for _ in range(options.repeat):
                    times["list"].append(loaded(page, address, many))
                    times["job"].append(loaded(page, one, row))
                    say(f"list {times['list'][-1]:.2f} s, job {times['job'][-1]:.2f} s")
                browser.close()
        finally:
            server.terminate()
            server.wait()
    target = f"{options.jobs} jobs and {options.incidents} incidents within 1 s on two cores"
    report(
        "page_load",
        [
            Result("the list of all jobs, median", median(times["list"]), "s", limit=1.0, target=target),
            Result("the page of a job with all incidents, median", median(times["job"]), "s", limit=1.0, target=target),
            Result("from the start of the server to the first visitor's list", first, "s"),
        ],
    )


if __name__ == "__main__":
    main()
