"""Runs the commands of the command line, except `run` (run_command.py). Imports are inside functions, so that `--help` is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .resilience.errors import UsageError
from .run_options import policies, values


def order(options: argparse.Namespace) -> int:
    """Send an order to a running job. Each `Wish` (kind of order) is a command of the same name."""
    from .agent.cli import explain, rewind_notice, send_request
    from .resilience.model.request import Request, Wish

    directory, back = explain.find_running(options.run_dir), None
    match Wish(options.command):
        case Wish.REWIND:
            request, back = rewind_notice.request(directory, options.to, options.skip)
        case Wish.DRAIN | Wish.READMIT as wish:
            request = Request(kind=wish, node=options.node)
        case Wish.STOP:
            request = Request(kind=Wish.STOP, snapshot=options.last_snapshot, exit_code=130)
        case wish:
            request = Request(kind=wish)
    return send_request.order(directory, request, back)


def _status(options: argparse.Namespace) -> int:
    from .agent.cli import explain
    from .agent.cli.status import status
    from .agent.cli.watch import watch

    directory = explain.find_directory(options.run_dir)
    return watch(directory) if options.watch else status(directory, options.json)


def _explain(options: argparse.Namespace) -> int:
    from .agent.cli import explain

    return explain.explain(explain.find_directory(options.run_dir), options.incident, options.json)


def _logs(options: argparse.Namespace) -> int:
    from .agent.cli import explain
    from .agent.cli.logs import logs

    directory = explain.on_this_machine(explain.find_directory(options.run_dir))
    return logs(directory, options.rank, options.incident, options.lines, options.follow)


def _snapshots(options: argparse.Namespace) -> int:
    from .agent.cli import explain, snapshots

    if options.action in _FORMATS:
        return _FORMATS[options.action](options)
    if options.action == "keep":
        return snapshots.keep(explain.find_running(options.run_dir), options.snapshot, options.undo)
    if options.action == "rm":
        return snapshots.remove(explain.find_running(options.run_dir), options.snapshot)
    if getattr(options, "json", False):
        return snapshots.list_json(_named(options))
    if not getattr(options, "all", False):
        return snapshots.snapshots(_named(options), options.action, getattr(options, "whole", False))
    return snapshots.list_all(options.snapshot, options.run_dir, policies()["snapshots"])


def _export(options: argparse.Namespace) -> int:
    from .formats import export, safetensors_files

    write = _dcp_writer() if options.to == "dcp" else safetensors_files.write
    print(export.export(_named(options)[0], write, Path(options.target), options.only or ()))
    return 0


def _named(options: argparse.Namespace) -> list[Any]:
    from .agent.cli import snapshots

    return snapshots.named(options.snapshot, options.run_dir, policies()["snapshots"])


def _import(options: argparse.Namespace) -> int:
    from .checkpoint.backend import place
    from .formats import dcp_names, import_checkpoint, megatron_names

    where = options.snapshots or (str(options.run_dir) if options.run_dir else "")
    if not where or (options.snapshots and options.run_dir):
        raise UsageError(
            "say where the snapshot goes with --snapshots DIR|URL, or with --run-dir DIR; nothing was imported"
        )
    kept = policies()["snapshots"]
    root = place.at(place.address(where, kept.endpoint, kept.region))
    found = (megatron_names.from_megatron if options.kind == "megatron" else dcp_names.from_torch)(Path(options.source))
    print(import_checkpoint.told(import_checkpoint.import_into(root, found, options.step), found, where))
    return 0


def _dcp_writer() -> Any:
    try:
        from .formats import dcp_export
    except ImportError as error:
        raise UsageError(
            f"--to dcp needs torch, which cannot be imported ({error}); install it, or use --to safetensors"
        ) from error
    return dcp_export.write


def _dashboard(options: argparse.Namespace) -> int:
    with _libraries():
        from .dashboard.server import serve
    return serve(options.runs, options.host, options.port, options.prometheus.rstrip("/"))


def _report(options: argparse.Namespace) -> int:
    from .agent.cli import explain

    with _libraries():
        from .dashboard.report import report
    return report(explain.find_directory(options.run_dir), options.out)


@contextmanager
def _libraries(extra: str = "dashboard") -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"this command needs libraries that are not installed ({error}); install them with: pip install 'mt-resilient[{extra}]'"
        ) from error


def _completion(options: argparse.Namespace) -> int:
    with _libraries("completion"):
        import shtab
    from .options import parser

    def files(within: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Let the shell complete the name of a file wherever the command line takes one."""
        for action in within._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    files(command)
            elif action.type is Path or "DIR" in str(action.metavar):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        return within

    print(shtab.complete(files(parser()), shell=options.shell))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from .simulator.command import simulate
    from .simulator.scenario.costs import Costs

    if options.plots:
        with _libraries("plots"):
            import matplotlib  # noqa: F401
    return simulate(options, policies(options.config, values(options.set), costs=Costs))


def chaos(options: argparse.Namespace, command: list[str]) -> int:
    """Inject faults into a job, and check the results. command: the arguments after the two dashes."""
    from .chaos.command import chaos

    return chaos(options, command, policies(options.config, values(options.set)))


def _preflight(options: argparse.Namespace) -> int:
    from .agent.preflight.run import alone
    from .checkpoint.backend import place
    from .checkpoint.backend.filesystem import Files
    from .resilience.errors import NodeUnfit

    found = policies(options.config, values(options.set))
    kept, folder = found["snapshots"], options.run_dir.absolute()
    places = (place.at(place.address(options.snapshots or str(folder), kept.endpoint, kept.region)), Files(folder))
    failed: list[str] = []
    for check in alone(found["preflight"], sys.executable, 0, places, os.environ):
        print(f"{'FAILED' if check.reasons else 'ok':8}{check.what}: {'; '.join(check.reasons) or check.figures}")
        failed += check.reasons
    if failed:
        raise NodeUnfit(f"this node is not fit to train ({len(failed)} of the checks above have failed); fix it first")
    return 0


_FORMATS = {"export": _export, "import": _import}
COMMANDS = {
    "preflight": _preflight,
    "status": _status,
    "explain": _explain,
    "logs": _logs,
    "snapshots": _snapshots,
    "simulate": _simulate,
    "dashboard": _dashboard,
    "report": _report,
    "completion": _completion,
}
"""Commands that send no order. `run` is not among them, because it also needs the unparsed arguments."""
