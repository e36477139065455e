"""Train GPT models with Megatron's own loop (`megatron.training.pretrain`, 0.16 and 0.17) on mock data, as Megatron-LM's pretrain_gpt.py
does. Megatron's switches choose the model: dense, mixture of experts, multi-latent attention, multi-token prediction.

`examples/llama3/train.sh` and the other models' `train.sh` start this file. It contains nothing about mt_resilient.
"""

from functools import partial

import accelerator  # noqa: F401  (import this before anything of Megatron)
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_batch_on_this_tp_rank, is_first_or_last_pipeline_stage


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    apart = {"use_transformer_engine": False, "vp_stage": vp_stage}
    if args.num_experts:
        layers = get_gpt_decoder_block_spec(config, normalization=args.normalization, **apart)
    else:
        layers = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm,
            multi_latent_attention=args.multi_latent_attention,
            normalization=args.normalization,
        )
    return GPTModel(
        config,
        layers,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, **apart) if args.mtp_num_layers else None,
        vp_stage=vp_stage,
    )


def datasets_provider(samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=get_tokenizer(),
        mid_level_dataset_surplus=0.005,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset, samples, lambda: mpu.get_tensor_model_parallel_rank() == 0, config
    ).build()


datasets_provider.is_distributed = True


def loss_func(loss_mask, output):
    loss = torch.sum(output.view(-1).float() * loss_mask.view(-1).float())
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=lambda loss: not torch.isfinite(loss),
            message="found NaN or Inf in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
    tokens = loss_mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    vp_stage = getattr(model, "vp_stage", None)
    predicts = bool(get_args().mtp_num_layers) and mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not predicts:
        return model(None, None, None), partial(loss_func, None)
    batch = get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=predicts)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


if __name__ == "__main__":
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
