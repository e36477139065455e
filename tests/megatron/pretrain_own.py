"""The GPT of examples/gpt/pretrain_gpt.py, trained by a loop of the script's own beside Megatron's: a module with its own `pretrain`,
`train` and `train_step`, as FlagScale has one. Its text is that of the installed Megatron. With `--dataloader-type external`, the data
comes from a loader that can save its place; with PLAIN_LOADER=1, from one that cannot.
"""

import importlib.util
import os
import sys

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import get_args

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "examples", "gpt"))
from pretrain_gpt import datasets_provider, forward_step, model_provider

spec = importlib.util.find_spec("megatron.training.training")
own = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("own_loop", spec.loader, origin=spec.origin))
own.__package__ = "megatron.training"
exec(compile(spec.loader.get_data(spec.origin), spec.origin, "exec"), vars(own))
sys.modules["own_loop"] = own
if "nemesis" in sys.modules:  # the faults of the tests
    sys.modules["nemesis"].megatron_lm(own)


class Batches:
    """Batches by number."""

    def __init__(self):
        self.number = 0

    def __next__(self):
        args = get_args()
        generator = torch.Generator().manual_seed(
            self.number * mpu.get_data_parallel_world_size() + mpu.get_data_parallel_rank()
        )
        self.number += 1
        size = args.micro_batch_size, args.seq_length
        tokens = torch.randint(args.vocab_size, (size[0], size[1] + 1), generator=generator)
        seen = torch.tril(torch.ones(size[0], 1, size[1], size[1])) < 0.5
        places = torch.arange(size[1]).expand(*size)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": torch.ones(size)}
        return batch | {"attention_mask": seen, "position_ids": places}


class Saving(Batches):
    def save_state_rank(self):
        return {"number": self.number}

    def restore_state_rank(self, state):
        self.number = state["number"]


def provider(samples, vp_stage=None):
    if get_args().dataloader_type != "external":
        return datasets_provider(samples, vp_stage)
    return Batches() if os.environ.get("PLAIN_LOADER") else Saving(), None, None


provider.is_distributed = True

if __name__ == "__main__":
    own.pretrain(
        provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
