"""Understand the wrapped command: `torchrun …` or `python -m torch.distributed.run …` → `Launch`, and back to arguments for one node.

Pure but for looking whether the program and the script are there. Every torchrun option keeps its meaning, except those that say who
meets whom: each generation has a static rendezvous of its own, with a fresh port.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ..resilience import phrases
from ..resilience.errors import MachineError, UsageError

SITE = Path(__file__).parents[1] / "training" / "site"
"""First on the ranks' PYTHONPATH: the hook."""

_OURS = {"nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "max_restarts", "standalone"}
_OURS |= {"rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"}
_OURS_AS_VARIABLES = {f"PET_{name.upper()}" for name in _OURS}
"""Where torchrun reads what the command line does not say."""
_FLAGS = {"standalone", "m", "module", "no_python", "run_path", "virtual_local_rank"}
_VALUED = {"nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts"}
_VALUED |= {"monitor_interval", "start_method", "event_log_handler", "role", "log_dir", "r", "redirects", "t", "tee"}
_VALUED |= {"local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters", "node_rank", "master_addr"}
_VALUED |= {"master_port", "local_addr", "logs_specs", "numa_binding", "signals_to_handle", "shutdown_timeout"}
"""torchrun's options as of torch 2.13; `-` and `_` mean the same to it."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    program: tuple[str, ...]
    """What starts the launcher: `torchrun`, or a Python and `-m torch.distributed.run`."""
    python: str
    """The interpreter that the launcher runs in, and the ranks after it."""
    options: tuple[str, ...]
    """torchrun's options that keep their meaning."""
    ranks: int
    """Processes on this node."""
    nodes: str = ""
    """What it says about the number of nodes; empty: nothing."""
    script: tuple[str, ...]
    """The script, or module, and its arguments."""
    rank_command: tuple[str, ...] = ()
    """What torchrun starts each rank with; empty where that is no interpreter on a script."""
    rdzv_id: str = ""
    """The job's name as torchrun was told it; empty: it was not."""

    @property
    def home(self) -> str:
        """The folder that Python puts first on the ranks' sys.path."""
        file = Path(self.script[0])
        return str(file.resolve().parent if file.is_file() else Path.cwd())

    @property
    def torn_groups(self) -> int:
        """Size of the tensor-parallel groups that the script's arguments ask for (Megatron's), where some lie on two nodes; 0: none do.
        Ranks are numbered node by node, and such groups are of consecutive ranks (Megatron's order, tp first)."""
        option = "--tensor-model-parallel-size"
        given = [value for name, value in pairwise([*self.script, ""]) if name == option]
        given += [word.partition("=")[2] for word in self.script if word.startswith(f"{option}=")]
        size = int(given[-1]) if given and given[-1].isdecimal() else 1
        return size if size and self.ranks % size else 0

    def torn(self) -> str:
        """What is told of these groups."""
        return (
            f"tensor-parallel groups of {self.torn_groups} do not fit into nodes of {phrases.count(self.ranks, 'rank')}: some lie on two "
            "nodes, whose network each layer then waits for; --nproc-per-node should be a multiple of it"
        )

    def arguments(self, *, nodes: int, node_rank: int, master_addr: str, master_port: int) -> list[str]:
        """torchrun's arguments for one generation on one node."""
        meeting = [f"--nnodes={nodes}", f"--node-rank={node_rank}", f"--master-addr={master_addr}"]
        ours = [*meeting, f"--master-port={master_port}", "--max-restarts=0", f"--nproc-per-node={self.ranks}"]
        return [*ours, *self.options, *self.script]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What ranks, and the warm process they are forked from, find in their environment. environ: the agent's."""
        known = environ.get("PYTHONPATH")
        found = {name: value for name, value in environ.items() if name not in _OURS_AS_VARIABLES}
        found["PYTHONPATH"] = f"{SITE}{os.pathsep}{known}" if known else str(SITE)
        if self.ranks > 1:  # as torchrun does for its ranks; a library reads it when it is loaded
            found.setdefault("OMP_NUM_THREADS", "1")
        return found


def understand(command: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """Raises UsageError for what is no torchrun command, MachineError when the launcher is not installed."""
    if not command:
        raise UsageError(
            "no command was given; write it after two dashes: mt-resilient run -- torchrun --nproc-per-node 2 train.py"
        )
    program, python, rest = _program(list(command))
    options, kept, script = _options(rest)
    nodes = options.get("nnodes") or environ.get("PET_NNODES", "")
    if not script:
        raise UsageError("the torchrun command names no script; write it last: torchrun --nproc-per-node 2 train.py")
    is_file = not options.keys() & {"m", "module", "no_python"}
    if is_file and not Path(script[0]).is_file():
        raise UsageError(f"the script {script[0]} is not there (looked in {Path.cwd()}); nothing was started")
    if is_file and not os.access(script[0], os.R_OK):
        raise UsageError(f"the script {script[0]} cannot be read; nothing was started")
    ranks = _ranks(options.get("nproc_per_node") or environ.get("PET_NPROC_PER_NODE", "1"), environ)
    rdzv_id = options.get("rdzv_id") or environ.get("PET_RDZV_ID", "")
    return Launch(
        program=program,
        python=python,
        options=tuple(kept),
        ranks=ranks,
        nodes=nodes,
        script=tuple(script),
        rank_command=_rank_command(environ.get("PYTHON_EXEC", python), options.keys(), script),
        rdzv_id="" if rdzv_id == "none" else rdzv_id,  # torchrun's default
    )


def _program(command: list[str]) -> tuple[tuple[str, ...], str, list[str]]:
    name = Path(command[0]).name
    if name.startswith("python") and command[1:3] in (
        ["-m", "torch.distributed.run"],
        ["-m", "torch.distributed.launch"],
    ):
        return (*command[:2], "torch.distributed.run"), shutil.which(command[0]) or command[0], command[3:]
    if name != "torchrun":
        raise UsageError(
            f"{command[0]} is no torchrun: mt-resilient run starts the ranks through it, "
            "so the command has to be torchrun … or python -m torch.distributed.run …"
        )
    beside = Path(sys.executable).with_name("torchrun")  # of our own environment, where PATH does not lead to it
    found = shutil.which(command[0]) or (str(beside) if command[0] == "torchrun" and beside.exists() else None)
    if not found:
        raise MachineError(
            f"{command[0]} was not found on PATH; install torch in this environment, or name the whole path"
        )
    return (found,), _interpreter(Path(found)), command[1:]


def _interpreter(program: Path) -> str:
    """The Python in the program's first line; ours where it names none."""
    with program.open("rb") as file:
        first = file.readline(512).decode(errors="replace").strip()
    named = first.removeprefix("#!").split() if first.startswith("#!") else []
    return named[0] if named and "python" in Path(named[0]).name else sys.executable


def _options(rest: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Options by name, those to pass on as they were written, and the script with its arguments."""
    values: dict[str, str] = {}
    kept: list[str] = []
    position = 0
    while position < len(rest) and rest[position].startswith("-"):
        word = rest[position]
        if word == "--":
            position += 1
            break
        raw, equals, value = word.partition("=")
        name = raw.lstrip("-").replace("-", "_")
        taken = [word]
        if name in _VALUED and not equals:
            if position + 1 >= len(rest):
                raise UsageError(f"torchrun's option {word} wants a value")
            value = rest[position + 1]
            taken.append(value)
        elif name not in _VALUED | _FLAGS:
            raise UsageError(
                f"{word} is no option of torchrun that is known here; options of the script come after its name"
            )
        values[name] = value
        if name not in _OURS:
            kept += taken
        position += len(taken)
    return values, kept, rest[position:]


def _rank_command(python: str, options: Set[str], script: Sequence[str]) -> tuple[str, ...]:
    """As in `torch.distributed.run.config_from_args`, as of torch 2.13."""
    if options & {"no_python", "run_path", "numa_binding"}:
        return ()
    module = ("-m",) if options & {"m", "module"} else ()
    return os.path.abspath(python), "-u", *module, *script


def _ranks(text: str, environ: Mapping[str, str]) -> int:
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text == "cpu":
        return os.cpu_count() or 1
    if text in ("auto", "gpu"):
        visible = environ.get("MUSA_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES")
        if visible:
            return len(visible.split(","))
        devices = [
            p for p in Path("/dev").iterdir() if p.name.removeprefix("nvidia").isdigit() or p.name.startswith("mtgpu.")
        ]
        if devices or text == "auto":
            return len(devices) or os.cpu_count() or 1
    raise UsageError(f"--nproc-per-node {text}: give the number of processes on this node")
