"""Delayed scaling as Transformer Engine does it: the same state under the same names (2.x), with torch's float8 types and products of
matrices, on CPUs and GPUs.

    fp8_meta["scaling_fwd"].scale, .amax_history      of input and weight; "scaling_bwd": of the gradient
    FP8GlobalStateManager.global_amax_buffer          views of the first rows of all histories
    get_extra_state, set_extra_state                  pickled bytes, refused as in newer versions
    Float8Tensor                                      numbers (_data) and the inverse of their scale (_scale_inv)

The maxima of a forward pass become scales at the end of `fp8_autocast`, those of a backward pass at its end.
"""

import contextlib
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch

TYPES = {"scaling_fwd": torch.float8_e4m3fn, "scaling_bwd": torch.float8_e5m2}


@dataclass
class DelayedScaling:
    margin: int = 0
    amax_history_len: int = 8


class FP8GlobalStateManager:
    recipe = None
    global_amax_buffer: ClassVar = {}
    global_amax_history_buffer: ClassVar = {}
    global_scale_buffer: ClassVar = {}

    @classmethod
    def reset(cls):
        for each in (cls.global_amax_buffer, cls.global_amax_history_buffer, cls.global_scale_buffer):
            each.clear()
        Linear.made_before = False

    @classmethod
    def add(cls, module):
        if "buffer_index_and_autocast_key" in module.fp8_meta:
            return
        module.fp8_meta["buffer_index_and_autocast_key"] = [len(cls.global_amax_buffer.get("scaling_fwd", ()))]
        for direction in TYPES:
            state = module.fp8_meta[direction]
            cls.global_amax_buffer.setdefault(direction, []).append(state.amax_history[0])
            cls.global_amax_history_buffer.setdefault(direction, []).append(state.amax_history)
            cls.global_scale_buffer.setdefault(direction, []).append(state.scale)

    @classmethod
    def update(cls, direction):
        """Reduce the maxima of this pass over the ranks, and make scales of the histories."""
        for amax, history, scale in zip(
            cls.global_amax_buffer.get(direction, ()),
            cls.global_amax_history_buffer.get(direction, ()),
            cls.global_scale_buffer.get(direction, ()),
            strict=True,
        ):
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX)
            most = history.max(0).values
            scale.copy_(torch.where(most > 0, torch.finfo(TYPES[direction]).max / most, scale))
            history.copy_(history.roll(-1, 0))
            amax.zero_()


@contextlib.contextmanager
def fp8_autocast(enabled=True, fp8_recipe=None):
    before, FP8GlobalStateManager.recipe = (
        FP8GlobalStateManager.recipe,
        (fp8_recipe or DelayedScaling()) if enabled else None,
    )
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before
    if enabled:
        FP8GlobalStateManager.update("scaling_fwd")


def quantized(value, state, at, direction):
    """Note the maximum of the value. Return it in float8, with the scale of earlier maxima, and the inverse of that scale."""
    torch.maximum(state.amax_history[0, at], value.detach().abs().max(), out=state.amax_history[0, at])
    most = torch.finfo(TYPES[direction]).max
    return (value * state.scale[at]).clamp(-most, most).to(TYPES[direction]), 1 / state.scale[at]


def product(one, other):
    """Return one @ other.t(), both in float8 with the inverse of their scale. The sides must be multiples of 16."""
    (a, scale_a), (b, scale_b) = one, other
    columns = b.contiguous().t()
    return torch._scaled_mm(a.contiguous(), columns, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, module):
        forward = module.fp8_meta["scaling_fwd"]
        inputs, ctx.module = quantized(inputs, forward, 0, "scaling_fwd"), module
        in_fp8 = isinstance(weight, Float8Tensor)
        weight = weight.numbers() if in_fp8 else quantized(weight, forward, 1, "scaling_fwd")
        ctx.save_for_backward(*inputs, *weight)
        return product(inputs, weight)

    @staticmethod
    def backward(ctx, grad):
        inputs, inputs_scale, weight, weight_scale = ctx.saved_tensors
        grad, scale = quantized(grad, ctx.module.fp8_meta["scaling_bwd"], 0, "scaling_bwd")
        if ctx.module.ends_backward:
            FP8GlobalStateManager.update("scaling_bwd")
        into = product((grad, scale), (weight.t(), weight_scale))
        return into, product((grad.t(), scale), (inputs.t(), inputs_scale)), None


