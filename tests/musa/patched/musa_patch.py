"""A patch of the shape of Moore Threads' own `musa_patch` (MT-MegatronLM), on the CPU. Written anew; that one has no licence.

What of it matters to those who hook into Megatron's loop:

    torch.cuda        answers for another device: `current_device()` is a text, `is_cuda` is always true
    train,            are functions of another module, whose globals are not those of `megatron.training.training`
    training_log
    the router        its correction bias is a Parameter that is not trained: no gradient, no optimizer, changed between the steps
    the backend       `nccl` becomes another one

Import it after torch is there, and before anything of Megatron, as scripts for MUSA do.
"""

import inspect
import sys
import types

import torch

torch.cuda.current_device = lambda: "cpu"  # "musa:0" on hardware
torch.cuda.is_available = lambda: True
_init = torch.distributed.init_process_group


def _init_process_group(*args, **kwargs):
    if kwargs.get("backend") == "nccl":
        kwargs["backend"] = "gloo"  # "mccl" on hardware
    return _init(*args, **kwargs)


torch.distributed.init_process_group = _init_process_group

from megatron.core.transformer.moe import router  # noqa: E402
from megatron.training import training  # noqa: E402

_made = router.TopKRouter.__init__


def _with_an_untrained_parameter(self, *args, **kwargs):
    _made(self, *args, **kwargs)
    if getattr(self, "expert_bias", None) is not None:
        bias = self.expert_bias
        del self.expert_bias
        self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)


router.TopKRouter.__init__ = _with_an_untrained_parameter

own = types.ModuleType("musa_patch.training")
for name, each in vars(training).items():
    if name == "__builtins__" or not name.startswith("__"):
        setattr(own, name, inspect.unwrap(each) if inspect.isfunction(each) else each)
for name in ("train", "training_log"):
    original = inspect.unwrap(getattr(training, name))
    made = types.FunctionType(original.__code__, vars(own), name, original.__defaults__, original.__closure__)
    made.__kwdefaults__ = original.__kwdefaults__
    setattr(own, name, made)
if "nemesis" in sys.modules:  # the faults of the tests
    sys.modules["nemesis"].megatron_lm(own)
training.train, training.training_log = own.train, own.training_log
