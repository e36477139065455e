"""Refuses models and optimizers of DeepSpeed ZeRO-3 before the first step. Between two steps, their parameters are empty tensors and their
groups have no parameters, so a snapshot would hold no weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...resilience.errors import StateError
from .modules.module_source import Modules
from .optimizers.optimizers import Optimizers

_CURE = (
    "{} is partitioned by DeepSpeed ZeRO-3, and a snapshot would hold no weights. Use ZeRO-1, ZeRO-2 or FSDP2. Or run the script without a "
    "Session: DeepSpeed's own checkpoints then continue it after a restart"
)


class Partitioned(StateError):
    """A source is partitioned by ZeRO-3, on all ranks."""


def refuse_partitioned(sources: Mapping[str, object]) -> None:
    """Raises Partitioned with the name of the source."""
    for name, source in sources.items():
        if isinstance(source, Modules):
            partitioned = any(hasattr(each, "ds_tensor") for each in source.named()[0].values())
        else:
            # Groups of other frameworks may be empty on a rank.
            partitioned = isinstance(source, Optimizers) and any(
                type(wrapper).__module__.partition(".")[0] == "deepspeed"
                and bool(inner.param_groups)
                and not any(group["params"] for group in inner.param_groups)
                for _, wrapper, inner in source.parts()
            )
        if partitioned:
            raise Partitioned(_CURE.format(name))