class Linear(torch.nn.Module):
    made_before = False

    def __init__(self, width, out, primary_weights_in_fp8=False):
        super().__init__()
        self.fp8_meta, self.fp8_meta_tensors_initialized = {"fp8_checkpoint": False}, False
        self.ends_backward, Linear.made_before = not Linear.made_before, True
        weight = torch.randn(out, width) / width**0.5
        self.weight = torch.nn.Parameter(Float8Tensor.quantized(weight) if primary_weights_in_fp8 else weight)
        if primary_weights_in_fp8:
            self.init_fp8_meta_tensors(
                DelayedScaling(amax_history_len=1024)
            )  # the recipe by default: there is no other yet

    def adjust_amax_history_length(self, length, fwd=None):
        for direction in TYPES if fwd is None else ("scaling_fwd" if fwd else "scaling_bwd",):
            state = self.fp8_meta[direction]
            if (more := length - len(state.amax_history)) == 0:
                continue
            state.amax_history = torch.nn.functional.pad(state.amax_history[:length].clone(), (0, 0, 0, max(more, 0)))
            if position := self.fp8_meta.get("buffer_index_and_autocast_key"):
                FP8GlobalStateManager.global_amax_buffer[direction][position[0]] = state.amax_history[0]
                FP8GlobalStateManager.global_amax_history_buffer[direction][position[0]] = state.amax_history

    def init_fp8_meta_tensors(self, recipe):
        if self.fp8_meta_tensors_initialized:
            self.adjust_amax_history_length(recipe.amax_history_len)
            return
        for direction, tensors in (("scaling_fwd", 2), ("scaling_bwd", 1)):
            history = torch.zeros(recipe.amax_history_len, tensors)
            self.fp8_meta[direction] = SimpleNamespace(scale=torch.ones(tensors), amax_history=history)
        self.fp8_meta_tensors_initialized = True

    def forward(self, inputs):
        recipe = FP8GlobalStateManager.recipe
        if recipe is None:
            return inputs @ self.weight.t()
        self.fp8_meta |= {"fp8_checkpoint": True, "recipe": recipe}
        self.init_fp8_meta_tensors(recipe)
        FP8GlobalStateManager.add(self)
        return _Product.apply(inputs, self.weight, self)

    def get_extra_state(self):
        if not self.fp8_meta["fp8_checkpoint"]:
            return torch.empty(0, dtype=torch.uint8)
        tensors = {name: vars(self.fp8_meta[name]) for name in TYPES}
        return torch.frombuffer(
            bytearray(pickle.dumps(tensors | {"recipe": self.fp8_meta["recipe"]})), dtype=torch.uint8
        )

    def set_extra_state(self, state):
        if state.numel() == 0:
            return
        raise RuntimeError("Refusing to load pickled Transformer Engine extra state")


class Operation(torch.nn.Module):
    """A fused operation (te.ops): the same state elsewhere, made at the start of its forward pass."""

    def __init__(self):
        super().__init__()
        self._fp8_metas = None

    def reset_recipe_state(self, *, recipe):
        if recipe is None:
            self._fp8_metas = None
        elif self._fp8_metas is None:
            history = torch.zeros(recipe.amax_history_len, 1)
            state = SimpleNamespace(scale=torch.ones(1), amax_history=history)
            self._fp8_metas = {"forward": {"scaling_fwd": state, "recipe": recipe}, "backward": None}

    def forward(self, inputs):
        self.reset_recipe_state(recipe=FP8GlobalStateManager.recipe)
        if self._fp8_metas is None:
            return inputs
        state = self._fp8_metas["forward"]["scaling_fwd"]
        numbers, inverse = quantized(inputs, state, 0, "scaling_fwd")
        inputs = numbers.float() * inverse
        state.scale.copy_(448 / state.amax_history.max(0).values)
        return inputs

    def get_extra_state(self):
        return torch.frombuffer(bytearray(pickle.dumps(self._fp8_metas)), dtype=torch.uint8)

    def set_extra_state(self, state):
        raise RuntimeError("Refusing to load pickled Transformer Engine extra state")


class BlockTensor(torch.Tensor):
    """A weight of block scaling: numbers and scales by rows, and for the backward pass a copy by columns, made on demand."""

    @staticmethod
    def __new__(cls, rows, is_2d_scaled=True):
        made = torch.Tensor._make_wrapper_subclass(cls, rows.shape, dtype=torch.float32, device=rows.device)
        made._rowwise_data, made._rowwise_scale_inv, made._is_2D_scaled = rows, torch.ones(1), is_2d_scaled
        made._columnwise_data = made._columnwise_scale_inv = None
        made.update_usage(columnwise_usage=True)
        return made

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        if columnwise_usage is False:
            self._columnwise_data = self._columnwise_scale_inv = None
        elif columnwise_usage and self._columnwise_data is None:
            self._columnwise_data, self._columnwise_scale_inv = self._rowwise_data.t().contiguous(), torch.ones(1)

    def __repr__(self):
        return f"BlockTensor({self._rowwise_data})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            made = cls(args[0]._rowwise_data, args[0]._is_2D_scaled)
            made._columnwise_data, made._columnwise_scale_inv = args[0]._columnwise_data, args[0]._columnwise_scale_inv
            return made
        raise NotImplementedError(func)


class Float8Tensor(torch.Tensor):
    @staticmethod
    def __new__(cls, data, scale_inv):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=data.device)
        made._data, made._scale_inv = data, scale_inv
        made._transpose, made._transpose_invalid = None, True
        return made

    @classmethod
    def quantized(cls, value):
        made = cls(torch.empty(value.shape, dtype=torch.uint8), torch.ones(1))
        made.quantize_(value)
        return made

    def quantize_(self, value):
        most = torch.finfo(torch.float8_e4m3fn).max
        scale = most / value.detach().abs().max().clamp(min=1e-12)
        self._data.copy_((value.detach() * scale).clamp(-most, most).to(torch.float8_e4m3fn).view(torch.uint8))
        self._scale_inv.copy_((1 / scale).reshape(1))
        self._transpose_invalid = True

    def numbers(self):
        return self._data.view(torch.float8_e4m3fn), self._scale_inv.squeeze()

    def dequantize(self):
        return self._data.view(torch.float8_e4m3fn).float() * self._scale_inv

    def __repr__(self):
        return f"Float8Tensor({self.dequantize()})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0]._data, args[0]._scale_inv)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].quantize_(args[1].dequantize() if isinstance(args[1], cls) else args[1])
            return args[0]
        plain = [each.dequantize() if isinstance(each, cls) else each for each in args]
        return func(*plain, **(kwargs or {}))
