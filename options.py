"""The parser of all commands and their options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .resilience.errors import UsageError


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message}; see: {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    whole = Parser(
        prog="mt-resilient",
        description="Training that survives faults: any fault costs seconds, and the bits stay the same.",
    )
    whole.add_argument("--version", action="store_true", help="print the version and exit")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _run_options(commands)
    check = commands.add_parser("preflight", help="check this node alone: devices, memory, storage")
    check.add_argument("--snapshots", metavar="DIR|URL", help="where snapshots would go (default: the run directory)")
    _configuration_options(check)
    check.add_argument("--run-dir", type=Path, metavar="DIR", default=Path("mt-runs"), help="(default: mt-runs)")
    status = commands.add_parser("status", help="what a running job is doing")
    status.add_argument("--json", action="store_true", help="as one JSON object")
    explain = commands.add_parser("explain", help="the story of an incident, or of all")
    explain.add_argument("incident", nargs="?", help="its number, as the list shows it")
    _simulate_options(commands)
    orders = _order_actions(commands)
    snapshots = commands.add_parser(
        "snapshots", help="list, verify or digest the durable snapshots; take them to other formats"
    )
    for command in (status, explain, *orders, snapshots):
        command.add_argument(
            "--run-dir", type=Path, metavar="DIR", help="the job's run directory (default: the newest in mt-runs)"
        )
    _snapshot_actions(snapshots.add_subparsers(dest="action", required=True, parser_class=Parser))
    return whole


def _run_options(commands: Any) -> None:
    run = commands.add_parser(
        "run", help="run a torchrun command and keep it alive", usage="mt-resilient run [options] -- torchrun …"
    )
    run.add_argument("--run-dir", type=Path, metavar="DIR", help="everything about the job (default: mt-runs/<script>)")
    run.add_argument(
        "--snapshots",
        metavar="DIR|URL",
        help="where durable snapshots go: a directory, s3://… or gs://… (default: the run directory)",
    )
    run.add_argument(
        "--start-from",
        metavar="DIR|URL",
        help="begin with the newest snapshot of another run, in whatever layout it was",
    )
    run.add_argument(
        "--skip-data",
        action="append",
        default=[],
        metavar="FROM:TO",
        help="leave these global batches of the data out, counted from 0, TO not included; may be given again",
    )
    _configuration_options(run)
    run.add_argument("--etcd", metavar="HOST:PORT,…", help="etcd endpoints (default: an etcd of its own)")
    run.add_argument("--job", metavar="NAME", help="with several nodes: the job's name, the same on each")
    run.add_argument("--nodes", metavar="N|MIN:MAX", help="how many nodes train (default: what --nnodes says, or 1)")
    run.add_argument("--spares", type=int, metavar="K", help="further nodes that stand by (default 0)")
    run.add_argument("--node", metavar="NAME", help="this node's name (default: the host's)")
    run.add_argument("--address", metavar="HOST", help="where other nodes reach this one (default: as etcd sees it)")
    run.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of this node: rack=NAME says which nodes are lost together; may be given again",
    )
    hosts_options(run)
    run.add_argument(
        "--snapshot-every", type=int, metavar="STEPS", help="steps between snapshots in memory (default: by their cost)"
    )
    run.add_argument(
        "--durable-every", type=int, metavar="STEPS", help="steps between snapshots on disk (default: by their cost)"
    )
    run.add_argument(
        "--observe", action="store_true", help="judge and tell everything, and do nothing about it: for the first days"
    )
    run.add_argument(
        "--preflight", action="store_true", help="check each node before it joins; one that fails is not used"
    )
    run.add_argument("--last-snapshot", action="store_true", help="take a snapshot before leaving on Ctrl-C or SIGTERM")
    run.add_argument("--no-warm", action="store_true", help="start every worker group cold")
    run.add_argument("--metrics-port", type=int, metavar="PORT", help="port of /metrics (default 9464; 0: a free one)")
    run.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    run.add_argument("wrapped", nargs="*", metavar="-- torchrun …", help="the command to keep alive")


def _configuration_options(
    parser: argparse.ArgumentParser, further: str = "", one: str = "one configuration value"
) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"configuration in TOML{further}")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=one)


def hosts_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only a launch with `--hostfile` uses."""
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="start an agent on each of these hosts, by ssh")
    parser.add_argument(
        "--ssh-option", action="append", default=[], metavar="KEY=VALUE", help="as for ssh -o; may be given again"
    )
    parser.add_argument(
        "--export", action="append", default=[], metavar="NAME", help="a further variable for these hosts' environment"
    )


