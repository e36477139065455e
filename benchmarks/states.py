"""The states that the snapshot benchmarks save: dense, contiguous tensors by name, on the CPU or on one device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

State = dict[str, torch.Tensor]

MIB = 1 << 20


def nbytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def same(ones: State, others: State) -> bool:
    """Whether two states are equal bit by bit, including NaNs and the sign of zero."""
    return all(torch.equal(as_bytes(ones[name]), as_bytes(others[name])) for name in ones)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


LAYERS, VOCABULARY, POSITIONS = 12, 32_000, 1024


def transformer_state(size: int, device: str = "cpu", seed: int = 0) -> State:
    """Return 592 tensors of about `size` bytes in all: a GPT's parameters in bf16, and in fp32 their main copy and Adam's two moments.

    Twelve layers of GPT-2's shape, 14 bytes a parameter, as in mixed-precision training (ZeRO, arXiv:1910.02054, section 3.1, less the
    gradients). The width is the multiple of 16 whose size is closest: 768 for 1474 MiB. Values are normally distributed, so they can't be
    compressed.
    """
    hidden = min(range(16, 65_536, 16), key=lambda width: abs(14 * _parameters(width) - size))
    source = device if device == "cuda" else "cpu"
    generator = torch.Generator(source).manual_seed(seed)
    state: State = {}
    for name, shape in _shapes(hidden):
        for part in ("main", "exp_avg", "exp_avg_sq"):
            state[f"optimizer.{part}.{name}"] = torch.randn(shape, device=source, generator=generator).to(device)
        state[f"model.{name}"] = state[f"optimizer.main.{name}"].bfloat16()
    return state


def mixed_state(seed: int) -> State:
    """Return four layers of 16 MiB: a matrix in fp32, one in bf16, indices in int64 and a bias. All values are random, so that none is
    zero."""
    generator = torch.Generator().manual_seed(seed)
    state: State = {}
    for layer in range(4):
        state[f"layer{layer}.main"] = torch.randn(2048, 1024, generator=generator)
        state[f"layer{layer}.weight"] = torch.randn(2048, 1024, generator=generator).bfloat16()
        state[f"layer{layer}.index"] = torch.randint(-(2**62), 2**62, (512, 1023), generator=generator)
        state[f"layer{layer}.bias"] = torch.randn(2048, generator=generator)
    return state


def _parameters(hidden: int) -> int:
    return sum(torch.Size(shape).numel() for _, shape in _shapes(hidden))


def _shapes(hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embedding.word", (VOCABULARY, hidden)
    yield "embedding.position", (POSITIONS, hidden)
    for layer in range(LAYERS):
        for name, outputs, inputs in (
            ("attention.qkv", 3 * hidden, hidden),
            ("attention.out", hidden, hidden),
            ("mlp.up", 4 * hidden, hidden),
            ("mlp.down", hidden, 4 * hidden),
        ):
            yield f"layers.{layer}.{name}.weight", (outputs, inputs)
            yield f"layers.{layer}.{name}.bias", (outputs,)
        for norm in ("attention.norm", "mlp.norm"):
            yield f"layers.{layer}.{norm}.weight", (hidden,)
            yield f"layers.{layer}.{norm}.bias", (hidden,)
    yield "norm.weight", (hidden,)
    yield "norm.bias", (hidden,)
