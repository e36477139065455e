"""A hook is told of each incident, in its own time, and holds nothing up."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mt_resilient.agent.output import hooks
from mt_resilient.agent.output.event_log import Telling
from mt_resilient.agent.output.hooks import Hooks, HooksPolicy
from mt_resilient.agent.output.terminal import Terminal
from mt_resilient.resilience.model.generation import Decision
from mt_resilient.resilience.model.types import Step
from mt_resilient.resilience.report.journal import Journal
from mt_resilient.resilience.report.json_outputs import HookObject
from mt_resilient.resilience.report.metrics import Metrics

from .worlds import incident

NOTIFY = Path(__file__).parents[2] / "examples" / "hooks" / "notify.py"
OVER: dict[str, Any] = {"open": False, "resume_step": Step(8), "phases_s": {"detect": 0.5, "step": 2.0}}


@contextmanager
def webhook(*codes: int, slow_s: float = 0.0) -> Iterator[tuple[str, list[Any]]]:
    """A real HTTP server on loopback, which answers with these codes, then with 200."""
    got: list[Any] = []
    answers = [*codes]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            time.sleep(slow_s)
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()
            self.wfile.write(b'{"code": 0}')

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook", got
        server.shutdown()


def made(place: Path, on_incident: str, timeout_s: float = 20.0) -> Hooks:
    (place / "logs").mkdir(exist_ok=True)
    return Hooks(HooksPolicy(on_incident=on_incident, timeout_s=timeout_s), place, "gpt", "a")


def test_a_webhook_gets_the_beginning_and_the_end_of_an_incident_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_PAUSES_S", (0.01, 0.01))
    with webhook(500, 429) as (address, got):
        told = made(tmp_path, address)
        telling = Telling(Terminal(True), Journal(tmp_path / "journal.jsonl"), Metrics("gpt"), told.tell)
        for each in (incident(3), incident(3, evidence=("more",)), incident(3, **OVER), incident(3, **OVER)):
            telling.decided(Decision(incidents=(each,)))
        telling.decided(Decision(incidents=(incident(4, rung=6, plan="3 in a row", open=False),)))
        told.finish()
    events = [msgspec.convert(body, HookObject) for body in got]
    assert [each.event for each in events] == ["began", "began", "began", "over", "over"], "two attempts were refused"
    assert (events[2].incident.number, events[2].job, events[2].node) == ("3", "gpt", "a")
    assert events[3].text.startswith("gpt: rank 0 on a was killed by signal 9; recovered (rung 2")
    assert events[4].text.endswith("3 in a row. To do: correct the cause, and give the same command again.")
    assert (tmp_path / "logs/hooks.log").read_text().count("HTTP Error") == 2


def test_a_hook_that_does_not_answer_holds_nothing_up_and_leaves_events_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "LAST_S", 1.0)
    with webhook(slow_s=1.5) as (address, got):
        told = made(tmp_path, address)
        began = time.monotonic()
        for number in range(300):
            told.tell(incident(number))
        assert time.monotonic() - began < 2.0
        told.finish()
        assert time.monotonic() - began < 3.0
        assert len(got) == 1
        time.sleep(1.5)
    assert "199 events were left out after this one, because 100 waited" in (tmp_path / "logs/hooks.log").read_text()


def test_a_command_gets_the_event_and_may_fail_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_PAUSES_S", (0.01,))
    seen = tmp_path / "seen"
    told = made(tmp_path, f"cat >> {seen}; echo >> {seen}; echo said; test $(wc -l < {seen}) -gt 1")
    told.tell(incident(1, summary="</script> \udcff \x1b[2J"))
    told.finish()
    bodies = [json.loads(line) for line in seen.read_text().splitlines()]
    assert len(bodies) == 2, "the first attempt failed"
    assert bodies[0]["text"].startswith("gpt: </script> \\xff \\x1b[2J;")
    log = (tmp_path / "logs/hooks.log").read_text()
    assert log.count("said\n") == 2
    assert "exit code 1" in log
    slow = made(tmp_path, "sleep 60", timeout_s=0.1)
    slow.tell(incident(1))
    slow.finish()
    assert "it took longer than 0.1 s" in (tmp_path / "logs/hooks.log").read_text()
    made(tmp_path, "").tell(incident(1))


@pytest.mark.parametrize("shape", ["slack", "feishu", "pagerduty"])
def test_the_examples_give_each_service_its_shape(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with webhook() as (address, got):
        monkeypatch.setenv("WEBHOOK", address)
        monkeypatch.setenv("ROUTING_KEY", "k")
        told = made(tmp_path, f"{sys.executable} {NOTIFY} {shape}")
        told.tell(incident(1, **OVER))
        told.finish()
    (body,) = got
    text = {
        "slack": lambda: body["text"],
        "feishu": lambda: body["content"]["text"],
        "pagerduty": lambda: body["payload"]["summary"],
    }[shape]()
    assert text.startswith("gpt: rank 0 on a was killed by signal 9")
    if shape == "pagerduty":
        assert (body["routing_key"], body["event_action"], body["dedup_key"]) == ("k", "resolve", "gpt-1-1")
        assert body["payload"]["severity"] == "warning"
