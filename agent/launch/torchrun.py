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
from pathlib import Path

from ...resilience.errors import UsageError
from ...resilience.text import formatting
from .handover import SITE
from .launcher_program import LAUNCH, RUN, program
from .ports import names_loopback
from .script_options import number
from .torchrun_options import OF_LAUNCH, OURS_AS_VARIABLES, checked, parsed, said, told

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
    rdzv_backend: str = ""
    """torchrun's `--rdzv-backend`; empty: not given."""
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
    def name(self) -> str:
        """Return the script's name: a module's last part, else the file's name without its last extension."""
        return self.script[0].rpartition(".")[2] if self.form == "--module" else Path(self.script[0]).stem

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
        found = {name: value for name, value in environ.items() if name not in OURS_AS_VARIABLES | {_MARK}}
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
        found = {name: value for name, value in environ.items() if name in OURS_AS_VARIABLES}
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
    options, kept, script = parsed(rest, OF_LAUNCH if found.module == LAUNCH else set())
    checked(options, environ)
    nodes = told("nnodes", options, environ)
    if not script:
        raise UsageError("the torchrun command names no script; write it last: torchrun --nproc-per-node 2 train.py")
    no_python, run_path = said("no_python", options, environ), said("run_path", options, environ)
    module = "m" in options or said("module", options, environ)
    if not module and not no_python:
        _look_at(script[0])
    ranks = _ranks(per_node := told("nproc_per_node", options, environ) or "1")
    rdzv_id = told("rdzv_id", options, environ)
    endpoint = told("rdzv_endpoint", options, environ)
    host, _, port_there = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
    master = host or told("master_addr", options, environ)
    rank_python = environ.get("PYTHON_EXEC", "")
    passes_ranks = found.module == LAUNCH and "use_env" not in options
    reasons = {
        f"ranks are started by {script[0]}, not by torchrun's Python": no_python or run_path,
        f"PYTHON_EXEC names {rank_python} for the ranks": rank_python not in ("", found.python),
        f"{LAUNCH} gives each rank an argument of its own": passes_ranks,
        "--virtual-local-rank gives each rank devices of its own": said("virtual_local_rank", options, environ),
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
        alone=nodes in ("1", "1:1") or (not nodes and (said("standalone", options, environ) or names_loopback(master))),
        script=tuple(script),
        form="--module" if module else "--no-python" if no_python else "--run-path" if run_path else "",
        # as `torch.distributed.run.config_from_args` (torch 2.13) makes it
        rank_command=() if refused else (os.path.abspath(found.python), "-u", *(("-m",) if module else ()), *script),
        rdzv_id="" if rdzv_id == "none" else rdzv_id,  # torchrun's default
        max_restarts=told("max_restarts", options, environ).lstrip("0"),
        port=int(port) if (port := told("master_port", options, environ)).isdecimal() else 0,
        master=master,
        rdzv_backend=told("rdzv_backend", options, environ),
        endpoint_port=int(port_there) if port_there.isdecimal() else 0,
        node_rank=told("node_rank", options, environ),
        timeout_s=int(given[1]) if (given := _TIMEOUT.search(told("rdzv_conf", options, environ))) else 0,
        interpreter=found.interpreter,
        rank_python="" if no_python else rank_python,
        own_programs=no_python or run_path,
        warm_refused=refused,
    )


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


def _ranks(text: str) -> int:
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text.isidentifier():
        return 0
    raise UsageError(f"--nproc-per-node {text}: give the number of processes on this node")
