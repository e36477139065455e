"""The parser of all commands, and the options of all commands except `run`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .resilience.errors import UsageError
from .run_options import add_command, configuration_options, run_options


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message}; see: {self.prog} --help")

    def format_help(self) -> str:
        if not any(action.dest == "set" for action in self._actions):
            return super().format_help()
        from .agent.policies import SECTIONS
        from .resilience.config import overview

        sections = dict(SECTIONS)
        if self.prog.endswith(" simulate"):
            from .simulator.scenario.costs import Costs

            sections["costs"] = Costs
        heading = "configuration sections (--set SECTION.KEY=VALUE; docs/configuration.md has the keys):"
        return f"{super().format_help()}\n{heading}\n{overview(sections)}"


def parser() -> argparse.ArgumentParser:
    whole = Parser(
        prog="mt-resilient",
        description="Training that survives faults: any fault costs seconds, and the bits stay the same.",
        epilog="Example: mt-resilient run -- torchrun --nproc-per-node 8 train.py",
    )
    whole.add_argument("--version", action="store_true", help="print the version and exit")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    run_options(commands)
    check = add_command(
        commands, "preflight", "check memory, storage and devices of this node", "preflight --snapshots /shared/gpt"
    )
    check.add_argument(
        "--snapshots", metavar="DIR|URL", help="the job's storage for snapshots (default: the run directory)"
    )
    configuration_options(check)
    check.add_argument(
        "--run-dir", type=Path, metavar="DIR", default=Path("mt-runs"), help="run directory to check (default: mt-runs)"
    )
    status = add_command(commands, "status", "show what a running job is doing", "status")
    shown = status.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print one JSON object (docs/schemas/status.json)")
    shown.add_argument("--watch", action="store_true", help="show the job until it ends; Ctrl-C ends only this command")
    explain = add_command(
        commands, "explain", "explain what happened in an incident, what the program did, and what it cost", "explain 2"
    )
    explain.add_argument("--json", action="store_true", help="print a list of JSON objects (docs/schemas/explain.json)")
    explain.add_argument("incident", nargs="?", help="number of the incident, from status (default: all incidents)")
    logs = add_command(commands, "logs", "print what the ranks have printed", "logs --rank 3 --follow")
    logs.add_argument("--rank", type=_count, metavar="N", help="only the output of this rank (default: of all ranks)")
    which = logs.add_mutually_exclusive_group()
    which.add_argument("--incident", metavar="N", help="the output of the generation in which this incident happened")
    which.add_argument("--follow", action="store_true", help="also print new output, until the job ends")
    logs.add_argument(
        "--lines", type=_count, default=20, metavar="N", help="number of last lines; 0: all (default: %(default)s)"
    )
    _dashboard_options(commands)
    _report_options(commands)
    _simulate_options(commands)
    _chaos_options(commands)
    completion = add_command(
        commands,
        "completion",
        "print a script that lets a shell complete words of this command line",
        "completion bash > ~/.local/share/bash-completion/completions/mt-resilient",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    orders = _order_actions(commands)
    snapshots = add_command(
        commands,
        "snapshots",
        "list, check, keep, remove, export or import the snapshots on disk",
        "snapshots verify 1200",
    )
    for command in (status, explain, logs, *orders, snapshots):
        command.add_argument(
            "--run-dir", type=Path, metavar="DIR", help="the job's run directory (default: one in mt-runs)"
        )
    _snapshot_actions(snapshots.add_subparsers(dest="action", required=True, parser_class=Parser))
    return whole


def _dashboard_options(commands: Any) -> None:
    page = add_command(
        commands,
        "dashboard",
        "serve a web page about one job or many, while they train and after they have ended",
        "dashboard mt-runs/train",
    )
    add = page.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="run directories, or folders of them (default: mt-runs)")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; if others can reach it, they need a token (default: %(default)s)",
    )
    add("--port", type=_count, help="port to listen on; 0: any free port (default: the first free one from 9465 on)")
    add(
        "--prometheus",
        default="",
        metavar="URL",
        help="also show panels with data from this Prometheus; none: no panels (default: start Debian's, if installed)",
    )


def _report_options(commands: Any) -> None:
    report = add_command(
        commands,
        "report",
        "write one HTML file about a job, which opens without a server",
        "report mt-runs/train --out train.html",
    )
    report.add_argument(
        "run_dir", nargs="?", type=Path, metavar="RUN", help="run directory (default: the newest in mt-runs)"
    )
    report.add_argument("--out", type=Path, metavar="FILE", help="the file (default: report.html in the run directory)")


def _order_actions(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the commands that send an order to a running job."""
    rewind = add_command(
        commands,
        "rewind",
        "go back to an earlier step, and wait until all ranks are there",
        "rewind --to 1200 --skip 2",
    )
    rewind.add_argument(
        "--to",
        required=True,
        type=_step_or_name,
        metavar="STEP|NAME",
        help="step to go back to: the state after so many steps; or the name of a snapshot that an earlier rewind set aside",
    )
    rewind.add_argument(
        "--skip", type=_count, default=0, metavar="N", help="skip the next N batches permanently (default: 0)"
    )
    pause = add_command(commands, "pause", "make all ranks wait at their next boundary; nothing is lost", "pause")
    resume = add_command(commands, "resume", "let paused ranks continue", "resume")
    snapshot = add_command(
        commands, "snapshot", "take a snapshot, and wait until it is on disk", "snapshot now --run-dir mt-runs/train"
    )
    snapshot.add_argument("when", choices=["now"])
    drain = add_command(commands, "drain", "take a snapshot, then release a node for its maintenance", "drain gpu-07")
    readmit = add_command(commands, "readmit", "end a node's quarantine, so that it may train again", "readmit gpu-07")
    for command in (drain, readmit):
        command.add_argument("node", metavar="NODE", help="the node's name, from status")
    stop = add_command(
        commands, "stop", "end the job as Ctrl-C does; the same command continues it", "stop --last-snapshot"
    )
    stop.add_argument("--last-snapshot", action="store_true", help="take a snapshot first")
    return [rewind, pause, resume, snapshot, drain, readmit, stop]


