"""A small GPT over the real `megatron.training.pretrain` (0.16 and 0.17), as pretrain_gpt.py does it. Nothing here knows of any shim."""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_batch_on_this_tp_rank, is_first_or_last_pipeline_stage


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    return GPTModel(
        config or core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(args.num_experts),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
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
    if not is_first_or_last_pipeline_stage(getattr(model, "vp_stage", None)):
        return model(None, None, None), partial(loss_func, None)
    batch = get_batch_on_this_tp_rank(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


if __name__ == "__main__":
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
