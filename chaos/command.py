"""`mt-resilient chaos`: options → plan → campaign → the page, the exit code, and the smallest plan of a campaign that failed."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..agent.etcd.binary import find_server
from ..agent.launch import python_check, rank_count
from ..agent.launch.torchrun import Launch, understand
from ..resilience.errors import MachineError, UsageError
from ..resilience.ipc.die_with_parent import adopt_orphans
from .campaign import Campaign, Outcome
from .judgement import draw, plan
from .judgement.plan import Injection, Plan
from .nemesis import etcd, inside, nodes, processes, registry, storage
from .nemesis.registry import Need
from .runs import Runs

_ROOM = (etcd, inside, nodes, processes, storage)
"""The modules that register the faults."""
_OWN = {"control": ("etcd", "job", "node", "address"), "nodes": ("number", "spares")}
"""Section → keys of the configuration that a campaign sets for each node."""


def listed() -> int:
    """Print all faults. Return the exit code."""
    for name, entry in sorted(registry.FAULTS.items()):
        print(f"{name}\n    {entry.kind.says}{'' if entry.kind.seeded else ' Not drawn by --seed.'}")
        for need in entry.needs:
            print(f"    It takes {need.value}.")
    return 0


def chaos(options: Namespace, launch: Sequence[str], policies: Mapping[str, Any]) -> int:
    """Run a campaign, print its page, and return the exit code: 0, or 1 if a promise was not kept. policies: the configuration of the job.
    Raises ResilientError."""
    if options.list:
        return listed()
    if not launch:
        raise UsageError(
            "there is no command; write: mt-resilient chaos --seed 1 -- torchrun --nproc-per-node 2 train.py"
        )
    if not options.faults:
        raise UsageError("--faults 0 leaves nothing to inject; give 1 or more. Nothing was started")
    _free(policies)
    found = rank_count.counted(python_check.checked(understand(list(launch), os.environ), os.environ), os.environ)
    nodes = _nodes(options.nodes, found)
    every, ranks = nodes + options.spares, nodes * found.ranks
    known = registry.kinds(every, ranks)
    seed = 0 if options.seed is None else options.seed
    if options.plan and options.seed is not None:
        raise UsageError("a plan has its own seed: give a plan or --seed, not both; nothing was started")
    chosen = _read(options.plan) if options.plan else draw.drawn(seed, options.faults, known.values(), options.spares)
    plan.fitting(chosen, ranks, every)
    _possible(chosen, every, ranks)
    find_server()  # raises MachineError now, rather than when the command has run once
    root = _folder(options.dir, found)
    further = [word for pair in options.set for word in ("--set", pair)]
    further += ["--config", str(options.config.absolute())] if options.config else []
    signal.signal(signal.SIGTERM, _interrupt)
    adopt_orphans()  # no descendant whose own parent dies is lost
    try:
        namespaces = Need.NETWORK in registry.needs(chosen)
        return _carry_out(Campaign(Runs(root, launch, further, nodes, namespaces, options.spares), _say), chosen)
    except KeyboardInterrupt:
        _say(f"interrupted: all processes that it had started are ended; what they wrote is in {root}")
        raise
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        where = error.filename or root
        raise MachineError(f"{where}: {error.strerror}. All processes that it had started are ended") from error


def _carry_out(campaign: Campaign, chosen: Plan) -> int:
    try:
        (campaign.root / "plan.toml").write_text(plan.to_toml(chosen))
        campaign.undisturbed()
        outcome = campaign.disturbed(chosen)
        print(outcome.page, flush=True)
        (campaign.root / "result.txt").write_text(outcome.page + "\n")
        if outcome.violated:
            _shrink(campaign, chosen, outcome)
    finally:
        campaign.runs.close()
    return 1 if outcome.violated else 0


def _shrink(campaign: Campaign, chosen: Plan, outcome: Outcome) -> None:
    """Look for the smallest plan that breaks the same promise, and print the command that repeats it. The smallest one so far is always in
    the file, because the search may take hours."""
    tries, runs, file = 0, campaign.runs, campaign.root / "smallest.toml"

    def fails(injections: tuple[Injection, ...]) -> bool:
        nonlocal tries
        if not injections or injections[0].follows or plan.vain(injections, registry.kinds()):
            return False
        tries += 1
        smaller = replace(settled, injections=injections)
        came = campaign.disturbed(smaller, f"shrink-{tries}")
        again = bool(set(came.violated) & set(outcome.violated))
        if again:
            file.write_text(plan.to_toml(smaller))
        _say(f"with {len(injections)} of the faults it {'fails, too' if again else 'passes'}")
        return again

    settled = campaign.settled(chosen)
    file.write_text(plan.to_toml(settled))
    if len(settled.injections) > 1:
        _say("it failed; leaving out one fault after the other, to find those that matter")
    smallest = replace(settled, injections=draw.shrunk(settled.injections, fails))
    several = ["--nodes", str(runs.nodes)] if runs.nodes > 1 else []
    several += ["--spares", str(runs.spares)] if runs.spares else []
    again = shlex.join(["mt-resilient", "chaos", str(file), *several, *runs.options, "--", *runs.launch])
    print(f"\nThe smallest plan that fails:\n{smallest}\n\nIt is repeated by:\n  {again}")


def _read(file: Path) -> Plan:
    try:
        return plan.parsed(file.read_text(), registry.kinds())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the plan {file} cannot be read ({error}); nothing was started") from None


def _nodes(given: int | None, found: Launch) -> int:
    """Return the number of nodes: of the option, else of torchrun's --nnodes, else 1."""
    if given == 0:
        raise UsageError("--nodes must be 1 or more. Nothing was started")
    told = found.nodes or str(given or 1)
    numbers = sorted({int(word) for word in told.split(":") if word.isdecimal()})
    if given is None and len(numbers) != 1:
        raise UsageError(f"--nnodes {told} is not a fixed number of nodes. Nothing was started. Give one with --nodes")
    if given and numbers and not numbers[0] <= given <= numbers[-1]:
        raise UsageError(
            f"--nodes {given} contradicts torchrun's --nnodes {told}. Nothing was started. Give --nodes a number that --nnodes allows"
        )
    return given or numbers[0]