def _simulate_options(commands: Any) -> None:
    simulate = add_command(
        commands,
        "simulate",
        "compute what faults would cost a training on a whole cluster",
        "simulate --gpus 4096 --days 30 --spares 8",
        description="Simulate a training on a cluster of any size. A seed draws the faults, and this program's own decisions answer them. "
        "It uses no GPU, network or etcd. The same seed gives the same run every time.",
    )
    add = simulate.add_argument
    add("--gpus", type=_count, default=16384, help="number of GPUs, without spares (default: %(default)s)")
    add("--per-node", type=_count, default=8, metavar="N", help="GPUs of a node (default: %(default)s)")
    add("--days", type=float, default=54.0, help="length of the training (default: %(default)g)")
    add(
        "--faults",
        default="llama3",
        metavar="MODEL,…",
        help="models of faults: llama3, stepfun, failslow, spikes, none, or a file that ends in .toml (default: %(default)s)",
    )
    add(
        "--rate", type=float, default=1.0, metavar="X", help="multiply the number of faults by X (default: %(default)g)"
    )
    add("--spares", type=_count, metavar="N", help="number of nodes that stand by (default: nodes.spares, or 64)")
    add(
        "--least",
        type=_count,
        metavar="N",
        help="least number of nodes that may train (default: by nodes.number, or all nodes)",
    )
    add("--no-buddies", action="store_true", help="keep no copies in other nodes' memory")
    add("--seed", type=_count, default=0, help="seed of the random draws (default: %(default)s)")
    configuration_options(
        simulate,
        ", as for run (docs/scaling.md says which keys count), and the section [costs]",
        "set one configuration value, such as costs.step_s=3",
    )
    add("--sensitivity", action="store_true", help="also print a table: restart time x snapshot interval x faults")
    add("--json", action="store_true", help="print one JSON object")
    add("--plots", type=Path, metavar="DIR", help="write plots (PNG and SVG) into DIR")


