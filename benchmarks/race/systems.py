"""The peers' own checkpoint and restart code, each as its documents and examples have it. `train.py` has the training."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
from copy import deepcopy
from datetime import timedelta

import accelerator
from megatron.core import parallel_state as mpu
from torch import distributed
from train import Training, with_checkpoints

BEATS = 20
"""Steps after which nvidia-resiliency-ext computes its timeouts from the heartbeats that it has seen."""


class None_:
    """No checkpoints: the undisturbed run."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def restore(self) -> int:
        """Load the newest checkpoint. Return the next step."""
        return 0

    def save(self, step: int) -> None: ...

    def beat(self) -> None: ...


class Dcp(None_):
    """torch.distributed.checkpoint, as in its tutorial: a folder for each step, and `.metadata` when it is complete."""

    def _complete(self) -> list[int]:
        return sorted(int(path.parent.name) for path in self.training.args.directory.glob("dcp/*/.metadata"))

    def restore(self) -> int:
        import torch.distributed.checkpoint as dcp

        if not (steps := self._complete()):
            return 0
        state = self.training.blank()
        dcp.load(state, checkpoint_id=str(self.training.args.directory / "dcp" / str(steps[-1])))
        self.training.load(state)
        return steps[-1]

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        folder = self.training.args.directory / "dcp"
        dcp.save(self.training.state(), checkpoint_id=str(folder / str(step)))
        if self.training.rank == 0:
            for old in self._complete()[:-2]:
                shutil.rmtree(folder / str(old))


class Nvrx(None_):
    """nvidia-resiliency-ext: local checkpoints with a copy at the other rank, and heartbeats whose timeouts it computes itself."""

    client = None
    beats = BEATS

    def __init__(self, training: Training) -> None:
        from any_device import OnAnyDevice
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
        from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper
        from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        super().__init__(training)
        self._wrap, self._steps = OnAnyDevice, 0
        folder = training.args.directory / "local"
        copies = CliqueReplicationStrategy(GroupWrapper(distributed.new_group())) if COPIES else None
        self._manager = LocalCheckpointManager(folder, repl_strategy=copies)
        Nvrx.client = self._client = Nvrx.client or RankMonitorClient()
        if self._client.is_initialized:  # a restart in the same process
            self._client.shutdown_workload_monitoring()
        self._client.init_workload_monitoring()

    def restore(self) -> int:
        if (step := self._manager.find_latest()) < 0:
            return 0
        found = self._manager.load()[0].state_dict
        self._client.load_state_dict(found.pop("heartbeats"))
        self.training.load(found)
        return step

    def save(self, step: int) -> None:
        state = {**self.training.state(), "heartbeats": self._client.state_dict()}
        self._manager.save(self._wrap(state), step)

    def beat(self) -> None:
        self._client.send_heartbeat()
        self._steps += 1
        if self._steps == self.beats:
            self._client.calculate_and_set_hb_timeouts()


class NvrxInProcess(Nvrx):
    """No timeouts of heartbeats: its documents ask for timeouts longer than those of the wrapper, which notices a hang itself."""

    beats = -1


class Dlrover(None_):
    """DLRover's flash checkpoint: in shared memory each time, and each tenth on disk. Each rank has a shard of its own."""

    def __init__(self, training: Training) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        super().__init__(training)
        self._checkpointer = DdpCheckpointer(
            str(training.args.directory / "flash"),
            local_shard_num=int(os.environ["LOCAL_WORLD_SIZE"]),
            global_shard_num=distributed.get_world_size(),
        )

    def restore(self) -> int:
        state = self._checkpointer.load_checkpoint()
        if not state:
            return 0
        self.training.load(deepcopy(state))  # on a CPU, Adam's moments would else lie in the checkpoint's own memory
        return int(state["step"])

    def save(self, step: int) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import StorageType

        where = StorageType.MEMORY if step % (10 * self.training.args.every) else StorageType.DISK
        self._checkpointer.save_checkpoint(step, {**self.training.state(), "step": step}, storage_type=where)


def torchft(args: argparse.Namespace) -> None:
    """Each of the two launches is a replica group of one rank. torchft averages the gradients between them, and a group that comes back
    gets the state of the other."""
    from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

    distributed.init_process_group(accelerator.BACKEND)
    mpu.initialize_model_parallel()
    group = int(os.environ["REPLICA_GROUP_ID"])
    training = Training(args, group, group, 2)
    training.tell(start=os.getpid())
    while len((args.directory / "events").read_text().splitlines()) < 2:
        time.sleep(0.05)  # else the faster group begins alone
    cuda = accelerator.KIND == "cuda"
    manager = Manager(
        pg=ProcessGroupNCCL(timeout=timedelta(seconds=30)) if cuda else ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=training.load,
        state_dict=training.state,
        replica_id=f"race_{group}",
        timeout=timedelta(seconds=30),
    )
    while manager.current_step() < args.until:
        manager.start_quorum()
        training.compute(manager.current_step())
        averaged = [buffer.grad_data for buffer in training.model.buffers]
        for gradients in averaged:
            manager.allreduce(gradients).wait()
        if not all(math.isfinite(gradients.sum().item()) for gradients in averaged):
            manager.report_error(FloatingPointError("the gradients are not finite"))
        if manager.should_commit():
            training.apply()
            training.done(manager.current_step() - 1, manager.num_participants())
    manager.shutdown()


def inprocess(args: argparse.Namespace) -> None:
    """nvidia-resiliency-ext: the function is called again in the same process, beneath ft_launcher, which restarts a rank that has died.
    As in its examples, each call has a store of its own."""
    from nvidia_resiliency_ext.inprocess import CallWrapper, Wrapper
    from nvidia_resiliency_ext.inprocess.health_check import CudaHealthCheck

    rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    common = distributed.TCPStore(os.environ["MASTER_ADDR"], port + 1, ranks, rank == 0, multi_tenant=True)

    def train(call):  # type: ignore[no-untyped-def]
        if mpu.is_initialized():
            mpu.destroy_model_parallel()
        store = distributed.PrefixStore(str(call.iteration), common)
        distributed.init_process_group(accelerator.BACKEND, store=store, rank=rank, world_size=ranks)
        with_checkpoints(args, NvrxInProcess)

    train.__annotations__ = {"call": CallWrapper}  # the wrapper looks for the class, and not for its name
    check = CudaHealthCheck() if accelerator.KIND == "cuda" else None
    Wrapper(store_kwargs={"port": port + 2}, health_check=check)(train)(None)


COPIES = os.environ.get("GROUP_WORLD_SIZE") != "1"
"""Whether there is another node to hold copies."""
KEEPERS = {"none": None_, "torchrun": Dcp, "nvrx": Nvrx, "dlrover": Dlrover}


def run(args: argparse.Namespace) -> None:
    match args.system:
        case "torchft":
            torchft(args)
        case "nvrx-inprocess":
            inprocess(args)
        case system:
            with_checkpoints(args, KEEPERS[system])
