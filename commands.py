"""Runs the commands of the command line. Imports are inside functions, so that `--help` is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import options as known
from . import run_options
from .resilience.errors import MachineError, UsageError


def order(options: argparse.Namespace) -> int:
    """Send an order to a running job. Each `Wish` (kind of order) is a command of the same name."""
    from .agent.cli import explain, rewind_notice, send_request
    from .resilience.model.request import Request, Wish

    directory = explain.find_directory(options.run_dir)
    match Wish(options.command):
        case Wish.REWIND:
            request = rewind_notice.request(directory, options.to, options.skip)
        case Wish.DRAIN | Wish.READMIT as wish:
            request = Request(kind=wish, node=options.node)
        case Wish.STOP:
            request = Request(kind=Wish.STOP, snapshot=options.last_snapshot, exit_code=130)
        case wish:
            request = Request(kind=wish)
    return send_request.order(directory, request)


def _status(options: argparse.Namespace) -> int:
    from .agent.cli import explain
    from .agent.cli.status import status

    return status(explain.find_directory(options.run_dir), options.json)


def _explain(options: argparse.Namespace) -> int:
    from .agent.cli import explain

    return explain.explain(explain.find_directory(options.run_dir), options.incident)


def _snapshots(options: argparse.Namespace) -> int:
    from .agent.cli import explain, snapshots

    if options.action in _FORMATS:
        return _FORMATS[options.action](options)
    if options.action == "keep":
        return snapshots.keep(explain.find_directory(options.run_dir), options.snapshot, options.undo)
    if options.action == "rm":
        return snapshots.remove(explain.find_directory(options.run_dir), options.snapshot)
    if not getattr(options, "all", False):
        return snapshots.snapshots(_named(options), options.action, getattr(options, "whole", False))
    return snapshots.list_all(options.snapshot, options.run_dir, _policies()["snapshots"])


def _export(options: argparse.Namespace) -> int:
    from .formats import export, safetensors_files

    write = _dcp_writer() if options.to == "dcp" else safetensors_files.write
    print(export.export(_named(options)[0], write, Path(options.target), options.only or ()))
    return 0


def _named(options: argparse.Namespace) -> list[Any]:
    from .agent.cli import snapshots

    return snapshots.named(options.snapshot, options.run_dir, _policies()["snapshots"])


def _import(options: argparse.Namespace) -> int:
    from .checkpoint.backend import place
    from .formats import dcp_names, import_checkpoint, megatron_names

    where = options.snapshots or (str(options.run_dir) if options.run_dir else "")
    if not where or (options.snapshots and options.run_dir):
        raise UsageError(
            "say where the snapshot goes with --snapshots DIR|URL, or with --run-dir DIR; nothing was imported"
        )
    kept = _policies()["snapshots"]
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
    try:
        from .dashboard.server import serve
    except ImportError as error:
        raise UsageError(
            f"the dashboard needs libraries that are not installed ({error}); install them with: pip install 'mt-resilient[dashboard]'"
        ) from error
    return serve(options.runs, options.host, options.port, options.prometheus.rstrip("/"))


def _simulate(options: argparse.Namespace) -> int:
    from .simulator.command import simulate
    from .simulator.scenario.costs import Costs

    return simulate(options, _policies(options.config, _set(options.set), costs=Costs))


def run(options: argparse.Namespace, command: list[str], words: list[str]) -> int:
    """Run a job, on this node or on the hosts of a hostfile. command: the arguments after the two dashes. words: the arguments between
    `run` and the dashes."""
    from .agent.bootstrap import default_directory, run_job
    from .agent.join.exit_report import leave
    from .agent.launch.launcher_program import is_script
    from .agent.output.terminal import Terminal
    from .resilience.model.data_windows import Window

    _standing()
    script = is_script(command)
    flags = _set(options.set)
    if options.label:
        flags["control.labels"] = ",".join(options.label)
    # An option that is short for a configuration value is stored under that value's name.
    flags |= {name: str(value) for name, value in vars(options).items() if "." in name and value is not None}
    policies = _policies(options.config, flags)
    windows = [Window.parse(text) for text in options.skip_data]
    terminal = Terminal(options.quiet)
    if options.dry_run:
        return _dry_run(options, command, policies, script=script)
    if script:
        _run_script(options, command, words)
    if options.hostfile:
        return _run_on_hosts(options, command, words, policies, terminal)
    if options.ssh_option or options.export:
        raise UsageError("--ssh-option and --export are for --hostfile; nothing was started")
    directory = options.run_dir or (lambda launch, below: default_directory(launch, below, options.run_dirs))
    return leave(run_job(command, directory, options.snapshots, options.start_from, windows, policies, terminal))


def _dry_run(options: argparse.Namespace, command: list[str], policies: dict[str, Any], *, script: bool) -> int:
    from .agent.bootstrap import default_directory
    from .agent.join import dry_run, identity
    from .agent.join.static_nodes import static
    from .agent.launch import python_check
    from .agent.launch.torchrun import understand

    if script:
        print(dry_run.printed(dry_run.of_script(command)))
        return 0
    launch = python_check.checked(understand(command, os.environ), os.environ)
    control, nodes = identity.placed(launch, policies["control"], policies["nodes"])
    found = static(launch, control, nodes)
    control, below = (found.control, found.below) if found else (control, "")
    place = (options.run_dir or default_directory(launch, below, options.run_dirs)) / below
    if not options.hostfile:  # raises UsageError if an option is missing
        identity.counted(nodes, control, policies["agent"], options.snapshots or (str(place) if found else None))
    told = {
        "spares": str(nodes.spares or ""),
        "this node": control.node,
        "job": control.job,
        "etcd": "" if found else control.etcd,
        "snapshots": options.snapshots or "",
    }
    if options.hostfile:
        told["hosts"] = f"an agent on each host in {options.hostfile}, by ssh"
    print(dry_run.printed(dry_run.of_launch(launch, command, nodes.number, found, place, told)))
    return 0


def _run_script(options: argparse.Namespace, command: list[str], words: list[str]) -> NoReturn:
    """Become `command`, a script whose torchruns are handed to agents."""
    from .agent.launch.handover import environment

    if options.hostfile:
        raise UsageError(
            f"--hostfile starts torchrun on each host, and {command[0]} is not torchrun; nothing was started. Leave --hostfile out if the "
            "script starts torchrun on the hosts itself, by ssh"
        )
    paths = known.Parser()
    for option in ("--run-dir", "--run-dirs", "--config", "--snapshots", "--start-from"):
        paths.add_argument(option)
    given, rest = paths.parse_known_args(words)
    runs = os.path.abspath(given.run_dir) if given.run_dir else f"{os.path.abspath(options.run_dirs)}/"
    for option in ("config", "snapshots", "start_from"):
        if value := getattr(given, option):
            where = value if "://" in value else os.path.abspath(value)  # the script may change into another directory
            rest += [f"--{option.replace('_', '-')}", where]
    if not options.quiet:
        print(
            f"mt-resilient: {command[0]} is not torchrun. It runs as it is, and an agent runs each torchrun that it starts, here or by "
            "ssh. If it starts none, nothing is watched",
            file=sys.__stderr__,  # at once, because this process ends here
            flush=True,
        )
    environ = environment([*rest, "--run-dirs", runs], os.environ)
    os.execvpe(command[0], command, environ)


def _standing() -> None:
    """Raise MachineError if the working directory has been deleted, because torch cannot be imported there."""
    try:
        os.getcwd()
    except OSError as error:
        raise MachineError(
            f"the working directory cannot be found ({error.strerror}); nothing was started. Change into one that is there"
        ) from error


def _policies(file: Path | None = None, flags: Mapping[str, str] | None = None, **further: type) -> dict[str, Any]:
    """Return the configuration's policies, by section."""
    from .agent.policies import SECTIONS
    from .resilience.config import load

    return load({**SECTIONS, **further}, file, os.environ, flags or {})


