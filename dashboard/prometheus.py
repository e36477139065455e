"""Queries a Prometheus for the data of all panels (`resilience/report/panels.py`)."""

from __future__ import annotations

import json
import math
import re
import urllib.parse
import urllib.request
from http.client import HTTPException
from typing import Any

from ..resilience.report.panels import PANELS

_POINTS, _DEADLINE_S = 240, 5.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def opened(url: str, timeout_s: float) -> Any:
    """Return the answer of a GET request. The environment's proxy is not used for a server on this machine, because the proxy cannot reach
    it."""
    here = urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    return (_DIRECT.open if here else urllib.request.urlopen)(url, timeout=timeout_s)


def silent(address: str) -> str:
    """Return a sentence if no Prometheus answers at `address`; empty: a Prometheus answers."""
    try:
        opened(f"{address}/-/ready", _DEADLINE_S).close()
    except (OSError, HTTPException, ValueError) as error:
        return f"no Prometheus answers at {address} now ({error}). The page shows its panels once it answers; the rest is from the journals"
    return ""


def panels(address: str, job: str, since_s: float, now: float) -> dict[str, Any]:
    """Return each panel with its series since `since_s`, or the reason why there are no panels. Times are wall-clock seconds."""
    span_s = max(60, int(now - since_s))
    asked: dict[str, Any] = {"start": now - span_s, "end": now, "step": max(5, span_s // _POINTS)}
    found, pattern = [], re.escape(job).replace("\\", "\\\\").replace('"', '\\"')
    for panel in PANELS:
        series = []
        for query, legend in panel.asked(pattern, f"{span_s}s"):
            words = urllib.parse.urlencode({"query": query, **asked})
            try:
                with opened(f"{address}/api/v1/query_range?{words}", _DEADLINE_S) as answer:
                    told = json.load(answer)["data"]["result"]
            except (OSError, HTTPException, ValueError, KeyError) as error:
                return {"panels": [], "error": f"{address} does not answer as a Prometheus does ({error})"}
            series += [_series(each, legend) for each in told]
        found.append({"title": panel.title, "question": panel.question, "unit": panel.unit, "series": series})
    return {"panels": found, "error": ""}


def _series(told: dict[str, Any], legend: str) -> dict[str, Any]:
    name = legend.replace("{{job}}: ", "")
    for label, value in told["metric"].items():
        name = name.replace("{{" + label + "}}", value)
    values = [float(value) for _, value in told["values"]]
    return {"name": name, "x": [at for at, _ in told["values"]], "y": [y if math.isfinite(y) else None for y in values]}
