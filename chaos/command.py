"""`mt-resilient chaos`: options → plan → campaign → the page, the exit code, and the smallest plan of a campaign that failed."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..agent.launch import python_check, rank_count
from ..agent.launch.torchrun import Launch, understand
from ..resilience.errors import UsageError
from ..resilience.ipc.die_with_parent import adopt_orphans
from .campaign import Campaign, Outcome
from .judgement import draw, plan
from .judgement.plan import Injection, Plan
from .nemesis import etcd, inside, nodes, processes, registry, storage
from .nemesis.registry import Need

_ROOM = (etcd, inside, nodes, processes, storage)
"""The modules that register the faults."""


def listed() -> int:
    """Print all faults. Return the exit code."""
    for name, entry in sorted(registry.FAULTS.items()):
        print(f"{name}\n    {entry.kind.says}{'' if entry.kind.seeded else ' Not drawn by --seed.'}")
        for need in entry.needs:
            print(f"    It takes {need.value}.")
    return 0


def chaos(options: Namespace, launch: Sequence[str]) -> int:
    """Run a campaign, print its page, and return the exit code: 0, or 1 if a promise was not kept. Raises ResilientError."""
    if options.list:
        return listed()
    if not launch:
        raise UsageError(
            "there is no command; write: mt-resilient chaos --seed 1 -- torchrun --nproc-per-node 2 train.py"
        )
    if not options.faults:
        raise UsageError("--faults 0 leaves nothing to inject; give 1 or more. Nothing was started")
    found = rank_count.counted(python_check.checked(understand(list(launch), os.environ), os.environ), os.environ)
    nodes = _nodes(options.nodes, found)
    every = nodes + options.spares
    known = registry.kinds(every)
    seed = 0 if options.seed is None else options.seed
    if options.plan and options.seed is not None:
        raise UsageError("a plan has its own seed: give a plan or --seed, not both; nothing was started")
    chosen = _read(options.plan) if options.plan else draw.drawn(seed, options.faults, known.values(), options.spares)
    plan.fitting(chosen, nodes * found.ranks, every)
    _possible(chosen, every)
    root = _folder(options.dir, found)
    further = [word for pair in options.set for word in ("--set", pair)]
    further += ["--config", str(options.config)] if options.config else []
    signal.signal(signal.SIGTERM, _interrupt)
    adopt_orphans()  # no descendant whose own parent dies is lost
    try:
        namespaces = Need.NETWORK in registry.needs(chosen)
        return _carry_out(Campaign(root, launch, further, _say, nodes, namespaces, options.spares), chosen, launch)
    except KeyboardInterrupt:
        _say(f"interrupted: all processes that it had started are ended; what they wrote is in {root}")
        raise


def _carry_out(campaign: Campaign, chosen: Plan, launch: Sequence[str]) -> int:
    try:
        (campaign.root / "plan.toml").write_text(plan.to_toml(chosen))
        campaign.undisturbed()
        outcome = campaign.disturbed(chosen)
        print(outcome.page, flush=True)
        (campaign.root / "result.txt").write_text(outcome.page + "\n")
        if outcome.violated:
            _shrink(campaign, chosen, outcome, launch)
    finally:
        campaign.close()
    return 1 if outcome.violated else 0


def _shrink(campaign: Campaign, chosen: Plan, outcome: Outcome, launch: Sequence[str]) -> None:
    """Look for the smallest plan that breaks the same promise, and print the command that repeats it."""
    tries = 0

    def fails(injections: tuple[Injection, ...]) -> bool:
        nonlocal tries
        if not injections or injections[0].follows:
            return False
        tries += 1
        came = campaign.disturbed(replace(settled, injections=injections), f"shrink-{tries}")
        again = bool(set(came.violated) & set(outcome.violated))
        _say(f"with {len(injections)} of the faults it {'fails, too' if again else 'passes'}")
        return again

    settled = campaign.settled(chosen)
    if len(settled.injections) > 1:
        _say("it failed; leaving out one fault after the other, to find those that matter")
    smallest = replace(settled, injections=draw.shrunk(settled.injections, fails))
    file = campaign.root / "smallest.toml"
    file.write_text(plan.to_toml(smallest))
    several = f" --nodes {campaign.nodes}" if campaign.nodes > 1 else ""
    several += f" --spares {campaign.spares}" if campaign.spares else ""
    again = f"mt-resilient chaos {shlex.quote(str(file))}{several} -- {shlex.join(launch)}"
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


def _possible(chosen: Plan, nodes: int) -> None:
    for each in chosen.injections:
        if lacking := registry.lacks(registry.FAULTS[each.fault].needs, nodes):
            raise UsageError(
                f"{each.fault} cannot strike here: it takes {lacking}. Nothing was started. Provide this, or leave {each.fault} out of the "
                "plan"
            )


def _folder(given: Path | None, found: Launch) -> Path:
    """Return the empty folder for the campaign's files."""
    name = found.name
    candidates = [Path("mt-chaos") / (name if number == 1 else f"{name}.{number}") for number in range(1, 10_000)]
    root = (given or next(each for each in candidates if not each.exists())).absolute()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UsageError(
            f"{root} is not empty. Faults are injected only into a job that this command has started, in an empty directory. Nothing "
            "was started. Name another one with --dir"
        )
    root.mkdir(parents=True, exist_ok=True)
    return root


def _say(text: str) -> None:
    print(f"mt-resilient chaos: {text}", file=sys.stderr, flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
