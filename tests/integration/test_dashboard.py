"""The page of `mt-resilient dashboard`, in a real Chromium: its numbers are the journal's, it asks for nothing elsewhere, and without the
token it shows nothing."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.model.data_windows import Window
from mt_resilient.resilience.model.types import Step
from mt_resilient.resilience.report import needs
from mt_resilient.resilience.report.journal import Journal
from mt_resilient.resilience.report.metrics import Metrics
from mt_resilient.resilience.store.etcd.access import Papers

from ..harness import cli, environment
from ..unit.worlds import incident

pytest.importorskip("plotly", reason="the extra `dashboard` is not installed")
START_S = 1_790_000_000.0
SECRET = "hf_s3cr3t"
KILLED = incident(
    1, at=900, at_s=START_S + 450, resume_step=Step(881), phases_s={"detect": 0.06, "step": 0.25}, open=False
)
STAYS = incident(
    2,
    generation=2,
    rung=1,
    at=1500,
    at_s=START_S + 750,
    cause="loss_divergence",
    summary="the loss <b>has gone up</b> in \udcff",
    remedy="continue",
    resume_step=Step(1400),
    phases_s={"restore": 0.5},
    open=False,
)


def finished(root: Path, code: int = 0) -> Path:
    """A run directory with a journal of 1,000 s: 2,000 steps, a killed rank, and a loss that no remedy has brought back."""
    root.mkdir(parents=True)
    journal = Journal(root / "journal.jsonl")
    journal.write(
        "start",
        START_S,
        command=["torchrun", "train.py", "--hf-token", SECRET],
        several=False,
        again=f"cd / && torchrun train.py --hf-token {SECRET}",
    )
    for second in range(0, 1001, 10):
        seen = {"state": "training", "step": 2 * second, "loss": 5 - second / 400, "step_s": 0.5, "etcd_s": 0.002}
        journal.write("progress", START_S + second, **seen, spent={"training": 0.9 * second, "replay": 0.1 * second})
    for each in (KILLED, STAYS):
        journal.write("incident", each.at_s, incident=asdict(each))
    if code:
        journal.write("said", START_S + 1000, sentence="the disk is full", mood="bad")
    else:
        (root / "finished").touch()
    journal.write("end", START_S + 1001, code=code)
    return root


@contextmanager
def dashboard(*words: str) -> Iterator[str]:
    """The address that `mt-resilient dashboard WORDS` prints."""
    command = [sys.executable, "-m", "mt_resilient", "dashboard", "--port", "0", *words]
    server = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert server.stdout
    try:
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.wait(60)


@contextmanager
def browser(address: str, width: int = 1280, dark: bool = False) -> Iterator[Any]:
    """A page of Chromium. At the end: no console error, no request to anywhere else, and nothing wider than the screen."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: test)")
    chromium = shutil.which("chromium") or pytest.skip("chromium is not installed (Debian)")
    with playwright.sync_playwright() as here:
        running = here.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=120_000)
        scheme = "dark" if dark else "light"
        page = running.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        wrong: list[str] = []
        page.on("console", lambda said: wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda asked: None if asked.url.startswith((address, "data:", "blob:")) else wrong.append(asked.url),
        )
        page.set_default_timeout(60_000)
        yield page
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        running.close()
    assert wrong == []


def test_the_numbers_of_the_page_are_those_of_the_journal(tmp_path: Path) -> None:
    root = finished(tmp_path / "train")
    with dashboard(str(root)) as address, browser(address) as page:
        page.goto(address)
        page.wait_for_selector("#curve .main-svg")
        assert page.inner_text("#words") == "Finished after step 2000"
        figures = {
            each.get_attribute("data-figure"): each.inner_text() for each in page.query_selector_all("[data-figure]")
        }
        lost_s = sum(sum(each.phases_s.values()) + 0.5 * each.lost_steps for each in (KILLED, STAYS))
        assert figures == {
            "effective": "90.0 %",
            "incidents": "2",
            "lost_steps": str(KILLED.lost_steps + STAYS.lost_steps),
            "lost_s": f"{lost_s:.1f} s",
        }
        rows = page.query_selector_all("#incidents [data-row]")
        assert [row.get_attribute("data-row") for row in rows] == ["2", "1"]
        cells = [row.query_selector("[data-cell=lost_steps]").inner_text() for row in rows]
        assert cells == [str(STAYS.lost_steps), str(KILLED.lost_steps)]
        assert "the loss <b>has gone up</b> in " in rows[0].inner_text(), "what a script says is text, not HTML"
        assert page.evaluate("document.querySelector('#curve').data[0].y.at(-1)") == 2000
        assert page.evaluate("document.querySelector('#curve').data.at(-1).x.length") == 2, "both incidents are marked"

        page.focus("[data-incident='1']")
        page.keyboard.press("Enter")
        page.wait_for_selector("#story-1 .main-svg")
        told = page.inner_text("#story-1 pre")
        for line in needs.told(KILLED, "", "1")[1:]:
            assert line.strip() in told
        page.click("text=last 10 min")
        page.wait_for_selector("text=last 10 min >> xpath=self::*[@aria-pressed='true']")


