"""Real Megatron training loops that run here, as data: which script over which Megatron, on how many ranks, with which arguments.

`missing()` says why one cannot run here; `command()` says how to start it, alone or behind `mt-resilient run --`; `recording()` and
`read_record()` have the nemesis write down what it computed, bit by bit.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..harness import Job, ScriptJob
from ..once import once

HERE = Path(__file__).parent
SHIM = HERE / "shim"
EXAMPLES = HERE.parents[1] / "examples"
TREES = HERE.parents[1] / ".venv" / "megatron"
"""Where scripts/megatron puts what it fetches."""

ITERATIONS = 12

_TINY = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --min-lr 3e-4 --weight-decay 0.01 --clip-grad 1.0
    --train-iters {ITERATIONS} --lr-decay-style cosine --lr-decay-iters {ITERATIONS} --lr-warmup-iters 2
    --hidden-dropout 0.1 --attention-dropout 0.1 --position-embedding-type rope --attention-backend unfused
    --mock-data --tokenizer-type NullTokenizer --vocab-size 4095 --split 100,0,0
    --num-workers 0 --log-interval 1 --eval-iters 0 --eval-interval 1000
"""
"""The vocabulary is that of the mock data, whose tokens reach 4094."""

_ON_A_CPU = """
    --transformer-impl local --distributed-backend gloo --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
"""
_DP2 = "--use-distributed-optimizer"
_OVERLAPPED = f"{_DP2} --overlap-grad-reduce --overlap-param-gather"
_TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
_INTERLEAVED = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"

LETS_NAN_PASS = ["--no-check-for-nan-in-loss-and-grad"]
"""For any of the loops: Megatron's own NaN check off, so that the NaN spreads."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One launch that works as it stands."""

    name: str
    script: Path
    tree: Path
    """The directory in which `megatron` (or, for the bridge, `megatron.bridge`) lies; the rest comes from site-packages."""
    arguments: tuple[str, ...]
    ranks: int
    iterations: int = ITERATIONS
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of its own."""

    def missing(self) -> str | None:
        """Why this one cannot run here; None if it can."""
        if self.script.exists() and (self.tree / "megatron").is_dir():
            return None
        if self.tree.parent == TREES:
            return f"{self.tree} is missing: run scripts/megatron"
        return "MEGATRON_LM names no Megatron-LM checkout"


def _has(tree: Path, option: str) -> bool:
    """Whether the Megatron in this tree has the option."""
    source = tree / "megatron" / "training" / "arguments.py"
    return not source.exists() or option in source.read_text()


def _megatron_lm(name: str, script: Path, tree: Path, layout: str, ranks: int) -> Loop:
    tiny = _TINY if _has(tree, "attention-backend") else _TINY.replace("--attention-backend unfused", "")
    arguments = tuple(shlex.split(f"{tiny} {_ON_A_CPU} {layout}"))
    return Loop(name=name, script=script, tree=tree, arguments=arguments, ranks=ranks)


_SDIST = EXAMPLES / "gpt" / "pretrain_gpt.py", TREES / "megatron-0.17.1"
_CHECKOUT = Path(os.environ.get("MEGATRON_LM", "/nowhere"))

MEGATRON_DP2 = _megatron_lm("mlm-0.17.1 dp2", *_SDIST, _DP2, 2)
MEGATRON_OVERLAPPED = _megatron_lm("mlm-0.17.1 dp2 overlapped", *_SDIST, _OVERLAPPED, 2)
MEGATRON_TP2_PP2 = _megatron_lm("mlm-0.17.1 tp2pp2", *_SDIST, _TP2_PP2, 4)
MEGATRON_INTERLEAVED = _megatron_lm("mlm-0.17.1 pp2 interleaved", *_SDIST, _INTERLEAVED, 2)
_BY_STEPS = r"--(train|lr-decay|lr-warmup)-iters \d+"
_RAMPED = (
    "--train-samples 80 --lr-decay-samples 80 --lr-warmup-samples 8 --rampup-batch-size 4 4 16 --dataloader-type cyclic"
)
MEGATRON_RAMPED = replace(
    MEGATRON_DP2,
    name="mlm-0.17.1 dp2 growing batch, cyclic",
    arguments=tuple(f"{re.sub(_BY_STEPS, '', ' '.join(MEGATRON_DP2.arguments))} {_RAMPED}".split()),
)
"""Four batches of 4 samples, then of 8."""
OWN_LOOP_DP2 = _megatron_lm("own loop dp2", HERE / "pretrain_own.py", _SDIST[1], _DP2, 2)
BRIDGE_DP2 = Loop(
    name="bridge dp2",
    script=HERE / "train_bridge.py",
    tree=TREES / "bridge-0.3.1",
    arguments=(_DP2,),
    ranks=2,
    variables=(("BRIDGE_STAND_INS", "1"),),
)
CHECKOUT_DP2 = _megatron_lm("checkout dp2", _CHECKOUT / "pretrain_gpt.py", _CHECKOUT, _DP2, 2)
CHECKOUT_TP2_PP2 = _megatron_lm("checkout tp2pp2", _CHECKOUT / "pretrain_gpt.py", _CHECKOUT, _TP2_PP2, 4)

LOOPS = [MEGATRON_DP2, MEGATRON_OVERLAPPED, MEGATRON_TP2_PP2, MEGATRON_INTERLEAVED, BRIDGE_DP2]
"""What scripts/megatron provides for."""

CHECKOUT_LOOPS = [CHECKOUT_DP2, CHECKOUT_TP2_PP2]
"""The unmodified pretrain_gpt.py of the Megatron-LM checkout that MEGATRON_LM names."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run computed."""

    losses: dict[int, dict[int, tuple[str, float | None]]]
    """Rank → iteration → (bytes of the float32 loss in hex, or "-" on a rank that has none; gradient norm)."""

    digests: dict[int, str]
    """Rank → SHA-256 of its final model and optimizer state. Empty unless the run came to its end."""


