"""Patches that Megatron's own modules need, besides `cpu_shim`, if Transformer Engine, Apex and a compiler are absent."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from after_import import after_import


@after_import("megatron.core.transformer.moe.moe_utils")
def moe_without_te(module: Any) -> None:
    """Define `te_general_gemm`. Megatron 0.15 and 0.16 test `te_general_gemm is not None`, a NameError without Transformer Engine."""
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


@after_import("megatron.core.transformer.dot_product_attention")
def latent_attention_without_te(module: Any) -> None:
    """Let the attention of plain torch have another head width for values than for queries and keys, as multi-latent attention needs. Only
    Transformer Engine's attention has these two arguments."""
    attention = module.DotProductAttention
    init, forward = attention.__init__, attention.forward
    if "k_channels" in inspect.signature(init).parameters:
        return

    def __init__(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward_contiguous(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, query, key.contiguous(), value.contiguous(), *args, **kwargs)

    attention.__init__, attention.forward = __init__, forward_contiguous


@after_import("megatron.core.optimizer.distrib_optimizer")
def adam_of_torch_can_load(module: Any) -> None:
    """Let DistributedOptimizer load a checkpoint over torch's own Adam, whose state exists only after the first step.

    Without this patch, state_dict() asserts that there is one `step`. load_state_dict() gives all parameters the same step tensor, which
    then grows by n_params in each step. Finally, the 0 of the fresh optimizer overwrites the restored step.
    """
    import torch

    optimizer = module.DistributedOptimizer
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict
    set_states = getattr(optimizer, "_set_main_param_and_optimizer_states", None)
    if set_states is None:  # 0.9, which refuses torch's Adam although it trains with it
        module.HAVE_APEX_OR_TE = True
        return

    def state_dict_with_state(self: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Optimizer) and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    self.optimizer.state[param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
        return state_dict(self)

    def load_state_dict_with_own_steps(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        for entry in getattr(self.optimizer, "state", {}).values():
            if isinstance(entry, dict) and torch.is_tensor(entry.get("step")):
                entry["step"] = entry["step"].clone()

    def set_states_but_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        entry = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in entry:
            tensors = {**tensors, "step": entry["step"]}
        with torch.no_grad():
            set_states(self, model_param, tensors)

    optimizer.state_dict = state_dict_with_state
    optimizer.load_state_dict = load_state_dict_with_own_steps
    optimizer._set_main_param_and_optimizer_states = set_states_but_step


@after_import("megatron.core.transformer.torch_norm")
def torch_norm_under_sequence_parallel(module: Any) -> None:
    """Allow WrappedTorchNorm with sequence parallelism, although it asserts that sequence parallelism is off. The norm needs only the mark
    that finalize_model_grads uses for its reduction."""
    new = module.WrappedTorchNorm.__new__

    def __new__(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = new(cls, plain, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    module.WrappedTorchNorm.__new__ = staticmethod(__new__)


@after_import("megatron.core.dist_checkpointing.validation")
def old_names_of_numpy(module: Any) -> None:
    """Restore np.product, which numpy 2 no longer has. Megatron up to 0.12 calls it when it saves."""
    if not hasattr(module.np, "product"):
        module.np.product = module.np.prod


@after_import("megatron.core.dist_checkpointing.strategies.filesystem_async")
def old_writer_on_new_torch(module: Any) -> None:
    """Adapt the writer of Megatron up to 0.12, which calls torch's private _write_item with the arguments of an older torch."""
    from torch.distributed.checkpoint import filesystem

    if "serialization_format" in inspect.getsource(module):
        return

    def write_item(*args: Any) -> Any:
        transforms = () if len(args) == 5 else (filesystem._StorageWriterTransforms(),)
        return filesystem._write_item(*transforms, *args, filesystem.SerializationFormat.TORCH_SAVE)

    module._write_item = write_item


@after_import("megatron.core.datasets.utils")
def helpers_are_built(module: Any) -> None:
    """Build the data set helpers only if they are missing. Packages contain them compiled, without a Makefile, but megatron.training runs
    make."""
    compile_helpers = module.compile_helpers

    def compile_if_missing() -> None:
        try:
            import megatron.core.datasets.helpers_cpp  # noqa: F401
        except ImportError:
            compile_helpers()

    module.compile_helpers = compile_if_missing


@after_import("megatron.legacy.fused_kernels")
def no_fused_kernels(module: Any) -> None:
    """Skip load(), which calls nvcc."""
    module.load = lambda args: None
