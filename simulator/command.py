"""`mt-resilient simulate`: options → setting and faults → a run → text, JSON, plots."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..checkpoint.durable.save_interval import CopiesPolicy
from ..resilience.clock import monotonic_s
from ..resilience.decide.policy import Policy
from ..resilience.errors import MachineError, UsageError
from ..resilience.membership.rank_assignment import NodesPolicy, sizes
from ..resilience.text import formatting
from .engine.run import played
from .results import report, sensitivity
from .scenario import fault_models
from .scenario.config import Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SPARES = 64


def setting(options: Namespace, policies: Mapping[str, Any]) -> Setting:
    """Return the setting for the options of `simulate`. policies: sections of the configuration. Raises UsageError."""
    gpus, per_node, least = options.gpus, options.per_node, options.least
    if min(gpus, per_node) < 1:
        raise UsageError(f"--gpus {gpus} in nodes of {per_node}: there is nothing to simulate. Give 1 or more of each")
    if gpus % per_node:
        raise UsageError(
            f"--gpus {gpus} is not a multiple of the {per_node} GPUs of a node; nothing was simulated. Give a multiple of --per-node"
        )
    nodes = gpus // per_node
    if least and least > nodes:
        raise UsageError(
            f"--least {least} is more than the {nodes} nodes of the cluster; nothing was simulated. Give a smaller --least"
        )
    known: NodesPolicy = policies["nodes"]
    numbers = sizes(known.number) if known.number else (nodes,)
    if max(numbers) != nodes:
        raise UsageError(
            f"nodes.number is {known.number}, and --gpus {gpus} in nodes of {per_node} are {nodes} nodes; nothing was simulated. Give as "
            "many GPUs as that many nodes have"
        )
    if least is not None:
        numbers = tuple(range(least or nodes, nodes + 1))
    return Setting(
        nodes=nodes,
        per_node=per_node,
        spares=(known.spares or _SPARES) if options.spares is None else options.spares,
        sizes=numbers if len(numbers) > 1 else (),
        days=options.days,
        rate=options.rate,
        seed=options.seed,
        costs=policies["costs"],
        snapshots=policies["snapshots"],
        copies=CopiesPolicy(every_s=0.0) if options.no_buddies else policies["copies"],
        policy=Policy(**{name: policies[name] for name in ("recovery", "ladder", "nodes", "quarantine")}),
        hang=policies["hang"],
        spikes=policies["spikes"],
        lease_ttl_s=policies["agent"].lease_ttl_s,
    )


def simulate(options: Namespace, policies: Mapping[str, Any]) -> int:
    """Run the simulation, print its result, return the exit code. Raises UsageError, MachineError."""
    what, model = setting(options, policies), fault_models.named(options.faults)
    if options.plots:
        _writable(options.plots)
    runs = sensitivity.runs(what, model) if options.sensitivity else []  # raises here if a run is impossible
    nodes = f"{formatting.count(what.nodes, 'node')} and {formatting.count(what.spares, 'spare')}"
    print(f"mt-resilient: simulating {what.days:g} days of {nodes}; large clusters take a minute", file=sys.stderr)
    began = monotonic_s()
    with _progress("simulating") as told:
        outcome = played(what, model, told)
    print(f"mt-resilient: simulated in {formatting.seconds(monotonic_s() - began)}", file=sys.stderr)
    cells: list[sensitivity.Cell] = []
    if runs:
        with _progress("the table") as told:
            cells = sensitivity.table(runs, told)
    with _printing():
        if options.json:
            found = outcome.as_json() | {"faults_model": model.name}
            print(json.dumps(found | ({"sensitivity": [vars(cell) for cell in cells]} if cells else {})))
        else:
            report.show(report.told(outcome, model.name))
            if cells:
                left_out = " (without --least)" if what.sizes and not runs[0].setting.sizes else ""
                heading = f"effective training time by restart, snapshots in memory and faults{left_out}:"
                report.show([heading, report.sensitivity(cells)])
    if options.plots:
        from .results import plots

        for name, picture in plots.of(outcome, cells).items():
            for kind in ("png", "svg"):
                _write(options.plots / f"{name}.{kind}", picture)
        print(f"mt-resilient: plots are in {options.plots}", file=sys.stderr)
    return 0


@contextmanager
def _printing() -> Iterator[None]:
    """Flush what the block prints; raise MachineError if that fails."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest to it at exit
        raise MachineError(
            f"the result cannot be written to standard output ({error.strerror}) and is lost. Send it elsewhere. The "
            "same seed gives the same result"
        ) from error


def _write(file: Path, picture: Figure) -> None:
    try:
        picture.savefig(file, dpi=120)
    except OSError as error:
        raise MachineError(
            f"{file} cannot be written ({error.strerror}). The result was printed, but plots are missing. Name another directory"
        ) from error


def _writable(directory: Path) -> None:
    """Raise MachineError if `directory` cannot be written, before the simulation runs."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        trial = directory / ".trial"
        trial.write_text("")
        trial.unlink()
    except OSError as error:
        raise MachineError(
            f"plots cannot be written to {directory} ({error.strerror}); nothing was simulated. Name another directory"
        ) from error


@contextmanager
def _progress(words: str) -> Iterator[Callable[[float], None]]:
    """Show progress on a terminal. Yields a function that takes the share done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda share: None
        return
    columns = (TextColumn(words), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(words, total=1.0)
        yield lambda share: shown.update(task, completed=share)
