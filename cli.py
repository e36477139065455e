"""The command line: parses, calls, prints. Sub-commands import what they need, so that `--help` is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .resilience.errors import ResilientError, UsageError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message}; see: {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mt-resilient",
        description="Training that survives faults: any fault costs seconds, and the bits stay the same.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
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
    run.add_argument("--config", type=Path, metavar="FILE", help="configuration in TOML")
    run.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one configuration value")
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
    _hosts_options(run)
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
    run.add_argument("--no-warm", action="store_true", help="start every gang cold")
    run.add_argument("--metrics-port", type=int, metavar="PORT", help="port of /metrics (default 9464; 0: a free one)")
    run.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    run.add_argument("wrapped", nargs="*", metavar="-- torchrun …", help="the command to keep alive")
    check = commands.add_parser("preflight", help="check this node alone: devices, memory, storage")
    check.add_argument("--snapshots", metavar="DIR|URL", help="where snapshots would go (default: the run directory)")
    check.add_argument("--config", type=Path, metavar="FILE", help="configuration in TOML")
    check.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one configuration value"
    )
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
    _snapshot_actions(snapshots.add_subparsers(dest="action", required=True, parser_class=_Parser))
    return parser


def _hosts_options(parser: argparse.ArgumentParser) -> None:
    """Those of the launching terminal alone."""
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="start an agent on each of these hosts, by ssh")
    parser.add_argument(
        "--ssh-option", action="append", default=[], metavar="KEY=VALUE", help="as for ssh -o; may be given again"
    )
    parser.add_argument(
        "--export", action="append", default=[], metavar="NAME", help="a further variable for these hosts' environment"
    )


def _order_actions(commands: Any) -> list[argparse.ArgumentParser]:
    """What can be ordered while a job runs."""
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
    stop = commands.add_parser("stop", help="end the job as Ctrl-C does; the same command goes on")
    stop.add_argument("--last-snapshot", action="store_true", help="take a snapshot before")
    return [rewind, pause, resume, snapshot, drain, stop]


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
        default=64,
        metavar="N",
        help="nodes that wait, to take others' places (default %(default)s)",
    )
    simulate.add_argument(
        "--least", type=_count, default=0, metavar="N", help="nodes to go on with at the least (default: only with all)"
    )
    simulate.add_argument("--no-buddies", action="store_true", help="keep no copies in other nodes' memory")
    simulate.add_argument("--seed", type=_count, default=0, help="which run of all that may be (default %(default)s)")
    simulate.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration in TOML: that of run, and a section [costs]"
    )
    simulate.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one value, such as costs.step_s=3"
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
        action.add_argument(
            "--run-dir", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )  # also behind the action


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or the error's own (see resilience/errors.py)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except ResilientError as error:
        print(f"mt-resilient: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `mt-resilient explain | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _dispatch(words: list[str]) -> int:
    cut = words.index("--") if "--" in words else len(words)
    launcher = next(
        (i for i, word in enumerate(words[:cut]) if Path(word).name.startswith(("torchrun", "python"))), None
    )
    if words[:1] == ["run"] and launcher is not None and cut == len(words):
        raise UsageError(f"the command goes after two dashes: mt-resilient run -- {' '.join(words[launcher:])}")
    options = _parser().parse_args(words[:cut])
    if options.version:
        from . import __version__

        print(f"mt-resilient {__version__}")
        return 0
    if options.command is None:
        _parser().print_help()
        return 0
    if options.command == "run":
        if options.wrapped:
            raise UsageError(f"the command goes after two dashes: mt-resilient run -- {' '.join(options.wrapped)} …")
        return _run(options, words[cut + 1 :], words[1:cut])
    if options.command == "preflight":
        return _preflight(options)
    if options.command == "snapshots":
        return {"export": _export, "import": _import}.get(options.action, _snapshots)(options)
    if options.command == "simulate":
        return _simulate(options)
    from .agent import inspect

    directory = inspect.find_directory(options.run_dir)
    if options.command == "status":
        return inspect.status(directory, options.json)
    if options.command == "explain":
        return inspect.explain(directory, options.incident)
    from .agent import ordering

    return ordering.order(directory, _request(options))


def _request(options: argparse.Namespace) -> Any:
    from .resilience.terms import Step
    from .resilience.wishes import Request, Wish

    match Wish(options.command):
        case Wish.REWIND:
            return Request(kind=Wish.REWIND, step=Step(options.to), skip=options.skip)
        case Wish.DRAIN:
            return Request(kind=Wish.DRAIN, node=options.node)
        case Wish.STOP:
            return Request(kind=Wish.STOP, snapshot=options.last_snapshot, exit_code=130)
        case wish:
            return Request(kind=wish)


def _snapshots(options: argparse.Namespace) -> int:
    from .agent import inspect

    return inspect.snapshots(_named(options), options.action, getattr(options, "whole", False))


def _export(options: argparse.Namespace) -> int:
    from .formats import exporting

    write = _dcp_writer() if options.to == "dcp" else exporting.safetensors
    print(exporting.export(_named(options)[0], write, Path(options.target), options.only or ()))
    return 0


def _named(options: argparse.Namespace) -> list[Any]:
    from .agent import inspect
    from .agent.job import SECTIONS
    from .resilience.config import load

    return inspect.named(options.snapshot, options.run_dir, load(SECTIONS, None, os.environ, {})["snapshots"])


def _import(options: argparse.Namespace) -> int:
    from .agent.job import SECTIONS
    from .checkpoint import stores
    from .formats import foreign, importing, megatron_files
    from .resilience.config import load

    where = options.snapshots or (str(options.run_dir) if options.run_dir else "")
    if not where or (options.snapshots and options.run_dir):
        raise UsageError(
            "say where the snapshot goes with --snapshots DIR|URL, or with --run-dir DIR; nothing was imported"
        )
    kept = load(SECTIONS, None, os.environ, {})["snapshots"]
    root = stores.at(stores.address(where, kept.endpoint, kept.region))
    found = (megatron_files.from_megatron if options.kind == "megatron" else foreign.from_torch)(Path(options.source))
    print(importing.told(importing.import_into(root, found, options.step), found, where))
    return 0


def _dcp_writer() -> Any:
    try:
        from .formats import dcp_export
    except ImportError as error:
        raise UsageError(
            f"torch is wanted for dcp, and cannot be imported ({error}); install it, or take --to safetensors"
        ) from error
    return dcp_export.write


def _simulate(options: argparse.Namespace) -> int:
    from .agent.job import SECTIONS
    from .resilience.config import load
    from .simulator.command import setting, simulate
    from .simulator.costs import Costs

    policies = load({**SECTIONS, "costs": Costs}, options.config, os.environ, _set(options.set))
    what = setting(
        gpus=options.gpus,
        per_node=options.per_node,
        days=options.days,
        spares=options.spares,
        least=options.least,
        rate=options.rate,
        seed=options.seed,
        buddies=not options.no_buddies,
        policies=policies,
    )
    return simulate(what, options.faults, as_json=options.json, plots_in=options.plots, table=options.sensitivity)


def _run(options: argparse.Namespace, command: list[str], words: list[str]) -> int:
    from .agent.job import SECTIONS, run_job
    from .agent.terminal import Terminal
    from .resilience.config import load
    from .resilience.windows import Window

    flags = _set(options.set)
    shorthands = {
        "control.etcd": options.etcd,
        "control.job": options.job,
        "control.node": options.node,
        "control.address": options.address,
        "control.labels": ",".join(options.label) or None,
        "nodes.number": options.nodes,
        "nodes.spares": options.spares,
        "snapshots.every_steps": options.snapshot_every,
        "snapshots.durable_every_steps": options.durable_every,
        "agent.observe": "true" if options.observe else None,
        "preflight.enabled": "true" if options.preflight else None,
        "agent.last_snapshot": "true" if options.last_snapshot else None,
        "agent.warm": "false" if options.no_warm else None,
        "agent.metrics_port": options.metrics_port,
    }
    flags |= {key: str(value) for key, value in shorthands.items() if value is not None}
    policies = load(SECTIONS, options.config, os.environ, flags)
    windows = [Window.parse(text) for text in options.skip_data]
    terminal = Terminal(options.quiet)
    if options.hostfile:
        return _run_on_hosts(options, command, words, policies, terminal)
    if options.ssh_option or options.export:
        raise UsageError("--ssh-option and --export are for --hostfile; nothing was started")
    return run_job(command, options.run_dir, options.snapshots, options.start_from, windows, policies, terminal)


def _set(pairs: Sequence[str]) -> dict[str, str]:
    flags = {}
    for pair in pairs:
        dotted, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set {pair}: write it as --set section.key=value")
        flags[dotted] = value
    return flags


def _preflight(options: argparse.Namespace) -> int:
    from .agent.checks import alone
    from .agent.job import SECTIONS
    from .checkpoint import stores
    from .checkpoint.files import Files
    from .resilience.config import load
    from .resilience.errors import NodeUnfit

    policies = load(SECTIONS, options.config, os.environ, _set(options.set))
    kept, folder = policies["snapshots"], options.run_dir.absolute()
    places = (stores.at(stores.address(options.snapshots or str(folder), kept.endpoint, kept.region)), Files(folder))
    failed: list[str] = []
    for check in alone(policies["preflight"], sys.executable, 0, places, os.environ):
        print(f"{'FAILED' if check.reasons else 'ok':8}{check.what}: {'; '.join(check.reasons) or check.figures}")
        failed += check.reasons
    if failed:
        raise NodeUnfit(f"this node is not fit to train ({len(failed)} of the checks above have failed); mend it first")
    return 0


def _run_on_hosts(
    options: argparse.Namespace, command: list[str], words: list[str], policies: dict[str, Any], terminal: Any
) -> int:
    from .agent.hostfile_job import Wanted, launch_on_hosts
    from .agent.job import default_directory
    from .agent.launch import understand

    control, nodes = policies["control"], policies["nodes"]
    if control.node or control.address or options.label:
        raise UsageError(
            "--node, --address and --label are for one node, and the hostfile names several (write rack=NAME behind a host in it); "
            "nothing was started"
        )
    ours = _Parser()
    _hosts_options(ours)
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
        ending_s=policies["preemption"].budget_s + 60.0,
        words=tuple(ours.parse_known_args(words)[1]),
    )
    launch = understand(command, os.environ)
    return launch_on_hosts(wanted, launch, command, options.run_dir or default_directory(launch), terminal)


if __name__ == "__main__":
    raise SystemExit(main())
