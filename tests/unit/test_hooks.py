"""A hook is told of each incident, in its own time, and holds nothing up."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.model.generation import Decision
from mt_resilient.resilience.model.types import Step
from mt_resilient.resilience.report.journal import Journal
from mt_resilient.resilience.report.json_outputs import HookObject
from mt_resilient.resilience.report.metrics import Metrics

from .worlds import incident

NOTIFY = Path(__file__).parents[2] / "examples" / "hooks" / "notify.py"
OVER: dict[str, Any] = {"open": False, "resume_step": Step(8), "phases_s": {"detect": 0.5, "step": 2.0}}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process may take long on a busy machine."""
    monkeypatch.setattr(hooks, "LAST_S", 60.0)


@contextmanager
def webhook(*codes: int, answers_after: Callable[[], object] = bool) -> Iterator[tuple[str, list[Any]]]:
    """A real HTTP server on loopback, which answers with these codes, then with 200. answers_after: returns when it may answer."""
    got: list[Any] = []
    answers = [*codes]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answers_after()
            self.send_response(answers.pop(0) if answers else 200)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(b'{"code": 0}')

        def do_GET(self) -> None:
            """Answer as a server that sends a POST without a session to its page for signing in."""
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook", got
        server.shutdown()


def until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.01)


def made(place: Path, on_incident: str, timeout_s: float = 20.0) -> Hooks:
    (place / "logs").mkdir(exist_ok=True)
    return Hooks(HooksPolicy(on_incident=on_incident, timeout_s=timeout_s), place, "gpt", "a")


def test_a_webhook_gets_the_beginning_and_the_end_of_an_incident_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_PAUSES_S", (0.01, 0.01))
    with webhook(500, 302) as (address, got):
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
    monkeypatch.setattr(hooks, "LAST_S", 0.1)
    log, may_answer = tmp_path / "logs/hooks.log", threading.Event()
    with webhook(answers_after=may_answer.wait) as (address, got):
        told = made(tmp_path, address, timeout_s=600)
        told.tell(incident(0))
        until(lambda: bool(got))
        for number in range(1, 300):
            told.tell(incident(number))
        told.finish()
        assert len(got) == 1, "nothing of it has waited for the answer"
        may_answer.set()
        left_out = "199 events were dropped after this one, because 100 waited"
        until(lambda: log.exists() and left_out in log.read_text())


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


def test_a_server_that_does_not_speak_http_does_not_end_the_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_PAUSES_S", ())

    def serve(server: socket.socket) -> None:
        for _ in range(2):
            connection, _ = server.accept()
            connection.recv(65536)
            connection.sendall(b"SSH-2.0-OpenSSH_9\r\n")
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        told = made(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}/")
        told.tell(incident(1))
        told.tell(incident(2))
        told.finish()
    assert (tmp_path / "logs/hooks.log").read_text().count("BadStatusLine") == 2


@pytest.mark.parametrize("address", ["http://", "http://host:port/", "https://host/a b", "http://h\n/", "http://hö/"])
def test_an_address_that_is_none_is_refused_when_the_configuration_is_read(address: str) -> None:
    HooksPolicy(on_incident="https://user@[::1]:80/a%20b?c=d#e")
    with pytest.raises(UsageError, match="which is no address; write http://host"):
        HooksPolicy(on_incident=address)


def test_a_recovery_kills_no_command_that_begins_meanwhile_and_one_that_was_killed_has_failed(tmp_path: Path) -> None:
    program = f"""
import subprocess, sys, threading, time
from pathlib import Path
from mt_resilient.agent.output.hooks import Hooks, HooksPolicy
from mt_resilient.agent.ranks.orphans import Orphans
from mt_resilient.resilience.ipc import die_with_parent
die_with_parent.adopt_orphans()
here = Path({str(tmp_path)!r})
(here / "logs").mkdir()
hooks = Hooks(HooksPolicy(on_incident=f"cat > /dev/null; sleep 0.5; echo done >> {{here}}/done"), here, "gpt", "a")
until = time.monotonic() + 1.0
def ranks():
    while time.monotonic() < until:
        subprocess.Popen(["sleep", "30"])
        time.sleep(0.02)
threads = [threading.Thread(target=ranks), threading.Thread(target=lambda: Orphans().end(lambda: hooks.pids))]
for thread in threads:
    thread.start()
    time.sleep(0.1)
said = [hooks._attempt(b"{{}}")]
while said[-1]:  # it was killed in the moment before its process id was known
    said.append(hooks._attempt(b"{{}}"))
assert (here / "done").exists() and said[-1] == "" and set(said) <= {{"", "it was killed"}}, said
for thread in threads:
    thread.join()
hooks = Hooks(HooksPolicy(on_incident="sleep 60"), here, "gpt", "a")  # spare it no longer
def end():
    while not hooks.pids:
        time.sleep(0.01)
    Orphans().end(lambda: ())
threading.Thread(target=end).start()
assert hooks._attempt(b"{{}}") == "it was killed"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


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