@pytest.mark.parametrize(("width", "dark"), [(390, False), pytest.param(1280, True, marks=pytest.mark.variant)])
def test_of_several_jobs_the_one_to_act_on_comes_first(tmp_path: Path, width: int, dark: bool) -> None:
    finished(tmp_path / "a")
    finished(tmp_path / "b", code=3)
    with dashboard(str(tmp_path)) as address, browser(address, width, dark) as page:
        page.goto(address)
        page.wait_for_selector("#jobs li")
        first = page.locator("#jobs a").first  # the page replaces it every 3 s
        assert first.get_attribute("class") == "bad"
        assert "act now" in first.inner_text()
        first.click()
        page.wait_for_selector("#curve .main-svg")
        assert re.fullmatch(r"Not training for .*: the disk is full", page.inner_text("#words"))
        assert "The job has stopped with exit code 3 after step 2000." in page.inner_text("#act")


def test_nobody_without_the_token_is_answered(tmp_path: Path) -> None:
    def answer(address: str, **headers: str) -> int:
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as told:
                return int(told.status)
        except urllib.error.HTTPError as error:
            return error.code

    root = str(finished(tmp_path / "train"))
    with dashboard(root) as address:
        assert answer(f"{address}api/runs") == 200
        assert answer(f"{address}api/runs/7") == answer(f"{address}static/server.py") == 404
        assert answer(f"{address}api/runs", Host="example.com") == 403, (
            "another page may have bent its name to this address"
        )
    with dashboard(root, "--host", "0.0.0.0") as address:
        here = re.sub(r"//[^:]+", "//127.0.0.1", address)
        plain, token = here.split("?token=")
        assert answer(plain) == answer(f"{plain}api/runs") == answer(f"{plain}?token=wrong") == 403
        assert answer(f"{plain}api/runs", Cookie=f"mt-resilient-token={token}") == 200
        asked = http.client.HTTPConnection(plain.split("/")[2])
        asked.request("GET", f"/?token={token}")
        cookie = asked.getresponse().headers["Set-Cookie"]
        assert "SameSite=lax" in cookie, "a browser sends no strict cookie after a click in a chat"


def test_wrong_words_are_refused_with_a_sentence(tmp_path: Path) -> None:
    nothing = cli("dashboard", str(tmp_path))
    assert (nothing.returncode, nothing.stderr.count("there is no run in")) == (2, 1)
    root = str(finished(tmp_path / "train"))
    with dashboard(root) as address:
        taken = cli("dashboard", root, "--port", address.strip("/").rpartition(":")[2])
    assert (taken.returncode, "name others with --host and --port" in taken.stderr) == (3, True)
    nowhere = cli("dashboard", root, "--port", "99999")
    assert (nowhere.returncode, "port 99999 (bind(): port must be 0-65535.)" in nowhere.stderr) == (3, True)
    unnamed = cli("dashboard", root, "--prometheus", "gpu-01")
    assert (unnamed.returncode, "give http://HOST:PORT, or none" in unnamed.stderr) == (2, True)


@pytest.mark.timing
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.variant)]
)
def test_it_ends_at_once_although_a_visitor_waits_for_a_prometheus(tmp_path: Path, sent: int, code: int) -> None:
    root = str(finished(tmp_path / "train"))
    for _ in range(2):  # a busy machine may delay one
        took_s, *ended = end_of_a_server_with_a_visitor(root, sent)
        assert ended == [code, ""]
        if took_s < 4.5:
            break
    assert took_s < 4.5, "it waits 5 s for a Prometheus"


