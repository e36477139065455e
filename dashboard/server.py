"""Serves the page and its data with starlette and uvicorn, which are small, typed and well maintained. The page loads nothing from other
servers: plotly's script is part of its wheel."""

from __future__ import annotations

import hmac
import secrets
import signal
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from errno import EADDRINUSE
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..agent.cli.explain import run_roots, zoned
from ..agent.cli.run_reader import RunReader, by_job
from ..agent.cli.watch import leave
from ..resilience.clock import wall_s
from ..resilience.errors import MachineError, UsageError
from ..resilience.report import page_view, time_ledger
from ..resilience.text.formatting import printable
from . import local_prometheus, prometheus
from .contents import FILES, HERE, details, summary

NONE = "none"
"""The value of `--prometheus` that means: no Prometheus."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PORT = 9465
_COOKIE = "mt-resilient-token"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Admits requests that have the token. Without a token, admits only requests whose address names this machine, so no other web page in
    the browser can send requests."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._refused(request) or self._app)(scope, receive, send_more)

    def _refused(self, request: Request) -> Response | None:
        if not self._token:
            here = request.url.hostname in LOOPBACK
            return None if here else PlainTextResponse("this page is for this machine alone", 403)
        given = request.query_params.get("token", "")
        if given and hmac.compare_digest(given.encode(), self._token.encode()):
            answer = RedirectResponse(request.url.path)
            answer.set_cookie(
                _COOKIE, given, httponly=True, samesite="lax"
            )  # strict: a link clicked in a chat would not work
            return answer
        if hmac.compare_digest(request.cookies.get(_COOKIE, "").encode(), self._token.encode()):
            return None
        return PlainTextResponse("open the address with the token that mt-resilient dashboard has printed", 403)


class Runs:
    def __init__(self, given: Sequence[Path], address: str) -> None:
        """given: run directories, or folders of them. address: address of a Prometheus; empty: none."""
        self._given, self._address = given, address
        self._readers: list[RunReader] = []
        self._lock = Lock()
        self._list()  # long journals take seconds, and a visitor should not wait for them

    def _list(self) -> list[dict[str, Any]]:
        """Return the summary of each job, new jobs included."""
        with self._lock, suppress(UsageError):  # raised if all run directories have been deleted
            known = [each.root for reader in self._readers for each in reader.directories]
            roots = dict.fromkeys((*known, *run_roots(self._given)))
            for fresh in by_job([*roots]) if len(roots) > len(known) else ():
                mine = {each.root for each in fresh.directories}
                told = [{each.root for each in reader.directories} for reader in self._readers]
                at = next((at for at, others in enumerate(told) if others & mine), len(told))
                if (
                    at == len(told) or told[at] != mine
                ):  # a job keeps its number, because pages have it in their address
                    self._readers[at : at + 1] = [fresh]
        return [self._listed(number, reader) for number, reader in enumerate(self._readers)]

    def _listed(self, number: int, reader: RunReader) -> dict[str, Any]:
        try:
            return self._summary(number, reader)
        except Exception as error:  # an unreadable journal must not hide the other jobs
            why = f"Cannot be read: {type(error).__name__}, {error}"
            state: dict[str, Any] = {
                "mood": "warn",
                "urgency": page_view.URGENCY["warn"],
                "words": printable(why),
                "act": [],
                "last": None,
            }
            return {
                "run": number,
                "job": printable(reader.directory.root.name),
                "state": state,
                "costs": time_ledger.costs((), {}),
            }

    def _of(self, request: Request) -> RunReader:
        number = int(request.path_params["run"])
        if number >= len(self._readers):
            raise HTTPException(404, "there is no such run")
        return self._readers[number]

    def all(self, request: Request) -> JSONResponse:
        return JSONResponse(self._list())

    def _summary(self, number: int, reader: RunReader) -> dict[str, Any]:
        with self._lock:
            reader.look()
            return {"run": number, **summary(reader)}

    def one(self, request: Request) -> JSONResponse:
        reader, number = self._of(request), int(request.path_params["run"])
        summary = self._summary(number, reader)
        return JSONResponse({**summary, **details(reader, _since(request)), "prometheus": self._address})

    def incident(self, request: Request) -> JSONResponse:
        number = request.path_params["number"]
        found = self._of(request).incidents.get(number)
        if found is None:
            raise HTTPException(404, "there is no such incident")
        return JSONResponse(page_view.story(number, found, zoned(found.at_s)))

    def panels(self, request: Request) -> JSONResponse:
        reader = self._of(request)
        since_s = _since(request) or (reader.lives[0]["from_s"] if reader.lives else wall_s() - 3600.0)
        return JSONResponse(prometheus.panels(self._address, reader.job, since_s, wall_s()))


def _since(request: Request) -> float:
    """Return the wall-clock time at which the requested curve begins; 0: the beginning of the training."""
    span = request.query_params.get("span", "")
    return wall_s() - int(span) if span.isdecimal() and 0 < len(span.lstrip("0")) < 10 else 0.0


def _file(request: Request) -> FileResponse:
    path = FILES.get(request.path_params["name"])
    if path is None:
        raise HTTPException(404)
    fresh = "max-age=86400" if path.name == "plotly.min.js" else "no-cache"
    return FileResponse(path, headers={"Cache-Control": fresh})


def application(given: Sequence[Path], address: str, token: str) -> Starlette:
    """Return the page's application. given: run directories, or folders of them. address: address of a Prometheus, or empty. token: the
    token that a visitor must give, or empty."""
    runs = Runs(given, address)
    routes = [
        Route("/", lambda request: FileResponse(HERE / "page.html")),
        Route("/static/{name}", _file),
        Route("/api/runs", runs.all),
        Route("/api/runs/{run:int}", runs.one),
        Route("/api/runs/{run:int}/incidents/{number}", runs.incident),
        Route("/api/runs/{run:int}/prometheus", runs.panels),
    ]
    guards = [Middleware(Guard, token=token), Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3)]
    return Starlette(routes=routes, middleware=guards)


def serve(given: Sequence[Path], host: str, port: int | None, address: str) -> int:
    """Serve the page until Ctrl-C. port: None: the first free one from PORT on. Raises UsageError if there is no run or
    `address` is none, and MachineError if the dashboard cannot listen."""
    roots = run_roots(given)
    if address not in ("", NONE) and not address.startswith(("http://", "https://")):
        raise UsageError(f"--prometheus {address} is not an address; give http://HOST:PORT, or none")
    token = "" if host in LOOPBACK else secrets.token_urlsafe(16)
    listening = _listening(host, range(PORT, PORT + 16) if port is None else (port,))
    if address == NONE:
        source: AbstractContextManager[tuple[str, str]] = nullcontext(("", ""))
    elif address:
        source = nullcontext((address, prometheus.silent(address)))
    else:
        source = local_prometheus.running(given)
    signal.signal(signal.SIGTERM, leave)  # an exception, so that the Prometheus that this command has started ends too
    with source as (asked, about):
        return _run(application(given, asked, token), len(roots), (host, listening), token, about)


def _listening(host: str, ports: Sequence[int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:  # OverflowError: the port's number is too large
            why = error
            if getattr(error, "errno", 0) != EADDRINUSE:
                break
    reason = str(getattr(why, "strerror", "") or why).partition(" (while")[0]
    raise MachineError(
        f"the dashboard cannot listen on {host}, port {port} ({reason}); name others with --host and --port"
    ) from why


def _run(page: Starlette, roots: int, at: tuple[str, socket.socket], token: str, about: str) -> int:
    host, listening = at
    shown = f"[{host}]" if ":" in host else host
    end = f"?token={token}" if token else ""
    print(
        f"dashboard of {roots} run {'directories' if roots > 1 else 'directory'}: http://{shown}:{listening.getsockname()[1]}/{end}",
        flush=True,
    )
    if about:
        print(about, flush=True)
    if token:
        print("anyone who has this address can read what is in the journals; nothing is encrypted", flush=True)
    server = uvicorn.Server(uvicorn.Config(page, log_level="warning", access_log=False))
    # This thread and those that it starts are daemons, so at the end nothing waits for a request that still waits for a Prometheus.
    serving = Thread(target=server.run, kwargs={"sockets": [listening]}, name="uvicorn", daemon=True)
    serving.start()
    serving.join()
    return 0 if server.started else 1
