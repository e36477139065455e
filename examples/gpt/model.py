"""A small GPT (dense or mixture of experts) on megatron-core with TP, PP, EP, data parallelism and the distributed optimizer.

Import `accelerator` before this module.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY = 128
EXPERTS = 4
MAX_LR, MIN_LR = 3e-3, 3e-4
SEED = 1234


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=4,
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        expert_model_parallel_size=args.ep,
        sequence_parallel=args.moe and args.tp > 1,  # megatron-core requires it with experts
        pipeline_dtype=torch.float32,
        add_bias_linear=not args.moe,
        num_moe_experts=EXPERTS if args.moe else None,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss" if args.moe else "none",
        moe_aux_loss_coeff=0.01 if args.moe else 0.0,
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,  # this and the following options need Apex or Transformer Engine
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def build(args: argparse.Namespace, device: torch.device) -> tuple[Any, Any, OptimizerParamScheduler]:
    """Return this rank's stage of the model, wrapped for data parallelism; its optimizer; the learning-rate schedule."""
    seed = SEED + 100 * mpu.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    config = transformer_config(args)
    stage = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False),
        VOCABULARY,
        args.seq,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        parallel_output=True,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(device)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True), stage
    )
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=MAX_LR, min_lr=MIN_LR, weight_decay=0.01, clip_grad=1.0, use_distributed_optimizer=True),
        [model],
    )
    samples = args.steps * args.gbs
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=MAX_LR,
        min_lr=MIN_LR,
        lr_warmup_steps=samples // 10,
        lr_decay_steps=samples,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=samples,
        wd_incr_style="constant",
    )
    config.grad_scale_func = optimizer.scale_loss
    model.train()
    return model, optimizer, scheduler


def _state(model: Any, optimizer: Any) -> Iterator[torch.Tensor]:
    yield from model.module.parameters()
    yield from model.module.buffers()
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                state = part.optimizer.state[param]
                yield param
                yield from (state[key] for key in sorted(state) if torch.is_tensor(state[key]))


def state_digest(model: Any, optimizer: Any) -> str:
    """Return SHA-256 over this rank's parameters, buffers and optimizer state."""
    digest = hashlib.sha256()
    for tensor in _state(model, optimizer):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
