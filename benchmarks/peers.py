"""The peers of our snapshots: other ways to write a training's tensors to a local file system and read them back.

`gather()` creates each peer of the `ROSTER` whose package is installed, and gives the reason why each other peer is missing. `snapshot.py`
measures their speed, and `integrity.py` tests whether they load wrong data. This module neither measures time nor judges.

Each peer is set up as its own documentation says. If that leaves a choice, the faster setting is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from peer import AsyncPeer, Peer, Saving, sync_tree
from states import State
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


class TorchSave(Peer):
    """torch.save, and torch.load with mmap, which avoids one copy of all data."""

    def save(self, state: State, directory: Path) -> None:
        directory.mkdir()
        torch.save(state, directory / "state.pt")
        sync_tree(directory)

    def load(self, state: State, directory: Path) -> None:
        loaded = torch.load(directory / "state.pt", map_location="cpu", mmap=True, weights_only=True)
        for name, tensor in state.items():
            tensor.copy_(loaded[name])


class Safetensors(Peer):
    package = "safetensors"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._library = import_module("safetensors")
        self._torch = import_module("safetensors.torch")

    def save(self, state: State, directory: Path) -> None:
        directory.mkdir()
        self._torch.save_file(state, directory / "state.safetensors")
        sync_tree(directory)

    def load(self, state: State, directory: Path) -> None:
        with self._library.safe_open(directory / "state.safetensors", framework="pt") as file:
            for name, tensor in state.items():
                tensor.copy_(file.get_tensor(name))


class Dcp(Peer):
    """torch.distributed.checkpoint in one process, with this many writer threads, each with its own file."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__(name)
        self._threads = threads

    def save(self, state: State, directory: Path) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, thread_count=self._threads), no_dist=True)
        sync_tree(directory)

    def load(self, state: State, directory: Path) -> None:
        dcp.load(state, checkpoint_id=directory, no_dist=True)


class DcpAsync(AsyncPeer):
    """dcp.async_save: in a thread or in a process, after a blocking copy or with the "zero overhead" stager.

    The stager keeps its buffers from save to save (shared memory for a process, pinned if there is CUDA) and copies in its own thread.
    `async_save` returns immediately, and the state must not change until `staged` returns. The setup is torchtitan's
    (`async_with_pinned_mem`).
    """

    def __init__(self, name: str, kind: AsyncCheckpointerType, zero_overhead: bool) -> None:
        super().__init__(name)
        self._kind = kind
        by_process = kind is AsyncCheckpointerType.PROCESS
        if by_process and not distributed.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "localhost")
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        cuda = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=by_process, use_async_staging=True, use_non_blocking_copy=cuda
        )
        self._stager = _KeptStager(options) if zero_overhead else None

    def save_async(self, state: State, directory: Path) -> Saving:
        answer = dcp.async_save(
            state, checkpoint_id=directory, async_checkpointer_type=self._kind, async_stager=self._stager, no_dist=True
        )
        staged, uploaded = (
            (None, answer) if isinstance(answer, Future) else (answer.staging_completion, answer.upload_completion)
        )

        def done() -> None:
            uploaded.result()
            sync_tree(directory)

        return Saving(staged.result if staged else _nothing, done)

    def load(self, state: State, directory: Path) -> None:
        dcp.load(state, checkpoint_id=directory, no_dist=True)

    def close(self) -> None:
        if self._stager:
            self._stager.close()


class _KeptStager(DefaultStager):
    """A stager that keeps its buffers until it is closed, as in torch 2.13.

    In torch 2.11 each copy ends with `StateDictStager.close`, to break a reference cycle. Then the buffers are deleted, and the next
    `stage` raises KeyError. With this class the content is correct. The first save is staged in 0.53 s, the second in 32 ms (0.94 GB, H200,
    torch 2.11).
    """

    def __init__(self, options: StagingOptions) -> None:
        super().__init__(options)
        self._state_dict_stager.close = _nothing

    def close(self) -> None:
        del self._state_dict_stager.close
        super().close()