def end_of_a_server_with_a_visitor(root: str, sent: int) -> tuple[float, int, str]:
    """Seconds that it takes, exit code, and what it says on stderr."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        named = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "mt_resilient", "dashboard", "--port", "0", "--prometheus", named, root]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        server = subprocess.Popen(command, env=environment(), text=True, **pipes)
        assert server.stdout
        address = server.stdout.readline().split()[-1].removeprefix("http://").strip("/")
        asked = http.client.HTTPConnection(address)
        asked.request("GET", "/api/runs/0/prometheus")
        silent.accept()  # the question whether it answers
        silent.accept()  # the first panel
        began = time.monotonic()
        server.send_signal(sent)
        said = server.communicate(timeout=60)[1]
        return time.monotonic() - began, server.returncode, said


def test_the_report_opens_without_a_server_and_tells_what_the_page_tells(tmp_path: Path) -> None:
    root = finished(tmp_path / "train")
    with (root / "journal.jsonl").open("ab") as file:  # what a torn write or another program may leave there
        file.write(
            b'\x00\xff{"at_s": 1, "kind"\n{"at_s":1790000990,"kind":"progress","state":"</script><b>","step":[]}\n['
        )
    Journal(root / "journal.jsonl").write(
        "drain", START_S + 9, event={"event": "durable", "step": 9, "bytes": 4_000_000, "seconds": 2.0}
    )
    told = {
        "summary": "</script><script>alert(1)</script>",
        "at_s": START_S + 800,
        "cause": "non_finite",
        "remedy": "skip",
    }
    skipped = replace(KILLED, id="0003", rung=1, window=Window(5, 7), **told)
    Journal(root / "journal.jsonl").write("incident", START_S + 800, incident=asdict(skipped))
    done = cli("report", str(root))
    assert (done.returncode, done.stdout.strip()) == (0, str(root / "report.html")), done.stderr
    assert SECRET not in (root / "report.html").read_text()
    with browser((root / "report.html").as_uri()) as page:
        page.goto((root / "report.html").as_uri())
        page.wait_for_selector("#curve .main-svg")
        page.wait_for_selector("#step-times .main-svg")
        assert page.inner_text("#words") == "Finished after step 2000"
        assert page.evaluate("document.querySelector('#curve').data[0].y.at(-1)") == 2000
        assert page.evaluate("document.querySelector('#curve').data.at(-1).marker.symbol") == [
            "circle",
            "triangle-down",
            "diamond",
        ]
        page.click("[data-incident='3']")
        page.wait_for_selector("#story-3 .main-svg")
        assert "alert(1)" in page.inner_text("#story-3 pre")
        assert page.inner_text("#windows tbody") == "batches 5 to 6\t3"
        assert "2.0 s" in page.inner_text("#kept")
        page.click("text=last 10 min")
        page.wait_for_function("document.querySelector('#curve').data[0].y[0] > 700")
    nowhere = cli("report", str(root), "--out", str(tmp_path / "no" / "report.html"))
    assert (nowhere.returncode, "name another file with --out" in nowhere.stderr) == (3, True)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian)")
def test_the_page_has_a_prometheus_of_its_own_if_none_is_named(tmp_path: Path) -> None:
    root = finished(tmp_path / "train")
    with dashboard(str(root)) as address, urllib.request.urlopen(f"{address}api/runs/0") as answer:
        assert json.load(answer)["prometheus"] == "", "no agent runs there, and nothing is started"
    assert not (root / "prometheus").exists()
    metrics = Metrics("train", "a")
    metrics.now(step=7, generation=1, alive=2, paused=False, stall_s=0.0, effective=1.0)
    RunDirectory(root).publish("train", ["127.0.0.1:1"], Papers(), metrics.serve(0))
    with dashboard(str(root), "--prometheus", "none") as address:
        assert not (root / "prometheus").exists()

    def step(address: str) -> list[float]:
        with urllib.request.urlopen(f"{address}api/runs/0/prometheus?span=600") as answer:
            panels = json.load(answer)["panels"]
        return [y for panel in panels if panel["title"] == "Step" for series in panel["series"] for y in series["y"]]

    with dashboard(str(root)) as address:
        until = time.monotonic() + 60
        while not (seen := step(address)):
            assert time.monotonic() < until, (root / "prometheus/prometheus.log").read_text()
            time.sleep(1)
        assert set(seen) == {7.0}
        with urllib.request.urlopen(f"{address}api/runs/0") as answer:
            theirs = json.load(answer)["prometheus"]
        with browser(address) as page:
            page.goto(address)
            page.wait_for_selector("#panels > :last-child .main-svg")
            wide = "[...document.querySelectorAll('#panels .plot')].map(box => [box.offsetWidth, box.querySelector('svg').clientWidth])"
            assert all(box >= chart for box, chart in page.evaluate(wide)), "no chart covers its neighbour"
    with pytest.raises(OSError, match=r"refused|reset"):  # reset: it is ending
        urllib.request.urlopen(theirs)
