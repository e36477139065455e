"""A loop of one's own with the stand-in for Transformer Engine: delayed scaling, and weights in float8 with fp32 copies in the optimizer.

torchrun --nproc-per-node 2 tests/fp8/train.py STEPS MARKER     POISON: at step 11, NaN once. DEVICE=cuda: on GPUs
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn
from transformer_engine import pytorch as te

from mt_resilient import Session

steps, marker = int(sys.argv[1]), Path(sys.argv[2])
on_gpu = os.environ.get("DEVICE") == "cuda"
torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
distributed.init_process_group("nccl" if on_gpu else "gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(3)
in_fp8 = te.Linear(32, 32, primary_weights_in_fp8=True)
model = nn.Sequential(te.Linear(16, 32), nn.Tanh(), in_fp8, nn.Tanh(), te.Linear(32, 16))
main = in_fp8.weight.dequantize().requires_grad_()
optimizer = torch.optim.AdamW([each for each in model.parameters() if each is not in_fp8.weight] + [main], lr=1e-2)
recipe = te.DelayedScaling(amax_history_len=6)

session = Session(model=model, optimizer=optimizer)
for step in session.steps(steps):
    time.sleep(0.01)
    generator = torch.Generator("cpu").manual_seed(session.data_step * world + rank)
    inputs = torch.randn(32, 16, generator=generator, device="cpu").to(torch.get_default_device())
    optimizer.zero_grad()
    with te.fp8_autocast(fp8_recipe=recipe):
        outputs = model(inputs)
    loss = nn.functional.mse_loss(outputs, inputs.sin().cumsum(1))
    loss.backward()
    main.grad, in_fp8.weight.grad = in_fp8.weight.grad, None
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    if step == 11 and rank == world - 1 and "POISON" in os.environ and not marker.exists():
        marker.touch()
        trained[0].grad[0, 0] = float("nan")
    for each in trained:
        distributed.all_reduce(each.grad)
        each.grad /= world
    norm = nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    in_fp8.weight.data.copy_(main.detach())
    session.report(loss=loss, grad_norm=norm)
    if rank == 0:
        print(f"step {step} loss {float(loss.detach())!r}", flush=True)

digest = hashlib.sha256()
scaling = [vars(module.fp8_meta[name]) for module in model if hasattr(module, "fp8_meta") for name in te.TYPES]
states = [state for part in optimizer.state.values() for state in part.values()]
for tensor in [
    *trained,
    *states,
    in_fp8.weight._data,
    in_fp8.weight._scale_inv,
    *(t for each in scaling for t in each.values()),
]:
    digest.update(tensor.detach().contiguous().cpu().numpy().tobytes())
if rank == 0:
    print(f"final state sha256 {digest.hexdigest()}", flush=True)
time.sleep(0.2)  # gloo's threads may not outlive the group that is destroyed under them
distributed.destroy_process_group()
