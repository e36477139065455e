"""A training on two devices for `hangs.py`: small all-reduced steps, and at step AT the case that is asked for.

    torchrun --nproc-per-node 2 train.py KIND CASE FOLDER

KIND: cuda, musa (the stand-in), cpu. FOLDER: the rank that causes a hang first makes the file `fault` there, and only if there is none yet.
Rank 0 appends a line to `steps` for each step, and to `done` what a healthy case showed.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn

from mt_resilient import Session

kind, case, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
if kind == "musa":
    import torch_musa  # noqa: F401

AT, STEPS = 20, 40
LONG_S, BETWEEN = 1200.0, 40
"""The case `long`: how many seconds it trains, and the number of steps from one evaluation, save or compilation to the next."""
rank = int(os.environ["RANK"])
module = getattr(torch, kind) if kind != "cpu" else None
device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0) if module else torch.device("cpu")
if module:
    module.set_device(device)
distributed.init_process_group(
    {"cuda": "nccl", "musa": "mccl"}.get(kind, "gloo"), device_id=device if kind == "cuda" else None
)
torch.manual_seed(1)
width = 1024 if kind == "cuda" else 32
model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def note(name: str, words: str = "") -> None:
    with (folder / name).open("a") as file:
        file.write(f"{time.time():.3f} {words}\n")


def kernels(seconds: float, each_s: float = 0.002, wait_every: int = 0) -> float:
    """Queue kernels that take so long together; after each `wait_every` of them (0: never), wait for a number."""
    value = torch.ones(1, device=device)
    for number in range(int(seconds / each_s)):
        if kind == "cpu":
            time.sleep(each_s)
        else:
            module._sleep(int(each_s * (1.8e9 if kind == "cuda" else 1e9)))
        value += 1
        if wait_every and number % wait_every == 0:
            value.item()
    return value.item()


# -- the hangs, on rank 1 --------------------------------------------------------------------------------------------------


def collective() -> None:
    """All others all-reduce."""
    part = torch.ones(64, device=device)
    distributed.all_gather([torch.empty_like(part) for _ in range(distributed.get_world_size())], part)
    part.sum().item()


def kernel() -> None:
    if module:
        module._sleep(10**15)
    else:
        time.sleep(1e6)
    torch.ones(1, device=device).item()


def behind() -> None:
    """A kernel never ends, and the rank goes on: it calls the collective that its device will not reach."""
    if module:
        module._sleep(10**15)
    else:
        time.sleep(1e6)


def forward() -> None:
    """As `kernel`, but the rank goes on to queue work, until the queue of its device is full."""
    module._sleep(10**15)
    inputs = torch.randn(8, width, device=device)
    while True:
        inputs = model(inputs).detach()


def sleep() -> None:
    while True:
        time.sleep(1000)


def stop() -> None:
    os.kill(os.getpid(), 19)  # SIGSTOP


HANGS = {
    "collective": collective,
    "kernel": kernel,
    "behind": behind,
    "timed": behind,
    "forward": forward,
    "sleep": sleep,
    "stop": stop,
}


# -- what is healthy, and takes long: on all ranks --------------------------------------------------------------------------


def waits_for_rank_0(work) -> None:
    try:
        if rank == 0:
            work()
    finally:
        distributed.barrier()


def evaluates() -> None:
    """Rank 0 alone, with a number every 0.4 s; the other waits on its device."""
    waits_for_rank_0(lambda: kernels(40, wait_every=200))


def evaluates_without_waiting() -> None:
    """Rank 0 alone, as fast as the queue takes it, for a number at the end."""
    waits_for_rank_0(lambda: kernels(15))


def evaluates_on_the_host() -> None:
    def work() -> None:
        until = time.monotonic() + 15
        while time.monotonic() < until:
            sum(range(100_000))

    waits_for_rank_0(work)


def saves() -> None:
    def work() -> None:
        until = time.monotonic() + 12
        while time.monotonic() < until:
            torch.save([each.detach().cpu().numpy() for each in model.parameters()], folder / "saved.pt")

    waits_for_rank_0(work)


def captures() -> None:
    """A graph is captured, with a pause in which the watching thread looks at the device, and gives the right numbers."""
    if kind != "cuda":
        return
    source, result = torch.ones(4, device=device), torch.zeros(4, device=device)
    torch.cuda.synchronize()
    for mode in ("global", "thread_local"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            result.copy_(source * 3)
            time.sleep(4)
            result.add_(1)
        source.fill_(5.0)
        graph.replay()
        assert result.tolist() == [16.0] * 4, result
        source.fill_(1.0)


def compiles() -> None:
    if kind != "cuda":
        return
    began = time.monotonic()
    compiled = torch.compile(lambda x: (torch.tanh(x) @ x).relu().sum() + x.var(), dynamic=False)
    for size in (128, 192, 256, 320):
        compiled(torch.randn(size, size, device=device)).item()
    note("done", f"compile took {time.monotonic() - began:.1f} s on rank {rank}")


HEALTHY = (evaluates, evaluates_without_waiting, evaluates_on_the_host, saves, captures, compiles)


def shows(work) -> None:
    try:
        work()
        note("done", f"{work.__name__} on rank {rank}")
    except Exception as error:
        note("done", f"{work.__name__} FAILED on rank {rank}: {error!r}"[:600].replace("\n", " "))


session, began_s = Session(model=model, optimizer=optimizer), time.monotonic()
for step in session.steps(STEPS if case != "long" else 1_000_000):
    generator = torch.Generator().manual_seed(session.data_step)
    inputs = torch.randn(8, width, generator=generator).to(device)
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if case in HANGS and step == AT and rank == 1 and not (folder / "fault").exists():
        note("fault")
        HANGS[case]()
    if case == "healthy":
        kernels(1.5 if step % 10 == 9 else 0.15)
        if step >= AT and step - AT < len(HEALTHY):
            shows(HEALTHY[step - AT])
    elif case == "long":
        kernels(0.1 * 10 ** torch.rand((), generator=generator).item())
        if step % BETWEEN == AT:
            shows(HEALTHY[step // BETWEEN % len(HEALTHY)])
    else:
        time.sleep(0.1)
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
    optimizer.step()
    session.report(loss=loss.item())
    if rank == 0:
        note("steps", str(step))
    if case == "long":
        over = torch.tensor(float(time.monotonic() - began_s > LONG_S), device=device)
        distributed.broadcast(over, 0)
        if over.item():
            break
time.sleep(0.2)
distributed.destroy_process_group()