def _chaos_options(commands: Any) -> None:
    chaos = add_command(
        commands,
        "chaos",
        "run a command with faults injected for real, and check that nothing is lost",
        "chaos --seed 1 -- torchrun --nproc-per-node 2 train.py",
        usage="mt-resilient chaos [PLAN.toml | --seed N] [options] -- torchrun …",
        description="Run a torchrun command under torchrun alone, under mt-resilient, and under mt-resilient with faults. Print one page: "
        "the faults, their answers, and whether each promise was kept. Exit code 0: all were; 1: not all; docs/chaos.md has the others.",
    )
    add = chaos.add_argument
    add("plan", nargs="?", type=Path, metavar="PLAN.toml", help="which faults strike what and when (docs/chaos.md)")
    add("--seed", type=_count, metavar="N", help="let this seed draw the faults and their moments (default: 0)")
    add("--faults", type=_count, default=5, metavar="N", help="how many faults the seed draws (default: %(default)s)")
    add("--nodes", type=_count, metavar="N", help="run N nodes on this machine (default: torchrun's --nnodes, or 1)")
    add("--spares", type=_count, default=0, metavar="K", help="let K further nodes stand by (default: %(default)s)")
    add("--list", action="store_true", help="print all faults, and start nothing")
    add("--dir", type=Path, metavar="DIR", help="an empty directory for all files (default: mt-chaos/<script>)")
    configuration_options(chaos, ", as for run")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _step_or_name(text: str) -> str:
    from .checkpoint.backend.paths import Attempt

    if not text.isdecimal() and Attempt.parse(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor a snapshot's name")
    return text


def _snapshot_actions(actions: Any) -> None:
    ls = add_command(actions, "ls", "list the committed snapshots", "snapshots ls")
    verify = add_command(actions, "verify", "read every byte, and check every checksum", "snapshots verify")
    digest = add_command(
        actions,
        "digest",
        "print the SHA-256 of the training state: equal for two runs that ended in the same bits",
        "snapshots digest 1200",
    )
    which = ls.add_mutually_exclusive_group()
    which.add_argument("--json", action="store_true", help="print a list of JSON objects (docs/schemas/snapshots.json)")
    which.add_argument(
        "--all", action="store_true", help="also list the snapshots that are set aside, and why they are"
    )
    keep = add_command(actions, "keep", "keep a snapshot from being deleted as too old", "snapshots keep 1200")
    keep.add_argument("snapshot", help="a step, or a snapshot's name")
    keep.add_argument("--undo", action="store_true", help="allow its deletion again when it is too old")
    remove = add_command(actions, "rm", "delete snapshots", "snapshots rm 1200 1400")
    remove.add_argument("snapshot", nargs="+", help="a step, or a snapshot's name")
    for action in (ls, verify, digest):
        action.add_argument(
            "snapshot",
            nargs="?",
            help="a step, a run directory, or a snapshot's directory or URL (default: all snapshots; digest: the newest)",
        )
    digest.add_argument(
        "--global",
        action="store_true",
        dest="whole",
        help="digest of the global tensors, the same in every parallel layout",
    )
    export = add_command(
        actions,
        "export",
        "write whole tensors by name, for other programs",
        "snapshots export 1200 --to safetensors out",
    )
    export.add_argument("snapshot", help="a step, a run directory (its newest), or a snapshot's directory or URL")
    export.add_argument("--to", required=True, choices=["dcp", "safetensors"], help="format")
    export.add_argument("target", metavar="DIR", help="a new directory; it appears when it is complete")
    export.add_argument(
        "--only", action="append", metavar="SOURCE", help="export only this part of the state, such as model"
    )
    bring = add_command(
        actions,
        "import",
        "make a snapshot from another program's checkpoint, for run --start-from",
        "snapshots import --from megatron ckpt --snapshots /shared/start",
    )
    bring.add_argument("--from", required=True, choices=["dcp", "megatron"], dest="kind", help="format")
    bring.add_argument(
        "source", metavar="SRC", help="directory of torch.distributed.checkpoint, or of Megatron (torch_dist)"
    )
    bring.add_argument(
        "--snapshots", metavar="DIR|URL", help="a new place for the snapshot; or name one with --run-dir"
    )
    bring.add_argument("--step", type=int, help="step of the checkpoint, if the checkpoint does not say it")
    for action in (ls, verify, digest, keep, remove, export, bring):
        # The option is also allowed after the action.
        action.add_argument("--run-dir", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