def _set(pairs: Sequence[str]) -> dict[str, str]:
    flags = {}
    for pair in pairs:
        dotted, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set {pair}: write it as --set section.key=value")
        flags[dotted] = value
    return flags


def _preflight(options: argparse.Namespace) -> int:
    from .agent.preflight.run import alone
    from .checkpoint.backend import place
    from .checkpoint.backend.filesystem import Files
    from .resilience.errors import NodeUnfit

    policies = _policies(options.config, _set(options.set))
    kept, folder = policies["snapshots"], options.run_dir.absolute()
    places = (place.at(place.address(options.snapshots or str(folder), kept.endpoint, kept.region)), Files(folder))
    failed: list[str] = []
    for check in alone(policies["preflight"], sys.executable, 0, places, os.environ):
        print(f"{'FAILED' if check.reasons else 'ok':8}{check.what}: {'; '.join(check.reasons) or check.figures}")
        failed += check.reasons
    if failed:
        raise NodeUnfit(f"this node is not fit to train ({len(failed)} of the checks above have failed); fix it first")
    return 0


def _run_on_hosts(
    options: argparse.Namespace, command: list[str], words: list[str], policies: dict[str, Any], terminal: Any
) -> int:
    from .agent.bootstrap import default_directory
    from .agent.launch.torchrun import understand
    from .agent.ssh.hostfile_launch import Wanted, launch_on_hosts

    control, nodes = policies["control"], policies["nodes"]
    if control.node or control.address or options.label:
        raise UsageError(
            "--node, --address and --label are for one node, and the hostfile names several (write rack=NAME behind a host in it); "
            "nothing was started"
        )
    ours = known.Parser()
    run_options.hosts_options(ours)
    wanted = Wanted(
        hostfile=options.hostfile,
        ssh_options=tuple(options.ssh_option),
        export=tuple(options.export),
        endpoints=control.etcd,
        papers=control.papers(),
        nodes=nodes.number,
        spares=nodes.spares,
        job=control.job,
        snapshots=options.snapshots or "",
        kept=policies["snapshots"],
        ending_s=policies["preemption"].budget_s + 60.0,
        words=tuple(ours.parse_known_args(words)[1]),
    )
    launch = understand(command, os.environ)
    return launch_on_hosts(wanted, launch, command, options.run_dir or default_directory(launch), terminal)


_FORMATS = {"export": _export, "import": _import}
COMMANDS = {
    "preflight": _preflight,
    "status": _status,
    "explain": _explain,
    "snapshots": _snapshots,
    "simulate": _simulate,
    "dashboard": _dashboard,
}
"""Commands that send no order. `run` is not among them, because it also needs the unparsed arguments."""
