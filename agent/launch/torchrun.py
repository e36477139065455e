"""Parses the wrapped command, `torchrun …` or `python -m torch.distributed.run …` → `Launch`, and derives the arguments of one node's
torchrun from it.

This module performs no I/O, except to check that the program and the script exist. Every torchrun option keeps its meaning, except those of
the rendezvous. Each generation uses a new static rendezvous, at the requested port if that port is free.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...resilience.errors import UsageError
from ...resilience.text import formatting
from .handover import SITE
from .launcher_program import LAUNCH, RUN, program
from .script_options import number

_OURS = {"nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "max_restarts", "standalone"}
_OURS |= {"rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"}
_OURS_AS_VARIABLES = {f"PET_{name.upper()}" for name in _OURS}
"""Environment variables from which torchrun takes an option that the command line lacks."""
_RANKS_OWN = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
_RANKS_OWN |= {f"{prefix}WORLD_SIZE" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_")}
_RANKS_OWN |= {"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"}
_RANKS_OWN |= {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"}
"""Environment variables that torchrun sets for its ranks (`LocalElasticAgent`, as of torch 2.13). In the agent's own environment they may
have other values, from a Kubernetes operator or an outer torchrun."""
_MARK = "TORCHELASTIC_RUN_ID"
"""Ranks recognize the launcher by this variable: the launcher's environment lacks it, and any other parent's has it
(`training/attach/attach.py`)."""
_PORT = 29500
"""torchrun's default port."""
_TIMEOUT = re.compile(r"(?:^|,)\s*timeout\s*=\s*(\d+)")
_FLAGS = {"standalone", "m", "module", "no_python", "run_path", "virtual_local_rank"}
_OF_LAUNCH = {"use_env"}
"""Further options of torch.distributed.launch."""
_VALUED = {"nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts"}
_VALUED |= {"monitor_interval", "start_method", "event_log_handler", "role", "log_dir", "r", "redirects", "t", "tee"}
_VALUED |= {"local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters", "node_rank", "master_addr"}
_VALUED |= {"master_port", "local_addr", "logs_specs", "numa_binding", "signals_to_handle", "shutdown_timeout"}
"""torchrun's options that have a value, as of torch 2.13. torchrun treats `-` and `_` in a name alike."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    program: tuple[str, ...]
    """The command that starts the launcher: `torchrun`, or a Python and `-m torch.distributed.run`."""
    python: str
    """The interpreter that runs the launcher, and later the ranks."""
    options: tuple[str, ...]
    """torchrun's options that keep their meaning."""
    ranks: int
    """Number of ranks on this node; 0: `rank_count.counted` has not counted yet what `counts` names."""
    counts: str = ""
    """The word of `--nproc-per-node`, such as `gpu`; empty: it is a number."""
    nodes: str = ""
    """torchrun's `--nnodes`; empty: not given."""
    alone: bool = False
    """torchrun's options say that this node trains alone."""
    script: tuple[str, ...]
    """The script, or module, and its arguments."""
    layouts: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """For each number of nodes: further arguments that give the script another parallel layout."""
    form: str = ""
    """How torchrun starts the script, if that is not as a Python file: `--module`, `--no-python` or `--run-path`."""
    rank_command: tuple[str, ...] = ()
    """The command with which torchrun starts each rank; empty: ranks cannot be forked."""
    rdzv_id: str = ""
    """The job's name, from torchrun's `--rdzv-id`; empty: not given."""
    max_restarts: str = ""
    """torchrun's `--max-restarts`; empty: not given. The agent performs the restarts, but ranks may read the number."""
    port: int = 0
    """The rendezvous port, from torchrun's `--master-port`; 0: not given. A script may rely on this number."""
    master: str = ""
    """The host of `--rdzv-endpoint`, else of `--master-addr`; empty: not given."""
    endpoint_port: int = 0
    """The port of `--rdzv-endpoint`; 0: not given."""
    node_rank: str = ""
    """torchrun's `--node-rank`; empty: not given."""
    timeout_s: int = 0
    """`timeout` of `--rdzv-conf`: how long a node waits for the master; 0: not given."""
    interpreter: tuple[str, ...] = ()
    """The command that starts the launcher's Python as the launcher does, options included. Empty: only a wrapper knows it."""
    rank_python: str = ""
    """The interpreter that runs the ranks, if it is not `python`."""
    own_programs: bool = False
    """The ranks are programs other than torchrun's Python. The agent learns which of a rank's processes trains only when its training loop
    begins."""
    warm_refused: str = ""
    """Why ranks cannot be forked; empty: they can."""
    hooked: bool = True
    """The ranks' Python loads the hook."""
    hash_seed: int = 0
    """PYTHONHASHSEED of the ranks, 1 to 2³² - 1, if the agent's environment sets none. This seed is the same in all generations and runs of
    a job. So a script iterates over a set of strings in the same order after a recovery. 0: each Python draws its own seed."""

    @property
    def torn_groups(self) -> int:
        """Return the size of the tensor-parallel groups that the script's arguments ask for (Megatron's), if some groups span two nodes; 0:
        no group does. Ranks are numbered node by node, and such a group has consecutive ranks (Megatron's order, tp first)."""
        size = number(self.script, "--tensor-model-parallel-size", 1)
        return size if self.ranks % size else 0

    def torn(self) -> str:
        """Return the warning about tensor-parallel groups that span two nodes."""
        return (
            f"tensor-parallel groups of {self.torn_groups} do not fit into nodes of "
            f"{formatting.count(self.ranks, 'rank')}: some groups span two "
            "nodes, and each layer waits for the network. Make --nproc-per-node a multiple of that size"
        )

    def arguments(self, *, nodes: int, node_rank: int, master_addr: str, master_port: int, run: str) -> list[str]:
        """Return torchrun's arguments for one generation on one node. run: the job's name for torchrun, if the command gives none with
        `--rdzv-id`. Ranks read it as TORCHELASTIC_RUN_ID, and may name files after it."""
        meeting = [f"--nnodes={nodes}", f"--node-rank={node_rank}", f"--master-addr={master_addr}"]
        ours = [*meeting, f"--master-port={master_port}", "--max-restarts=0", f"--nproc-per-node={self.ranks}"]
        return [*ours, f"--rdzv-id={self.rdzv_id or run}", *self.options, *self.script, *self.layouts.get(nodes, ())]

    def shown(self, command: Sequence[str]) -> list[str]:
        """Return what `ps` would show of `command` without this program. Scripts that stop a job look for the path of torchrun in the
        output of `ps`."""
        found = shutil.which(command[0]) == self.program[0]
        return [*self.interpreter, self.program[0], *command[1:]] if found else [*command]

    @property
    def etcd_port(self) -> int:
        """Return the port of an etcd on the host of torchrun's own store: the port after the store's."""
        return (self.endpoint_port or self.port or _PORT) + 1

    def missing_script(self) -> str:
        """Return the script if it does not exist any more; empty: it exists, or it is a module."""
        named = self.rank_command and "-m" not in self.rank_command and not self.own_programs
        return self.script[0] if named and not os.path.exists(self.script[0]) else ""

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the launcher's environment. The ranks inherit it, plus the launcher's own variables. environ: the agent's environment."""
        known = environ.get("PYTHONPATH")
        found = {name: value for name, value in environ.items() if name not in _OURS_AS_VARIABLES | {_MARK}}
        if self.hooked:
            found["PYTHONPATH"] = f"{SITE}{os.pathsep}{known}" if known else SITE
            if self.hash_seed:
                found.setdefault("PYTHONHASHSEED", str(self.hash_seed))
        if self.ranks > 1:  # as torchrun does for its ranks; libraries read the variable when they are loaded
            found.setdefault("OMP_NUM_THREADS", "1")
        return found

    def told_to_ranks(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that ranks have under torchrun alone, and would lack because the agent starts torchrun with options of its
        own."""
        found = {name: value for name, value in environ.items() if name in _OURS_AS_VARIABLES}
        return found | ({"TORCHELASTIC_MAX_RESTARTS": self.max_restarts} if self.max_restarts else {})

    def shared_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that are the same for all ranks: the warm process's environment. If a statement of the script's opening (the
        imports at its top) reads any other variable, each rank runs that statement itself."""
        return {name: value for name, value in self.environment(environ).items() if name not in _RANKS_OWN}


def understand(command: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """Parse the command and return the launch. Raises UsageError if the command is not torchrun, MachineError if the launcher is not
    installed."""
    if not command:
        raise UsageError(
            "no command was given; write it after two dashes: mt-resilient run -- torchrun --nproc-per-node 2 train.py"
        )
    found, rest = program(command)
    options, kept, script = _options(rest, _OF_LAUNCH if found.module == LAUNCH else set())
    nodes = _told("nnodes", options, environ)
    if not script:
        raise UsageError("the torchrun command names no script; write it last: torchrun --nproc-per-node 2 train.py")
    no_python, run_path = _said("no_python", options, environ), _said("run_path", options, environ)
    module = "m" in options or _said("module", options, environ)
    if not module and not no_python:
        _look_at(script[0])
    ranks = _ranks(per_node := _told("nproc_per_node", options, environ) or "1")
    rdzv_id = _told("rdzv_id", options, environ)
    endpoint = _told("rdzv_endpoint", options, environ)
    host, _, port_there = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
    rank_python = environ.get("PYTHON_EXEC", "")
    passes_ranks = found.module == LAUNCH and "use_env" not in options
    reasons = {
        f"ranks are started by {script[0]}, not by torchrun's Python": no_python or run_path,
        f"PYTHON_EXEC names {rank_python} for the ranks": rank_python not in ("", found.python),
        f"{LAUNCH} gives each rank an argument of its own": passes_ranks,
        "--virtual-local-rank gives each rank devices of its own": _said("virtual_local_rank", options, environ),
        "--numa-binding starts the ranks through numactl": "numa_binding" in options or "PET_NUMA_BINDING" in environ,
        found.surprising: bool(found.surprising),
    }
    refused = next((why for why, holds in reasons.items() if holds), "")
    return Launch(
        program=found.words if passes_ranks else tuple(RUN if word == LAUNCH else word for word in found.words),
        python=found.python,
        options=tuple(kept),
        ranks=ranks,
        counts="" if ranks else per_node,
        nodes=nodes,
        alone=nodes in ("1", "1:1") or (not nodes and _said("standalone", options, environ)),
        script=tuple(script),
        form="--module" if module else "--no-python" if no_python else "--run-path" if run_path else "",
        # as `torch.distributed.run.config_from_args` (torch 2.13) makes it
        rank_command=() if refused else (os.path.abspath(found.python), "-u", *(("-m",) if module else ()), *script),
        rdzv_id="" if rdzv_id == "none" else rdzv_id,  # torchrun's default
        max_restarts=_told("max_restarts", options, environ).lstrip("0"),
        port=int(port) if (port := _told("master_port", options, environ)).isdecimal() else 0,
        master=host or _told("master_addr", options, environ),
        endpoint_port=int(port_there) if port_there.isdecimal() else 0,
        node_rank=_told("node_rank", options, environ),
        timeout_s=int(said[1]) if (said := _TIMEOUT.search(_told("rdzv_conf", options, environ))) else 0,
        interpreter=found.interpreter,
        rank_python="" if no_python else rank_python,
        own_programs=no_python or run_path,
        warm_refused=refused,
    )


def _told(name: str, options: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return the value of an option, from the command line or its PET_… variable; empty: the option is not given."""
    return options.get(name) or environ.get(f"PET_{name.upper()}", "")


def _said(flag: str, options: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Return whether a flag is set, as torchrun reads it: on the command line, or in its PET_… variable."""
    told = environ.get(f"PET_{flag.upper()}", "")
    return flag in options or (told.isdecimal() and int(told) > 0)


def _look_at(script: str) -> None:
    """Raise UsageError if Python cannot run the script, or can run it only once."""
    if os.path.exists(script) and not (os.path.isfile(script) or os.path.isdir(script)):
        raise UsageError(
            f"the script {script} is no file but a pipe or a device, which can be read only once, and ranks may have to be started again. "
            "Write it to a file and name that; nothing was started"
        )
    is_program = os.path.isfile(script) or os.path.isfile(os.path.join(script, "__main__.py"))
    if not is_program:
        raise UsageError(f"the script {script} is not there (looked in {os.getcwd()}); nothing was started")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the script {script} cannot be read; nothing was started")


def _options(rest: list[str], further: set[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the options by name, the options to pass on to torchrun as they were written, and the script with its arguments. further:
    further flags to accept."""
    values: dict[str, str] = {}
    kept: list[str] = []
    position = 0
    while position < len(rest) and rest[position].startswith("-"):
        word = rest[position]
        position += 1
        if word == "--":
            kept.append(word)
            break
        name, equals, value = _option(word, further)
        taken = [word]
        if name in _VALUED and not equals:
            if position >= len(rest):
                raise UsageError(f"torchrun's option {word} needs a value")
            value = rest[position]
            taken.append(value)
            position += 1
        values[name] = value
        if name not in _OURS | _OF_LAUNCH:
            kept += taken
    return values, kept, rest[position:]


def _option(word: str, further: set[str]) -> tuple[str, bool, str]:
    """Return the option's name, whether its value is in the same word, and that value. Like Python's argparse, accept `-t3`, and an
    unambiguous prefix of a name."""
    if word[1:2] in ("r", "t") and len(word) > 2:
        return word[1], True, word[2:].removeprefix("=")
    raw, equals, value = word.partition("=")
    name = raw.lstrip("-").replace("-", "_")
    known = _VALUED | _FLAGS | further
    begun = [whole for whole in known if raw.startswith("--") and whole.startswith(name)]
    if name not in known and len(begun) == 1:
        name = begun[0]
    if name not in known:
        raise UsageError(
            f"{word} is no option of torchrun that is known here; options of the script come after its name"
        )
    return name, bool(equals), value


def _ranks(text: str) -> int:
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text.isidentifier():
        return 0
    raise UsageError(f"--nproc-per-node {text}: give the number of processes on this node")
