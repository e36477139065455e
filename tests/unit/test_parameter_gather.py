"""Gathering the parameters after a restore, and which of their elements a rank has before they are gathered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mt_resilient.checkpoint.format.sharding import Part
from mt_resilient.training.loops.hooks import forget_attention_maxima
from mt_resilient.training.loops.parameter_gather import finish_gathers, gather_parameters
from mt_resilient.training.state.optimizers.optimizer_shards import before_gather
from mt_resilient.training.state.optimizers.optimizers import Optimizers


class Group:
    """As Megatron's group of buckets."""

    def __init__(self, done: list[str], handle: bool = False) -> None:
        self.done = done
        self.param_gather_handle: Any = SimpleNamespace(wait=lambda: done.append("waited")) if handle else None

    def start_param_sync(self) -> None:
        assert self.param_gather_handle is None
        self.done.append("gathered")

    def finish_param_sync(self, skip_next_bucket_dispatch: bool) -> None:
        assert skip_next_bucket_dispatch
        self.done.append("finished")


class Chunk:
    """As Megatron's DistributedDataParallel."""

    def __init__(self, done: list[str], handle: bool = False, **config: bool) -> None:
        self.ddp_config = SimpleNamespace(**config)
        self.bucket_groups = [Group(done, handle)]
        self.remove_forward_pre_hook_handles: dict[Any, Any] = {}
        self.done = done

    def start_param_sync(self, *, force_dispatch: bool) -> None:
        assert force_dispatch
        for group in self.bucket_groups:
            group.start_param_sync()

    def enable_forward_pre_hook(self) -> None:
        self.done.append("hooked")


class Wrapper(SimpleNamespace):
    """As Megatron's DistributedOptimizer."""

    __module__ = "megatron.core"


def part_of(done: list[str], *names: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: lambda name=name: done.append(name) for name in names})


SHARDED, OVERLAPPED = {"use_distributed_optimizer": True}, {"overlap_param_gather": True}


@pytest.mark.parametrize(
    ("config", "handle", "expected"),
    [
        ({}, False, []),
        (SHARDED, False, ["gathered"]),
        (SHARDED | OVERLAPPED, False, ["gathered", "finished", "hooked"]),
        (SHARDED | OVERLAPPED, True, ["waited", "gathered", "finished", "hooked"]),
        (
            SHARDED | {"reuse_grad_buf_for_mxfp8_param_ag": True},
            False,
            ["_copy_main_params_to_param_buffer", "gathered"],
        ),
    ],
)
def test_parameters_are_gathered_whether_or_not_the_loop_overlaps_it(
    config: dict[str, bool], handle: bool, expected: list[str]
) -> None:
    done: list[str] = []
    parts = [part_of(done, "_copy_main_params_to_param_buffer"), SimpleNamespace()]
    gather_parameters([Chunk(done, handle, **config)], SimpleNamespace(chained_optimizers=parts))
    assert done == expected


def test_a_layer_wise_optimizer_gathers_by_itself() -> None:
    """Its fp32 parts have nothing to copy from."""
    done: list[str] = []
    gather_parameters([Chunk(done, **OVERLAPPED)], part_of(done, "allgather_params"))
    assert done == ["allgather_params", "hooked"]


def test_megatron_fsdp_has_no_handles_of_hooks() -> None:
    done: list[str] = []
    chunk = SimpleNamespace(
        ddp_config=SimpleNamespace(use_megatron_fsdp=True, **SHARDED, **OVERLAPPED),
        start_param_sync=lambda force_dispatch: done.append("gathered"),
    )
    gather_parameters([chunk], part_of(done, "_copy_main_params_to_model_params"))
    assert done == ["_copy_main_params_to_model_params", "gathered"]


def test_open_gathers_are_only_waited_for() -> None:
    done: list[str] = []
    chunk = Chunk(done, handle=True)
    finish_gathers([chunk, SimpleNamespace()])
    assert done == ["waited"]
    assert chunk.bucket_groups[0].param_gather_handle is not None


def test_until_the_next_gather_a_rank_has_only_what_it_steps() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    shards = [parameters[0].detach().view(-1)[2:5], parameters[1].detach().view(-1)]
    spans = {id(parameters[0]): (2, 5), id(parameters[1]): (0, 6)}
    inner = torch.optim.SGD(shards, 0.1)
    wrapper = Wrapper(
        optimizer=inner,
        param_groups=inner.param_groups,
        model_fp32_groups=[parameters[:2]],
        shard_fp32_groups=[shards],
        model_float16_groups=[],
        shard_fp32_from_float16_groups=[],
        shard_float16_groups=[],
        _get_model_param_range_map=lambda each: {
            "param": SimpleNamespace(start=spans[id(each)][0], end=spans[id(each)][1])
        },
    )
    divided = before_gather([Optimizers(wrapper)])
    for rank in (0, 1):
        part = Part(name="w", shape=(2, 3), offset=(0, 0), box=(2, 3), replica=(0, 0, rank))
        found = [[(each.start, each.elements, each.is_main) for each in divided(p, [part])] for p in parameters]
        assert found == [[(0, 2, False), (2, 3, True), (5, 1, False)], [(0, 6, True)], [(0, 6, False)]]
        assert divided(frozen, [part]) == [part]
        assert before_gather([])(parameters[0], [part]) == [part]


def test_attention_maxima_of_a_step_that_is_taken_back_are_forgotten() -> None:
    """The next step would clip by them."""
    chunk = torch.nn.ModuleDict({"attention": torch.nn.Identity(), "other": torch.nn.Identity()})
    chunk["attention"].current_max_attn_logits = torch.full((2,), torch.nan)
    forget_attention_maxima([chunk])
    assert chunk["attention"].current_max_attn_logits is None
    assert not hasattr(chunk["other"], "current_max_attn_logits")
