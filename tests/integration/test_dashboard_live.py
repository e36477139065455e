"""A job of two agents is hit by a kill, a hang, a NaN and a lost node while a Prometheus scrapes it. What Chromium shows of it is what the
journals say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mt_resilient.agent.cli.explain import incidents
from mt_resilient.agent.launch.ports import free_port
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.plan.escalation import OBSERVE

from ..harness import BIN, cli, environment
from .test_dashboard import browser, dashboard

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian)")

SCRIPT = """
import os, time
from pathlib import Path
import torch
from torch import distributed, nn
from mt_resilient import Session

distributed.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
session = Session(model=model, optimizer=optimizer)
for step in session.steps(1_000_000):
    time.sleep(0.03)
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(session.data_step))
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    if os.environ["RANK"] == "1" and Path("poison").exists():
        Path("poison").unlink()
        model.weight.grad[0, 0] = float("nan")
    optimizer.step()
    session.report(loss=loss)
"""
QUICK = {"hang.floor_s": 10, "hang.confirm_s": 2, "hang.idle_s": 3, "hang.warmup_steps": 5, "agent.lease_ttl_s": 10}


class Job:
    def __init__(self, place: Path) -> None:
        self.place, self.run = place, place / "train"
        self._port = free_port("127.0.0.1", wished=11_000)  # below those that the agents draw, until it is bound
        (place / "train.py").write_text(SCRIPT)
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        options = ["--run-dir", str(self.run), "--node", f"gpu-{node}", "--durable-every", "100"]
        options += [word for key, value in QUICK.items() for word in ("--set", f"{key}={value}")]
        torchrun = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)]
        master = ["--master-addr", "127.0.0.1", "--master-port", str(self._port)]
        with (self.place / f"output-{node}").open("ab") as output:
            self._agents[node] = subprocess.Popen(
                [str(BIN / "mt-resilient"), "run", *options, "--", *torchrun, *master, "train.py"],
                cwd=self.place,
                env=environment(GLOO_SOCKET_IFNAME="lo"),
                stdout=output,
                stderr=output,
            )

    def lose(self, node: int) -> None:
        agent = psutil.Process(self._agents.pop(node).pid)
        for each in (agent, *agent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        agent.wait()

    def status(self) -> dict[str, Any]:
        said = cli("status", "--json", "--run-dir", str(self.run)).stdout
        found: dict[str, Any] = json.loads(said) if said else {}
        return found

    def rank(self, node: int) -> int:
        found: list[int] = []

        def there() -> bool:
            nodes = self.status().get("nodes", {}).items()
            found.extend(each["pids"][0] for name, each in nodes if name.endswith(f"gpu-{node}") and any(each["pids"]))
            return bool(found)

        self.until(there, f"a rank on gpu-{node}")
        return found[0]

    def incidents(self) -> list[Incident]:
        found = {
            (each.generation, each.id): each
            for run in sorted(self.run.glob("nodes/*"))
            for each in incidents(RunDirectory(run)).values()
        }
        return [found[key] for key in sorted(found)]

    def until(self, true: Callable[[], object], what: str, limit_s: float = 180.0) -> None:
        end = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < end, what + "".join(
                file.read_text()[-3000:] for file in self.place.glob("output-*")
            )
            time.sleep(0.2)

    def recovers(self, fault: Callable[[], object], cause: str) -> None:
        fault()
        over = [cause]
        self.until(
            lambda: [i.cause for i in self.incidents() if i.cause == cause and not i.open] == over, f"{cause} is over"
        )

    def end(self) -> None:
        for agent in self._agents.values():
            agent.send_signal(signal.SIGINT)
        for agent in self._agents.values():
            agent.wait(60)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path)
    try:
        yield found
    finally:
        found.end()


def test_what_is_shown_of_a_job_with_four_faults_is_what_the_journals_say(job: Job) -> None:
    for node in (0, 1):
        job.start(node)
    job.until(lambda: list(job.run.glob("nodes/*/endpoint")), "the job is there")
    with dashboard(str(job.run)) as address:
        job.until(lambda: job.status().get("step", 0) > 30, "30 steps")
        job.recovers(lambda: os.kill(job.rank(1), signal.SIGKILL), "rank_killed")
        job.recovers(lambda: os.kill(job.rank(0), signal.SIGSTOP), "rank_hung")
        job.recovers((job.place / "poison").touch, "non_finite")
        job.lose(1)
        job.until(lambda: "waiting for 1 node" in words(address), "the page says what is missing")
        job.recovers(lambda: job.start(1), "agent_lost")
        known = job.incidents()
        acted = {(each.cause, each.rung) for each in known if each.rung > OBSERVE}
        assert acted == {("rank_killed", 2), ("rank_hung", 2), ("non_finite", 1), ("agent_lost", 2)}
        job.until(lambda: scraped(address) == len(known), "Prometheus has all incidents")
        with browser(address) as page:
            page.goto(address)
            page.wait_for_selector("#curve .main-svg")
            page.wait_for_function("document.querySelector('#words').innerText.startsWith('Training')")
            figures = {
                each.get_attribute("data-figure"): each.inner_text()
                for each in page.query_selector_all("[data-figure]")
            }
            assert figures["incidents"] == str(len(known))
            assert figures["lost_steps"] == str(sum(each.lost_steps for each in known))
            rows = page.query_selector_all("#incidents [data-row]")
            shown = [int(row.query_selector("[data-cell=lost_steps]").inner_text()) for row in rows]
            assert shown == [each.lost_steps for each in reversed(known)]
            number = rows[-1].get_attribute("data-row")
            page.click(f"[data-incident='{number}']")
            page.wait_for_selector(f"#story-{number} pre")
            assert "was killed by signal 9" in page.inner_text(f"#story-{number} pre")
            page.click("text=last hour")
            page.wait_for_function("document.querySelector('#curve').data[0].y.length > 1")


def words(address: str) -> str:
    with urllib.request.urlopen(f"{address}api/runs") as answer:
        return str(json.load(answer)[0]["state"]["words"])


def scraped(address: str) -> float:
    """How many incidents the page's panel shows. Only the agent that leads counts them, and the lost agent may have led."""
    with urllib.request.urlopen(f"{address}api/runs/0/prometheus") as answer:
        panels = {each["title"]: each["series"] for each in json.load(answer)["panels"]}
    return float(sum((each["y"] or [0])[-1] or 0 for each in panels.get("Incidents by cause, rung and result", [])))
