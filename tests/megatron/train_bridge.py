"""NVIDIA's Megatron-Bridge 0.3.1 (its own, unmodified training loop) on a small GPT with mock data. Nothing here knows of any shim."""

import argparse

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RerunStateMachineConfig,
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.core.transformer.enums import AttnBackend


def configuration(args: argparse.Namespace) -> ConfigContainer:
    return ConfigContainer(
        rng=RNGConfig(seed=1234),
        train=TrainingConfig(
            micro_batch_size=args.micro_batch_size,
            global_batch_size=args.global_batch_size,
            train_iters=args.train_iters,
            eval_iters=0,
            eval_interval=1000,
        ),
        model=GPTModelProvider(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            ffn_hidden_size=4 * args.hidden_size,
            num_attention_heads=4,
            seq_length=args.seq_length,
            vocab_size=256,
            transformer_layer_spec=local_layer_spec,
            transformer_impl="local",
            attention_backend=AttnBackend.unfused,
            position_embedding_type="rope",
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            cross_entropy_loss_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            pipeline_dtype=torch.float32,
            attention_dropout=0.1,
            hidden_dropout=0.1,
        ),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            min_lr=3e-4,
            weight_decay=0.01,
            clip_grad=1.0,
            bf16=False,
            fp16=False,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=2,
            lr_decay_iters=args.train_iters,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
        ),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            check_for_nan_in_grad=args.check_for_nan,
        ),
        rerun_state_machine=RerunStateMachineConfig(check_for_nan_in_loss=args.check_for_nan),
        dataset=MockGPTDatasetConfig(
            seq_length=args.seq_length,
            random_seed=1234,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
            split="1,1,1",
            path_to_cache=None,
            dataloader_type="single",
            data_sharding=True,
        ),
        logger=LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=255),
        checkpoint=CheckpointConfig(
            save=args.save, load=args.save, save_interval=args.save_interval, save_tokenizer_assets=False
        ),
        dist=DistributedInitConfig(distributed_backend="gloo"),
    )


def arguments() -> argparse.Namespace:
    """The few that the tests turn, under the names they have in Megatron-LM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, default=12)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--seq-length", type=int, default=16)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--no-check-for-nan-in-loss-and-grad", dest="check_for_nan", action="store_false")
    parser.add_argument(
        "--save", help="checkpoint directory: written every --save-interval steps and at the end, resumed from"
    )
    parser.add_argument("--save-interval", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    pretrain(configuration(arguments()), forward_step)
