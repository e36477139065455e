"""Runs the command `run`: a torchrun on this node or on the hosts of a hostfile, or a script that starts torchruns."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import options as known
from .agent.launch import handover
from .resilience.errors import MachineError, UsageError
from .resilience.text.formatting import printable
from .run_options import RUNS, hosts_options, policies, values

if TYPE_CHECKING:
    from .agent.join.identity import ControlPolicy
    from .agent.join.static_nodes import Placed


def run(options: argparse.Namespace, command: list[str], words: list[str]) -> int:
    """Run a job, on this node or on the hosts of a hostfile. command: the arguments after the two dashes. words: the arguments between
    `run` and the dashes."""
    from .agent.bootstrap import run_job
    from .agent.join import identity
    from .agent.join.exit_report import leave
    from .agent.join.static_nodes import place
    from .agent.launch.launcher_program import is_script
    from .agent.output.terminal import Terminal
    from .resilience.model.data_windows import Window

    _standing()
    if (
        handover.WRAPS in os.environ
    ):  # inside a wrapped script: this agent serves the torchrun, and no second agent is needed
        clean = handover.cleaned(os.environ)
        os.environ.clear()
        os.environ.update(clean)
        del sys.argv[1:]  # the command to give again is that of the script
    script = is_script(command)
    flags = values(options.set)
    if options.label:
        flags["control.labels"] = ",".join(options.label)
    # An option that is short for a configuration value is stored under that value's name.
    flags |= {name: str(value) for name, value in vars(options).items() if "." in name and value is not None}
    found = policies(options.config, flags)
    windows = [Window.parse(text) for text in options.skip_data]
    terminal = Terminal(options.quiet)
    _fitting(options, command, found["control"], script=script)
    if options.dry_run:
        return _dry_run(options, command, found, script=script)
    if script:
        _run_script(options, command, words)
    if options.hostfile:
        return _run_on_hosts(options, command, words, found, terminal)
    asked = found["nodes"]
    try:
        placed = place(command, found, options.invocation)
        if options.run_dirs != RUNS and not (placed.found or asked.number or asked.spares):
            identity.counted(placed.nodes, placed.control, found["agent"], options.snapshots)
    except UsageError as error:
        # Wrong options of `mt-resilient run` itself, and snapshots of another job, are no reason to run a torchrun of a script without an
        # agent: a training would then begin anew that the user wants to continue.
        if options.run_dirs == RUNS:
            raise
        what = printable(str(error).replace("; nothing was started", ""))
        print(f"mt-resilient: {what}. This torchrun runs without mt-resilient", file=sys.__stderr__, flush=True)
        _become(command, os.environ)

    def choose(busy: Collection[Path]) -> Path:
        return options.run_dir or _default_directory(options, placed, found, busy)

    return leave(run_job(command, placed, choose, options.snapshots, options.start_from, windows, found, terminal))


def _default_directory(
    options: argparse.Namespace, placed: Placed, chosen: dict[str, Any], busy: Collection[Path] = ()
) -> Path:
    """Return the run directory if the user names none. Agents that one srun has started, each for a training of its own, are numbered."""
    from .agent.join import identity
    from .agent.launch import scheduler_env
    from .agent.run_choice import default_directory

    alone = identity.alone(placed.launch, chosen["control"], chosen["nodes"])
    task = scheduler_env.task(os.environ) if alone else ""
    runs, once = options.run_dirs, options.run_dirs == RUNS
    return default_directory(placed.launch, placed.below, runs, busy, task, placed.invocation, once=once)


def _fitting(options: argparse.Namespace, command: list[str], control: ControlPolicy, *, script: bool) -> None:
    """Raise UsageError if options contradict each other or do not fit the command."""
    if options.hostfile and script:
        raise UsageError(
            f"--hostfile starts torchrun on each host, and {command[0]} is not torchrun; nothing was started. Omit --hostfile if the "
            "script starts torchrun on the hosts itself, by ssh"
        )
    if options.hostfile and (control.node or control.address or options.label):
        raise UsageError(
            "--node, --address and --label are for one node, and the hostfile names several (write rack=NAME after a host in it); "
            "nothing was started"
        )
    if not options.hostfile and (options.ssh_option or options.export):
        raise UsageError("--ssh-option and --export are for --hostfile; nothing was started")


def _dry_run(options: argparse.Namespace, command: list[str], chosen: dict[str, Any], *, script: bool) -> int:
    from .agent.join import dry_run, identity
    from .agent.join.registration import described
    from .agent.join.static_nodes import place
    from .agent.launch import python_check, rank_count
    from .agent.launch.layout_adviser import simumax
    from .agent.launch.megatron_layout import fitting, sentences
    from .agent.run_directory import RunDirectory
    from .resilience.membership.rank_assignment import sizes

    if script:
        print(dry_run.printed(dry_run.of_script(command)))
        return 0
    placed = place(command, chosen, hostfile=bool(options.hostfile))
    launch, control, nodes, found = placed.launch, placed.control, placed.nodes, placed.found
    directory = (options.run_dir or _default_directory(options, placed, chosen)) / placed.below
    if not options.hostfile:  # each host has its own Python and devices
        launch = rank_count.counted(python_check.checked(launch, os.environ), os.environ)
        numbers, _ = identity.counted(
            nodes, control, chosen["agent"], options.snapshots or (str(directory) if found else None)
        )
    else:
        numbers = sizes(nodes.number or "1")
    spec = described(launch, ())
    elsewhere = bool(control.etcd and not found)  # only that etcd knows the job's arguments
    changed = chosen["agent"].changed_arguments or elsewhere
    adviser = partial(simumax, nodes) if nodes.simumax_model else None
    told = {
        "run directory": f"{directory}, {dry_run.state(RunDirectory(directory), spec, changed=changed)}",
        "other layouts": "; ".join(sentences(launch, numbers, fitting(launch, numbers, adviser)))
        if launch.ranks
        else "",
        "spares": str(nodes.spares or ""),
        "this node": control.node,
        "job": control.job,
        "etcd": "" if found else control.etcd,
        "snapshots": options.snapshots or "",
    }
    if options.hostfile:
        told["hosts"] = f"an agent on each host in {options.hostfile}, by ssh"
    print(dry_run.printed(dry_run.of_launch(launch, command, nodes.number, found, told)))
    return 0


def _run_script(options: argparse.Namespace, command: list[str], words: list[str]) -> NoReturn:
    """Replace this process by `command`, a script whose torchruns are handed to agents."""
    from .agent.join import dry_run

    if options.run_dirs != RUNS:  # it was handed over as a torchrun, but is not one
        _become(command, os.environ)
    paths = known.Parser()
    for option in ("--run-dir", "--run-dirs", "--config", "--snapshots", "--start-from"):
        paths.add_argument(option)
    given, rest = paths.parse_known_args(words)
    runs = os.path.abspath(given.run_dir) if given.run_dir else f"{os.path.abspath(options.run_dirs)}/"
    ours = ["--run-dirs", runs, "--invocation", secrets.token_hex(4)]
    for option in ("config", "snapshots", "start_from"):
        if value := getattr(given, option):
            where = value if "://" in value else os.path.abspath(value)  # the script may change into another directory
            rest += [f"--{option.replace('_', '-')}", where]
    if not options.quiet:
        print(
            f"mt-resilient: {command[0]} is not torchrun. It runs unchanged, and an agent runs each torchrun that it starts, here or by "
            "ssh. If it starts none, no training is watched",
            file=sys.__stderr__,  # printed immediately, because the script replaces this process
            flush=True,
        )
    if lost := dry_run.unwatched(command):
        print(f"mt-resilient: {printable(lost)}", file=sys.__stderr__, flush=True)
    _become(command, handover.environment([*rest, *ours], os.environ, command))


def _become(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    try:
        handover.become(command, environ)
    except OSError as error:
        raise MachineError(
            f"{command[0]} cannot be run ({error.strerror}); nothing was started. Check that it runs without mt-resilient"
        ) from error


def _standing() -> None:
    """Raise MachineError if the working directory has been deleted, because torch cannot be imported there."""
    try:
        os.getcwd()
    except OSError as error:
        raise MachineError(
            f"the working directory cannot be found ({error.strerror}); nothing was started. Change into an existing directory"
        ) from error


def _run_on_hosts(
    options: argparse.Namespace, command: list[str], words: list[str], found: dict[str, Any], terminal: Any
) -> int:
    from .agent.launch.torchrun import understand
    from .agent.run_choice import default_directory
    from .agent.ssh.hostfile_launch import Wanted, launch_on_hosts

    control, nodes = found["control"], found["nodes"]
    ours = known.Parser()
    hosts_options(ours)
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
        kept=found["snapshots"],
        ending_s=found["preemption"].budget_s + 60.0,
        words=tuple(ours.parse_known_args(words)[1]),
    )
    launch = understand(command, os.environ)
    return launch_on_hosts(wanted, launch, command, options.run_dir or default_directory(launch), terminal)