def _order_actions(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the commands that send an order to a running job."""
    rewind = commands.add_parser("rewind", help="go back to a step that is kept, and wait until all ranks have")
    rewind.add_argument("--to", required=True, type=_count, metavar="STEP", help="the state after so many steps")
    rewind.add_argument(
        "--skip", type=_count, default=0, metavar="N", help="leave the N batches out that would follow, for good"
    )
    pause = commands.add_parser("pause", help="let the ranks wait at their next boundary; nothing is lost")
    resume = commands.add_parser("resume", help="let paused ranks go on")
    snapshot = commands.add_parser("snapshot", help="snapshot now: one on disk; wait until it is there")
    snapshot.add_argument("when", choices=["now"])
    drain = commands.add_parser("drain", help="take a snapshot, then leave a node, before its maintenance")
    drain.add_argument("node", metavar="NODE", help="as status names it")
    readmit = commands.add_parser("readmit", help="let a node train again that its own faults have shut out")
    readmit.add_argument("node", metavar="NODE", help="as status names it")
    stop = commands.add_parser("stop", help="end the job as Ctrl-C does; the same command goes on")
    stop.add_argument("--last-snapshot", action="store_true", help="take a snapshot before")
    return [rewind, pause, resume, snapshot, drain, readmit, stop]


def _simulate_options(commands: Any) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="what a training on a whole cluster would lose to faults",
        description="Plays a training on a cluster of any size, with faults that a seed draws, and the decisions that this program would "
        "take. No GPU, network or store is touched; a seed gives the same run every time.",
    )
    simulate.add_argument("--gpus", type=_count, default=16384, help="in all, spares left out (default %(default)s)")
    simulate.add_argument(
        "--per-node", type=_count, default=8, metavar="N", help="GPUs of a node (default %(default)s)"
    )
    simulate.add_argument("--days", type=float, default=54.0, help="how long it trains (default %(default)g)")
    simulate.add_argument(
        "--faults",
        default="llama3",
        metavar="MODEL,…",
        help="what strikes: llama3, stepfun, failslow, spikes, none, several with commas, or a file that ends in .toml (default llama3)",
    )
    simulate.add_argument(
        "--rate", type=float, default=1.0, metavar="X", help="so many times as many faults (default %(default)g)"
    )
    simulate.add_argument(
        "--spares",
        type=_count,
        metavar="N",
        help="nodes that wait, to take others' places (default: nodes.spares, or 64)",
    )
    simulate.add_argument(
        "--least",
        type=_count,
        metavar="N",
        help="nodes to go on with at the least (default: by nodes.number, or only with all)",
    )
    simulate.add_argument("--no-buddies", action="store_true", help="keep no copies in other nodes' memory")
    simulate.add_argument("--seed", type=_count, default=0, help="which run of all that may be (default %(default)s)")
    _configuration_options(
        simulate,
        ": what simulate hears of run's (docs/scaling.md), and a section [costs]",
        "one value, such as costs.step_s=3",
    )
    simulate.add_argument(
        "--sensitivity", action="store_true", help="also a table: restart time x snapshot interval x faults"
    )
    simulate.add_argument("--json", action="store_true", help="as one JSON object")
    simulate.add_argument("--plots", type=Path, metavar="DIR", help="write pictures (SVG) there")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


def _snapshot_actions(actions: Any) -> None:
    ls = actions.add_parser("ls", help="the committed snapshots on disk")
    verify = actions.add_parser("verify", help="read every byte and check every checksum")
    digest = actions.add_parser(
        "digest", help="SHA-256 of the state alone: equal for two runs that ended in the same bits"
    )
    for action in (ls, verify, digest):
        action.add_argument(
            "snapshot",
            nargs="?",
            help="a step, a snapshot's directory or URL, or a run or place of several (default: all of the run; digest: the newest)",
        )
    digest.add_argument(
        "--global",
        action="store_true",
        dest="whole",
        help="digest of the global tensors, the same in every parallel layout",
    )
    export = actions.add_parser("export", help="write whole tensors by name for other programs")
    export.add_argument("snapshot", help="a step, a snapshot's directory or URL, or a run (its newest)")
    export.add_argument("--to", required=True, choices=["dcp", "safetensors"], help="format")
    export.add_argument("target", metavar="DIR", help="a new directory; it appears when all is in it")
    export.add_argument(
        "--only", action="append", metavar="SOURCE", help="leave out all but this part of the state, as model"
    )
    bring = actions.add_parser(
        "import", help="make a snapshot of another program's checkpoint; run --start-from begins with it"
    )
    bring.add_argument("--from", required=True, choices=["dcp", "megatron"], dest="kind", help="format")
    bring.add_argument(
        "source", metavar="SRC", help="torch.distributed.checkpoint's directory, or Megatron's (torch_dist)"
    )
    bring.add_argument("--snapshots", metavar="DIR|URL", help="a new place, for --start-from; as --run-dir")
    bring.add_argument("--step", type=int, help="of which step it is, where it does not say")
    for action in (ls, verify, digest, export, bring):
        # The option is also allowed after the action.
        action.add_argument("--run-dir", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
