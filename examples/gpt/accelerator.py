"""Prepare the script's device on import, because megatron-core reads torch.cuda during its own import.

Moore Threads' own `musa_patch`, of MT-MegatronLM, maps torch.cuda to torch.musa. With `--device cpu`, or without any accelerator,
`cpu_shim` maps it to the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os

import torch


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "musa"], default="auto")


def _kind() -> str:
    parser = argparse.ArgumentParser(add_help=False)
    add_argument(parser)
    asked: str = parser.parse_known_args()[0].device
    if asked != "auto":
        return asked
    if importlib.util.find_spec("torch_musa"):
        return "musa"
    return "cuda" if torch.cuda.is_available() and not hasattr(torch.cuda, "is_cpu_shim") else "cpu"


KIND = _kind()
BACKEND = {"cpu": "gloo", "cuda": "nccl", "musa": "mccl"}[KIND]
"""The torch.distributed backend for collectives."""

if KIND == "cpu":
    import cpu_shim

    cpu_shim.install()
elif KIND == "musa":
    import musa_patch  # noqa: F401


def device() -> torch.device:
    """Return this rank's device."""
    if KIND == "cpu":
        return torch.device("cpu")
    mine = torch.device(KIND, int(os.environ["LOCAL_RANK"]))
    getattr(torch, KIND).set_device(mine)
    return mine
