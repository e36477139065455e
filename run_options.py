"""The options of `run`, and the options that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .resilience.errors import UsageError

RUNS = "mt-runs/"
"""Where run directories are, if the command line names none."""


def add_command(commands: Any, name: str, does: str, example: str, **further: str) -> Any:
    """Add a command. does: what it does, a sentence without capital letter and full stop. example: the words of a command line."""
    texts = {"description": f"{does[0].upper()}{does[1:]}.", "epilog": f"Example: mt-resilient {example}"}
    return commands.add_parser(name, help=does, **{**texts, **further})


def many(parser: argparse.ArgumentParser, option: str, metavar: str, what: str) -> None:
    """Add an option that may be given several times."""
    parser.add_argument(option, action="append", default=[], metavar=metavar, help=f"{what}; may be repeated")


def configuration_options(
    parser: argparse.ArgumentParser, further: str = "", one: str = "set one configuration value"
) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"configuration file in TOML{further}")
    many(parser, "--set", "SECTION.KEY=VALUE", one)


def hosts_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only a launch with `--hostfile` uses."""
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="start an agent on each host in FILE, by ssh")
    many(parser, "--ssh-option", "KEY=VALUE", "option for ssh -o")
    many(parser, "--export", "NAME", "pass this environment variable to the hosts, too")


def run_options(commands: Any) -> None:
    """Add the command `run`. An option that is short for a configuration value is stored under that value's name."""
    run = add_command(
        commands,
        "run",
        "run a torchrun command, and restart or rewind it after each fault",
        "run --snapshots s3://bucket/gpt -- torchrun --nproc-per-node 8 train.py",
        usage="mt-resilient run [options] -- torchrun …",
    )
    add = run.add_argument
    add("--run-dir", type=Path, metavar="DIR", help="directory for all files of the job (default: mt-runs/<script>)")
    add("--run-dirs", default=RUNS, help=argparse.SUPPRESS)  # for the torchruns of a script
    add("--invocation", default="", help=argparse.SUPPRESS)  # for the torchruns of a script: names its start
    add(
        "--snapshots",
        metavar="DIR|URL",
        help="place for snapshots on disk: a directory, s3://… or gs://… (default: the run directory)",
    )
    add("--start-from", metavar="DIR|URL", help="start from the newest snapshot of another run, in any parallel layout")
    many(run, "--skip-data", "FROM:TO", "skip the global batches FROM to TO-1 of the data, counted from 0")
    configuration_options(run)
    add("--etcd", dest="control.etcd", metavar="HOST:PORT,…", help="endpoints of etcd (default: start one)")
    add("--job", dest="control.job", metavar="NAME", help="the job's name, the same on all its nodes")
    add(
        "--nodes",
        dest="nodes.number",
        metavar="N|MIN:MAX",
        help="number of nodes that train (default: torchrun's --nnodes, or 1)",
    )
    add("--spares", dest="nodes.spares", type=int, metavar="K", help="number of nodes that stand by (default: 0)")
    add("--node", dest="control.node", metavar="NAME", help="this node's name (default: the host's)")
    add(
        "--address",
        dest="control.address",
        metavar="HOST",
        help="address at which other nodes reach this one (default: its address on the way to etcd)",
    )
    many(run, "--label", "KEY=VALUE", "label of this node; nodes with the same rack=NAME are assumed to fail together")
    hosts_options(run)
    for option, key, where in (("snapshot", "every_steps", "in memory"), ("durable", "durable_every_steps", "on disk")):
        what = f"steps between snapshots {where} (default: chosen by what a snapshot costs)"
        add(f"--{option}-every", dest=f"snapshots.{key}", type=int, metavar="STEPS", help=what)
    for option, key, value, what in (
        ("--observe", "agent.observe", "true", "detect and report faults, but change nothing (for a first trial)"),
        ("--preflight", "preflight.enabled", "true", "check each node before it joins; a node that fails is not used"),
        ("--last-snapshot", "agent.last_snapshot", "true", "take a snapshot before the job ends on Ctrl-C or SIGTERM"),
        (
            "--changed-arguments",
            "agent.changed_arguments",
            "true",
            "continue the job although the script's arguments have changed",
        ),
        ("--no-warm", "agent.warm", "false", "start all ranks cold, each in a fresh interpreter"),
    ):
        add(option, dest=key, action="store_const", const=value, help=what)
    add(
        "--metrics-port",
        dest="agent.metrics_port",
        type=int,
        metavar="PORT",
        help="port of /metrics (default: the first free one from 9464 on; 0: any free port)",
    )
    add("--dry-run", action="store_true", help="print how the command is interpreted, and start nothing")
    add("--quiet", action="store_true", help="print warnings and errors only")
    add("wrapped", nargs="*", metavar="-- torchrun …", help="the command to run")


def policies(file: Path | None = None, flags: Mapping[str, str] | None = None, **further: type) -> dict[str, Any]:
    """Return the configuration's policies, by section."""
    from .agent.policies import SECTIONS
    from .resilience.config import load

    return load({**SECTIONS, **further}, file, os.environ, flags or {})


def values(pairs: Sequence[str]) -> dict[str, str]:
    """Return the values of `--set`, by name. Raises UsageError."""
    flags = {}
    for pair in pairs:
        dotted, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set {pair}: write it as --set section.key=value")
        flags[dotted] = value
    return flags
