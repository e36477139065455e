"""A script as MT-MegatronLM has them: the patch comes first, then Megatron's own `pretrain`."""

import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "examples", "gpt"))

import accelerator  # noqa: F401
import musa_patch  # noqa: F401
from megatron.core.enums import ModelType
from megatron.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider

if __name__ == "__main__":
    defaults = {"tokenizer_type": "NullTokenizer"}
    pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step, args_defaults=defaults)
