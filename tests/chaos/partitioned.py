"""A model as DeepSpeed ZeRO-3 leaves it between two steps: empty parameters, with their content elsewhere. Trained with a Session, or
(--megatron) by a loop of Megatron's shape in a package `megatron` on the path."""

import sys
from types import SimpleNamespace

import torch
from torch import distributed, nn

from mt_resilient import Session

distributed.init_process_group("gloo")
model = nn.Linear(1, 1)
for parameter in model.parameters():
    parameter.ds_tensor, parameter.data = parameter.data, torch.empty(0)
optimizer = torch.optim.SGD([{"params": []}])
if "--megatron" in sys.argv:
    from megatron.training import training

    args = SimpleNamespace(iteration=0, train_iters=4, exit_interval=None, save=None, save_interval=None)
    args.begun = args.num_floating_point_operations_so_far = 0
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    vars(training).update(ARGS=args, DONE=[], MODEL=[model], OPTIMIZER=optimizer, SCHEDULER=schedule)
    print("trained", training.pretrain(None), "steps", flush=True)
else:
    session = Session(model=model, optimizer=optimizer)
    for _ in session.steps(4):
        distributed.barrier()
    print("trained", flush=True)
distributed.destroy_process_group()
