#!/usr/bin/env python3
"""Sends an incident to Slack, Feishu or PagerDuty, in the format that each of these services requires. Needs nothing but Python.

    export WEBHOOK=https://hooks.slack.com/services/…
    mt-resilient run --set "hooks.on_incident=python3 examples/hooks/notify.py slack" -- torchrun …

WEBHOOK is the address of the webhook. For PagerDuty (Events API v2), it is https://events.pagerduty.com/v2/enqueue, and ROUTING_KEY is the
key of the service. mt-resilient passes the event on stdin (docs/operations.md). If this program fails, mt-resilient runs it again.
"""

import json
import os
import sys
import urllib.request
from typing import Any


def slack(event: dict[str, Any]) -> dict[str, Any]:
    return {"text": event["text"]}


def feishu(event: dict[str, Any]) -> dict[str, Any]:
    return {"msg_type": "text", "content": {"text": event["text"]}}


def pagerduty(event: dict[str, Any]) -> dict[str, Any]:
    """Return PagerDuty's event. If the incident is over and nobody has to act, the event resolves the alert that the incident raised."""
    incident = event["incident"]
    needs_nobody = incident["needs"]["act"] == "nothing"
    return {
        "routing_key": os.environ["ROUTING_KEY"],
        "event_action": "resolve" if event["event"] == "over" and needs_nobody else "trigger",
        "dedup_key": f"{event['job']}-{incident['incident']['generation']}-{incident['number']}",
        "payload": {
            "summary": event["text"][:1024],
            "source": event["node"],
            "severity": "critical" if incident["result"] in ("stopped", "not cured") else "warning",
            "component": event["job"],
            "class": incident["needs"]["cause"],
            "custom_details": {**incident["needs"], "run directory": event["directory"]},
        },
    }


def main() -> int:
    shapes = {"slack": slack, "feishu": feishu, "pagerduty": pagerduty}
    if len(sys.argv) != 2 or sys.argv[1] not in shapes:
        print(f"usage: {sys.argv[0]} slack|feishu|pagerduty", file=sys.stderr)
        return 2
    body = json.dumps(shapes[sys.argv[1]](json.load(sys.stdin))).encode()
    asked = urllib.request.Request(os.environ["WEBHOOK"], body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        said = answer.read(2000).decode(errors="replace")
    print(said)
    # If Feishu refuses a message, it answers with HTTP status 200 and a `code` that is not 0.
    refused = sys.argv[1] == "feishu" and json.loads(said).get("code", 0) != 0
    return int(refused)


if __name__ == "__main__":
    raise SystemExit(main())