def _free(policies: Mapping[str, Any]) -> None:
    """Raise UsageError if the configuration names an etcd, or nodes, that are not this command's own."""
    for section, keys in _OWN.items():
        for key in keys:
            if getattr(policies[section], key):
                raise UsageError(
                    f"{section}.{key} is set in the configuration or the environment, but a campaign has an etcd and nodes of its own. "
                    "Nothing was started. Leave it out; --nodes and --spares say how many nodes there are"
                )


def _possible(chosen: Plan, nodes: int, ranks: int) -> None:
    for each in chosen.injections:
        if lacking := registry.lacks(registry.FAULTS[each.fault].needs, nodes, ranks):
            raise UsageError(
                f"{each.fault} cannot strike here: it takes {lacking}. Nothing was started. Provide this, or leave {each.fault} out of the "
                "plan"
            )


def _folder(given: Path | None, found: Launch) -> Path:
    """Return the empty folder for the campaign's files."""
    name = found.name
    candidates = [Path("mt-chaos") / (name if number == 1 else f"{name}.{number}") for number in range(1, 10_000)]
    root = (given or next(each for each in candidates if not each.exists())).absolute()
    try:
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise UsageError(
                f"{root} is not empty. Faults are injected only into a job that this command has started, in an empty directory. Nothing "
                "was started. Name another one with --dir"
            )
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{root} cannot be used ({error.strerror}). Nothing was started. Name another directory with --dir"
        ) from error
    return root


def _say(text: str) -> None:
    print(f"mt-resilient chaos: {text}", file=sys.stderr, flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
