"""Reads a scheduler's environment and torchrun's options: this node's name, the number of nodes, and the job's name. No I/O.

    --node, --nodes, --spares, --job  >  torchrun's --nnodes and --rdzv-id, or PET_…  >  Slurm, Kubernetes  >  the host's name

Slurm's variables are those of srun and sbatch (https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"), Kubernetes' those
of an indexed Job (https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode) and the training operator's PyTorchJob.
WORLD_SIZE and RANK are not read: some platforms count nodes with them, and others count processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...resilience.errors import UsageError
from ...resilience.membership.rank_assignment import sizes
from .torchrun import Launch

_INTERACTIVE = "4294967290"
"""SLURM_STEP_ID of the step that `salloc` opens a shell in (SLURM_INTERACTIVE_STEP in slurm.h)."""
_REPLICA = re.compile(r"(?P<job>.+)-(?:master|worker)-\d+")
"""Host name of a PyTorchJob's pod."""
_STAMP = re.compile(r"20\d\d([-_./]?)(0[1-9]|1[0-2])\1([0-2]\d|3[01])|(?<!\d)1[6-9]\d{8}(?!\d)")
"""A date (2026-11-27, 20261127), or the seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Place:
    node: str
    """This node's name, the same after a restart."""
    nodes: str = ""
    """Number of nodes that train, in the notation of `--nodes`: `4`, `2:4` or `2,4`. Empty: not given."""
    spares: int = 0
    """Number of further nodes that stand by."""
    job: str = ""
    """The job's name, the same on all its nodes. Empty: not given."""


def place(asked: Place, launch: Launch, environ: Mapping[str, str], host: str) -> Place:
    """Return this node's name, the job's name, and the numbers of nodes. asked: the values of mt-resilient's own options, empty if not
    given. launch: torchrun's options. host: this host's name. Raises UsageError if torchrun's options and the scheduler contradict each
    other, and no own option decides."""
    if "SLURM_JOB_ID" in environ:
        found = _slurm(asked, launch, environ, host)
    elif "KUBERNETES_SERVICE_HOST" in environ:
        found = _kubernetes(environ, host)
    else:
        found = Place(node=host)
    nodes = asked.nodes or launch.nodes
    if not asked.nodes and found.nodes:
        nodes = reconciled(launch.nodes, asked.spares, int(found.nodes), "Slurm runs this on")
    return Place(
        node=asked.node or found.node,
        nodes=nodes,
        spares=asked.spares,
        job=asked.job or _name(launch.rdzv_id) or found.job,
    )


def _name(rdzv_id: str) -> str:
    """Return torchrun's `--rdzv-id` as a job's name; empty if it has a date or a time. An id with a date or a time is new at each launch,
    and names no job."""
    return "" if _STAMP.search(rdzv_id) else allowed(rdzv_id)


def allowed(name: str) -> str:
    """Return a name with `-` in place of each character that a job's name must not have (`control.job`)."""
    return re.sub(r"[^\w.:@-]", "-", name, flags=re.ASCII)


def labels(environ: Mapping[str, str]) -> dict[str, str]:
    """Return labels for this node's location. With Slurm, that is the path of switches above the node (`topology.conf`)."""
    switches, dot, node = environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")
    known = dot and switches and environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").endswith(".node")
    return {"rack": switches} if known and node == environ.get("SLURMD_NODENAME", node) else {}


def task(environ: Mapping[str, str]) -> str:
    """Return the number of this task if srun has started several tasks; empty for the first one, which may be an interactive shell."""
    number = environ.get("SLURM_PROCID", "") if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" else ""
    return "" if number == "0" else number


def _slurm(asked: Place, launch: Launch, environ: Mapping[str, str], host: str) -> Place:
    node = environ.get("SLURMD_NODENAME") or host
    job = environ["SLURM_JOB_ID"]  # the id stays the same when Slurm requeues the job
    if "SLURM_ARRAY_JOB_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}-{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    if launch.alone:
        return Place(node=node, nodes="1", job=f"slurm-{job}")
    if environ.get("SLURM_LOCALID", "0") != "0":
        raise UsageError(
            f"Slurm has started mt-resilient more than once on {node}, which needs one agent; nothing was started. "
            "Give srun --ntasks-per-node=1"
        )
    given = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    outside = not nodes or environ.get("SLURM_STEP_ID") == _INTERACTIVE
    if launch.master and not asked.nodes and max(sizes(launch.nodes or "1")) > (1 if outside else int(nodes)):
        # A loop starts a torchrun on each node, by srun or ssh. Slurm's name of the job is not known behind an ssh.
        return Place(node=node)
    if outside:
        if given != "1" and not asked.nodes:
            raise UsageError(
                f"Slurm has given this job {given} nodes, but mt-resilient runs on only one of them, because srun did not start it; "
                "nothing was started. Put srun --ntasks-per-node=1 in front, or say --nodes 1"
            )
        nodes = "1"
    return Place(node=node, nodes=nodes, job=f"slurm-{job}")


def _kubernetes(environ: Mapping[str, str], host: str) -> Place:
    """Return a pod's node name and job name, from its host name: `<job>-<index>` in an indexed Job, `<job>-worker-<index>` in a PyTorchJob.
    Only PET_NNODES gives a pod the number of pods. (With `hostNetwork`, the host name is the machine's.)"""
    index = environ.get("JOB_COMPLETION_INDEX")
    if index and host.endswith(f"-{index}"):
        return Place(node=host, job=host.removesuffix(f"-{index}"))
    replica = _REPLICA.fullmatch(host) if "PET_NNODES" in environ else None
    return Place(node=host, job=replica["job"] if replica else "")


def reconciled(wanted: str, spares: int, here: int, who: str) -> str:
    """Return how many of `here` nodes train, in the notation of `--nodes`. wanted: torchrun's `--nnodes`; empty: not given. who: the start
    of an error message that names the source of `here`, such as `Slurm runs this on`. Raises UsageError if `wanted` does not fit `here`."""
    if not wanted:
        if spares >= here:
            raise UsageError(
                f"--spares {spares}: {who} {here} nodes, so that none is left to train; nothing was started. "
                "Ask for more nodes, or fewer spares"
            )
        return str(here - spares)
    numbers = sizes(wanted)
    if max(numbers) + spares == here or (min(numbers) <= here <= max(numbers) + spares and len(numbers) > 1):
        return wanted
    idle = here - max(numbers)
    advice = f"Say --spares {idle} if the other nodes are to stand by" if idle > 0 else "Ask for more nodes"
    waiting = f" and --spares {spares}" if spares else ""
    raise UsageError(
        f"{who} {here} nodes, but the command says --nnodes {wanted}{waiting}; nothing was started. {advice}, or say with "
        "--nodes how many are to train"
    )
