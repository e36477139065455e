"""Carries out a rescue (`resilience/inprocess/fallback.py`), which is a number of steps with a lower learning rate or without FP8. The
learning rate is lowered only during each optimizer's step.

Between two steps, a rescue leaves no trace: the exact values that the schedule wrote are restored right after the step. So a rescue affects
neither snapshots nor schedules. At each forward pass, Megatron enters its FP8 context if `config.fp8` requests it at that time
(`megatron/core/fp8_utils.py`, `get_fp8_context`). Without the context, layers compute in the precision of their parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...resilience.errors import UsageError
from ...resilience.inprocess.fallback import RescuePolicy
from ..state.optimizers.optimizers import Optimizers
from ..state.sources import Modules, Source


class Rescue:
    def __init__(self, policy: RescuePolicy, sources: Iterable[Source]) -> None:
        """Raises UsageError if the policy cannot be carried out."""
        sources = list(sources)
        self._policy, self.on = policy, False
        self._asked = False
        self._usual: list[tuple[dict[str, Any], Any]] = []
        """Parameter groups whose learning rate is lowered at the moment, each with its usual learning rate."""
        self._configs: list[tuple[Any, Any]] = []
        """Megatron's configs, each with its usual `fp8`."""
        if policy.lr_scale < 1:
            optimizers = [source for source in sources if isinstance(source, Optimizers)]
            if not optimizers:
                raise UsageError(
                    "rescue.lr_scale is set, but this Session is given no optimizer: give it one, or leave rescue.lr_scale at 1"
                )
            for optimizer in (inner for source in optimizers for _, _, inner in source.parts()):
                optimizer.register_step_pre_hook(self._lower)
                optimizer.register_step_post_hook(self._put_back)
        if policy.precision:
            modules = (m for s in sources if isinstance(s, Modules) for chunk in s.chunks for m in chunk.modules())
            configs = {id(m.config): m.config for m in modules if getattr(getattr(m, "config", None), "fp8", None)}
            self._configs = [(config, config.fp8) for config in configs.values()]
            self._refuse_graphs()

    def _refuse_graphs(self) -> None:
        for config, _ in self._configs:
            graphs = getattr(config, "cuda_graph_impl", None) or "none"
            if graphs != "none" or getattr(config, "enable_cuda_graph", False):
                raise UsageError(
                    "rescue.precision is set, but the model runs as CUDA graphs, which keep the precision that they were recorded in: "
                    "switch one of the two off"
                )

    @property
    def asked(self) -> bool:
        """Whether the present step belongs to a rescue. A loop that sets its own precision reads this."""
        self._asked = True
        return self.on

    def check(self) -> None:
        """Call this once the first step is done. Raises UsageError if nothing has a precision that could be raised."""
        if self._policy.precision and not (self._configs or self._asked):
            raise UsageError(
                "rescue.precision is set, but no Megatron model with config.fp8 is found here, and the loop does not read "
                "session.careful. Read session.careful in the loop, or remove rescue.precision"
            )

    def turn(self, on: bool) -> None:
        """Switch the rescue on or off for the next step."""
        self.on = on
        for config, usual in self._configs:
            config.fp8 = None if on else usual

    def _lower(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._put_back()  # needed if an exception ended the last step
        if self.on:
            self._usual = [(group, group["lr"]) for group in optimizer.param_groups]
            for group, usual in self._usual:
                group["lr"] = usual * self._policy.lr_scale

    def _put_back(self, *_: Any) -> None:
        for group, usual in self._usual:
            group["lr"] = usual
        self._usual = []
