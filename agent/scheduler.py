"""What a scheduler's environment and torchrun's own options say: this node's name, how many nodes there are, the job's name. Pure.

    --node, --nodes, --spares, --job  >  torchrun's --nnodes and --rdzv-id (PET_NNODES too)  >  Slurm, Kubernetes  >  the host's name

Slurm's variables are those of srun and sbatch (https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"), Kubernetes' those
of an indexed Job (https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode) and the training operator's PyTorchJob.
WORLD_SIZE and RANK are not read: nodes on some platforms, processes on others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..resilience.errors import UsageError

_INTERACTIVE = "4294967290"
"""SLURM_STEP_ID of the step that `salloc` opens a shell in (SLURM_INTERACTIVE_STEP in slurm.h)."""
_REPLICA = re.compile(r"(?P<job>.+)-(?:master|worker)-\d+")
"""A pod of a PyTorchJob."""


@dataclass(frozen=True, kw_only=True)
class Place:
    node: str
    """This node's name, the same after a restart."""
    nodes: str = ""
    """How many train, as `--nodes` has it: `4`, or `2:4`; empty: nobody has said."""
    spares: int | None = None
    """Nodes beyond these that wait; None: nobody has said."""
    job: str = ""
    """The same on all nodes of the job; empty: nobody has said."""


def place(asked: Place, torchrun: Mapping[str, str], environ: Mapping[str, str], host: str) -> Place:
    """Where this agent is. asked: what our own options say, empty where they do not; torchrun: the wrapped command's options by name, as
    `nnodes`; host: this host's name. Raises UsageError where not all can be true, and none of our options decides it."""
    if "SLURM_JOB_ID" in environ:
        found = _slurm(asked, environ, host)
    elif "KUBERNETES_SERVICE_HOST" in environ:
        found = _kubernetes(environ, host)
    else:
        found = Place(node=host)
    wanted = asked.nodes or torchrun.get("nnodes") or environ.get("PET_NNODES", "")
    nodes, spares = wanted, asked.spares
    if not asked.nodes and found.nodes:
        nodes, spares = _reconciled(wanted, asked.spares, int(found.nodes))
    return Place(
        node=asked.node or found.node,
        nodes=nodes,
        spares=spares,
        job=asked.job or _named(torchrun.get("rdzv_id") or environ.get("PET_RDZV_ID", "")) or found.job,
    )


def _slurm(asked: Place, environ: Mapping[str, str], host: str) -> Place:
    node = environ.get("SLURMD_NODENAME") or host
    job = environ["SLURM_JOB_ID"]  # stays the same when the job is queued again
    if "SLURM_ARRAY_JOB_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}-{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    if environ.get("SLURM_LOCALID", "0") != "0":
        raise UsageError(
            f"Slurm has started this more than once on {node}, and one agent a node is wanted; nothing was started. "
            "Give srun --ntasks-per-node=1"
        )
    given = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    if not nodes or environ.get("SLURM_STEP_ID") == _INTERACTIVE:
        if given != "1" and not asked.nodes:
            raise UsageError(
                f"Slurm has given this job {given} nodes, and this runs on one of them only, since srun has not started it; nothing was "
                "started. Put srun --ntasks-per-node=1 in front, or say --nodes 1"
            )
        nodes = "1"
    return Place(node=node, nodes=nodes, job=f"slurm-{job}")


def _kubernetes(environ: Mapping[str, str], host: str) -> Place:
    """A pod of an indexed Job has the host name `<job>-<index>`, one of a PyTorchJob `<job>-worker-<index>`; neither is told how many
    there are but by PET_NNODES. (With `hostNetwork` the host name is the machine's.)"""
    index = environ.get("JOB_COMPLETION_INDEX")
    if index and host.endswith(f"-{index}"):
        return Place(node=host, job=host.removesuffix(f"-{index}"))
    replica = _REPLICA.fullmatch(host) if "PET_NNODES" in environ else None
    return Place(node=host, job=replica["job"] if replica else "")


def _reconciled(wanted: str, spares: int | None, here: int) -> tuple[str, int | None]:
    """Of `here` nodes that Slurm has started, how many train and how many wait. wanted: what torchrun's options say; empty: nothing."""
    if not wanted:
        if spares and spares >= here:
            raise UsageError(
                f"--spares {spares}: Slurm runs this on {here} nodes, so that none is left to train; nothing was started. "
                "Ask for more nodes, or fewer spares"
            )
        return str(here - (spares or 0)), spares
    most = wanted.rpartition(":")[2]
    if not most.isdecimal():
        raise UsageError(
            f"--nnodes {wanted}: give the number of nodes, or the least and the most as 2:4; nothing was started"
        )
    if int(most) + (spares or 0) == here or (":" in wanted and int(most) >= here):
        return wanted, spares
    advice = f"Say --spares {here - int(most)} if the others are to wait" if here > int(most) else "Ask for more nodes"
    waiting = f" and --spares {spares}" if spares else ""
    raise UsageError(
        f"Slurm runs this on {here} nodes, but the command says --nnodes {wanted}{waiting}; nothing was started. {advice}, or say with "
        "--nodes how many are to train"
    )


def _named(identity: str) -> str:
    """torchrun's default is `none`."""
    return "" if identity == "none" else identity