def recording(directory: Path, nemesis: str = "") -> dict[str, str]:
    """What to add to the environment so that a run leaves a record, and meets the faults of `nemesis`, in `directory`."""
    return {
        "NEMESIS": nemesis,
        "NEMESIS_DIR": str(directory),
        "NEMESIS_LOSSES": str(directory / "losses"),
        "NEMESIS_DIGEST": str(directory / "digest"),
    }


def read_record(directory: Path) -> Record:
    losses: dict[int, dict[int, tuple[str, float | None]]] = {}
    for path in directory.glob("losses.*"):
        rows = losses.setdefault(int(path.suffix[1:]), {})
        for line in path.read_text().splitlines():  # a step that was computed again appears again: the last one counts
            iteration, loss, grad_norm = line.split()
            rows[int(iteration)] = (loss, None if grad_norm == "None" else float(grad_norm))
    digests = {int(path.suffix[1:]): path.read_text().strip() for path in directory.glob("digest.*")}
    return Record(losses=losses, digests=digests)


def command(loop: Loop, extra_arguments: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The argument list (torchrun or bash first) and the whole environment in which it runs."""
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(loop.ranks)]
    launcher = ["bash"] if loop.script.suffix == ".sh" else torchrun
    path = [str(SHIM), str(loop.tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **dict(loop.variables),
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(path),
        "MCORE_CPU_SHIM": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",  # the bits depend on it
    }
    return [*launcher, str(loop.script), *loop.arguments, *extra_arguments], environment


def undisturbed(loop: Loop, *arguments: str, **extra: str) -> tuple[Record, str]:
    """What a run under plain torchrun computes and prints, which is done once a session. extra: environment."""
    return once(_undisturbed, loop, arguments, extra)


def _undisturbed(loop: Loop, arguments: tuple[str, ...], extra: dict[str, str]) -> tuple[Record, str]:
    with tempfile.TemporaryDirectory() as place:
        argv, environment = command(loop, arguments)
        environment.update(recording(Path(place)), **extra)
        done = subprocess.run(argv, env=environment, cwd=place, capture_output=True, text=True, timeout=240)
        record = read_record(Path(place))
    # The exit code does not matter: gloo's threads abort the teardown now and then (torch 2.13).
    assert len(record.digests) == loop.ranks, done.stdout[-3000:] + done.stderr[-3000:]
    return record, done.stdout


def behind(
    loop: Loop, place: Path, *options: str, arguments: Sequence[str] = (), nemesis: str = "", **extra: str
) -> Job:
    """The loop behind `mt-resilient run`, in the new directory `place`. options: of run; arguments: further ones of the loop; extra:
    environment."""
    place.mkdir()
    argv, environment = command(loop, arguments)
    environment.update(recording(place, nemesis), **extra)
    return (ScriptJob if argv[0] == "bash" else Job)(place, argv[1:], *options, **environment)
