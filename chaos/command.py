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

from ..agent.launch import python_check
from ..agent.launch.torchrun import Launch, understand
from ..resilience.errors import UsageError
from .campaign import Campaign, Outcome
from .judgement import draw, plan, shrink
from .judgement.plan import Injection, Plan
from .live import leftovers
from .nemesis import inside, processes, registry, storage

_ROOM = (inside, processes, storage)
"""The modules that register the faults."""


def listed() -> int:
    """Print all faults. Return the exit code."""
    for name, kind in sorted(registry.kinds().items()):
        drawn = "" if kind.seeded else " Not drawn by --seed."
        print(f"{name}\n    {kind.says}{drawn}")
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
    known = registry.kinds()
    seed = 0 if options.seed is None else options.seed
    if options.plan and options.seed is not None:
        raise UsageError("a plan has its own seed: give a plan or --seed, not both; nothing was started")
    chosen = _read(options.plan) if options.plan else draw.drawn(seed, options.faults, known.values())
    found = python_check.checked(understand(list(launch), os.environ), os.environ)
    plan.fitting(chosen, found.ranks)
    _possible(chosen, found)
    root = _folder(options.dir, found)
    further = [word for pair in options.set for word in ("--set", pair)]
    further += ["--config", str(options.config)] if options.config else []
    signal.signal(signal.SIGTERM, _interrupt)
    leftovers.adopt()
    try:
        return _carry_out(Campaign(root, launch, further, _say), chosen, found.ranks, launch)
    except KeyboardInterrupt:
        _say(f"interrupted: all processes that it had started are ended; what they wrote is in {root}")
        raise


def _carry_out(campaign: Campaign, chosen: Plan, ranks: int, launch: Sequence[str]) -> int:
    try:
        (campaign.root / "plan.toml").write_text(plan.to_toml(chosen))
        campaign.undisturbed()
        outcome = campaign.disturbed(chosen, ranks)
        print(outcome.page, flush=True)
        (campaign.root / "result.txt").write_text(outcome.page + "\n")
        if outcome.violated:
            _shrink(campaign, chosen, outcome, ranks, launch)
    finally:
        campaign.close()
    return 1 if outcome.violated else 0


def _shrink(campaign: Campaign, chosen: Plan, outcome: Outcome, ranks: int, launch: Sequence[str]) -> None:
    """Look for the smallest plan that breaks the same promise, and print the command that repeats it."""
    tries = 0

    def fails(injections: tuple[Injection, ...]) -> bool:
        nonlocal tries
        if not injections or injections[0].follows:
            return False
        tries += 1
        came = campaign.disturbed(replace(settled, injections=injections), ranks, f"shrink-{tries}")
        again = bool(set(came.violated) & set(outcome.violated))
        _say(f"with {len(injections)} of the faults it {'fails, too' if again else 'passes'}")
        return again

    settled = campaign.settled(chosen, ranks)
    if len(settled.injections) > 1:
        _say("it failed; leaving out one fault after the other, to find those that matter")
    smallest = replace(settled, injections=shrink.shrunk(settled.injections, fails))
    file = campaign.root / "smallest.toml"
    file.write_text(plan.to_toml(smallest))
    again = f"mt-resilient chaos {shlex.quote(str(file))} -- {shlex.join(launch)}"
    print(f"\nThe smallest plan that fails:\n{smallest}\n\nIt is repeated by:\n  {again}")


def _read(file: Path) -> Plan:
    try:
        return plan.parsed(file.read_text(), registry.kinds())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the plan {file} cannot be read ({error}); nothing was started") from None


def _possible(chosen: Plan, found: Launch) -> None:
    if found.nodes not in ("", "1", "1:1"):
        raise UsageError("chaos injects faults into a job of one node; leave --nnodes out. Nothing was started")
    root = [each.fault for each in chosen.injections if registry.FAULTS[each.fault].root]
    if root and os.geteuid():
        raise UsageError(
            f"{root[0]} takes root, to mount a small file system; leave it out of the plan. Nothing was started"
        )


def _folder(given: Path | None, found: Launch) -> Path:
    """Return the empty folder for the campaign's files."""
    name = Path(found.script[0]).stem
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