def _nothing() -> None:
    pass


class Torchsnapshot(AsyncPeer):
    package = "torchsnapshot"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._library = import_module("torchsnapshot")

    def save_async(self, state: State, directory: Path) -> Saving:
        pending = self._library.Snapshot.async_take(str(directory), {"state": self._library.StateDict(**state)})

        def done() -> None:
            pending.wait()
            sync_tree(directory)

        return Saving(_nothing, done)

    def load(self, state: State, directory: Path) -> None:
        self._library.Snapshot(str(directory)).restore({"state": self._library.StateDict(**state)})


class Orbax(AsyncPeer):
    """orbax's AsyncCheckpointer with a tree of numpy arrays. The options are those of its PyTreeCheckpointHandler."""

    package = "orbax-checkpoint"

    def __init__(self, name: str, **options: bool) -> None:
        super().__init__(name)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # otherwise jax takes most of a GPU's memory
        self._bfloat16 = import_module("ml_dtypes").bfloat16
        self._library = import_module("orbax.checkpoint")
        self._checkpointer = self._library.AsyncCheckpointer(self._library.PyTreeCheckpointHandler(**options))

    def save_async(self, state: State, directory: Path) -> Saving:
        tree = {name: self._array(tensor) for name, tensor in state.items()}
        self._checkpointer.save(directory.absolute(), args=self._library.args.PyTreeSave(tree))

        def done() -> None:
            self._checkpointer.wait_until_finished()
            sync_tree(directory)

        return Saving(_nothing, done)

    def load(self, state: State, directory: Path) -> None:
        loaded = self._checkpointer.restore(directory.absolute(), args=self._library.args.PyTreeRestore())
        for name, tensor in state.items():
            array = loaded[name]
            bits = array.view("int16") if array.dtype == self._bfloat16 else array
            tensor.copy_(torch.from_numpy(bits).view(tensor.dtype))

    def close(self) -> None:
        self._checkpointer.close()

    def _array(self, tensor: torch.Tensor) -> Any:
        """Return a numpy view of the tensor, or of its copy in host memory. numpy has bfloat16 only through ml_dtypes."""
        host = tensor.detach().cpu()
        return host.view(torch.int16).numpy().view(self._bfloat16) if host.dtype is torch.bfloat16 else host.numpy()


_THREAD, _PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS

ROSTER: dict[str, Callable[[str], Peer]] = {
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "DCP, 1 thread": partial(Dcp, threads=1),
    "DCP, 2 threads": partial(Dcp, threads=2),
    "DCP async, thread": partial(DcpAsync, kind=_THREAD, zero_overhead=False),
    "DCP async, process": partial(DcpAsync, kind=_PROCESS, zero_overhead=False),
    "DCP async, thread, stager": partial(DcpAsync, kind=_THREAD, zero_overhead=True),
    "DCP async, process, stager": partial(DcpAsync, kind=_PROCESS, zero_overhead=True),
    "torchsnapshot": Torchsnapshot,
    "orbax": Orbax,
    "orbax zarr3": partial(Orbax, use_zarr3=True),
    "orbax zarr3, uncompressed": partial(Orbax, use_zarr3=True, use_compression=False),
}
"""All peers by name, in the order of the tables: from simple to elaborate."""


@dataclass(frozen=True)
class Field:
    """The installed peers, and why the others are missing."""

    peers: tuple[Peer, ...]
    missing: dict[str, str]
    """The reason why each missing peer is missing, by name."""


def gather(names: Sequence[str] = tuple(ROSTER)) -> Field:
    peers: list[Peer] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            peers.append(ROSTER[name](name))
        except Exception as error:  # an old package may fail with any error on a new torch
            missing[name] = f"{type(error).__name__}: {error}"
    return Field(tuple(peers), missing)
