"""Rules that tell which attributes of the script's modules, of torch's own layers, and of parameters belong to the training state.

An attribute that a torch layer's class stores itself belongs to torch: a fresh start recreates it. All other attributes, and all attributes
of the script's own classes, were set by the script.
"""

from __future__ import annotations

import copyreg
import dis
import enum
import functools
import types
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from ....checkpoint.format.pytree_walk import PLAIN, text
from ...code_flow.carried import carried_from_outside
from ...warm.side_effects import is_scripts
from ..values import type_adapters
from ..values.array_views import TENSORS
from ..values.class_adapters import ENUM, GLOBAL, VALUE, has_a_name, kind_of
from ..values.kind import class_of, is_source
from ..values.packing import MAPPINGS
from ..values.sharded_tensors import is_sharded

_OF_EVERY_MODULE = frozenset(vars(Module()))
_LAYERS = ("torch.nn.modules.", "torch.optim.swa_utils", "torch.fx.graph_module", "torch.nn.utils.parametriz")
_CLOSED = ("megatron", "transformer_engine", "deepspeed", "apex")
FRAMEWORKS = ("torch", "builtins", *_CLOSED)
WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", *_CLOSED)
"""Frameworks whose objects belong to one process, and whose optimizer wrappers keep no training state in their attributes."""
_ON_PARAMETERS = frozenset(
    (
        *("main_grad", "main_param", "main_param_sharded", "grad_added_to_main_grad", "overwrite_main_grad"),
        *("tensor_model_parallel", "model_parallel", "sequence_parallel", "partition_dim", "partition_stride"),
        *("parallel_mode", "num_partitions", "allreduce", "shared", "shared_embedding", "is_embedding_parameter"),
        *("is_embedding_or_output_parameter", "skip_backward_post_hook", "zero_out_wgrad", "infshape"),
    )
)
"""Attributes that Megatron, TransformerEngine, Apex and muP set on parameters. DeepSpeed's names begin with `ds_`."""
_OF_FRAMEWORKS = (
    "__",
    "_fsdp",
    "_ddp",
    "_hf",
    "_is_fsdp",
    "_is_hf",
    "_ds",
    "_te_",
    "_flat",
    "_handle",
    "_old_forward",
    "_opt_called",
    "_is_root",
)
"""Prefixes of private names that FSDP, DistributedDataParallel, Hugging Face's packages and DeepSpeed set on torch's layers."""
_CONSTANTS = PLAIN.union(*(kind.types for kind in type_adapters.CHANGELESS))
_VALUES = frozenset((list, tuple, np.ndarray, *MAPPINGS, *TENSORS))


class Owner(enum.Enum):
    """The kind of object that has the attributes."""

    SCRIPT = "a module of the script's, or of a package it uses"
    LAYER = "one of torch's own"
    PARAMETER = "a parameter"


@cache
def owner_of(kind: Any) -> Owner | None:
    """Return the kind of owner. The answer is None for torch's wrappers and sharding frameworks, because their attributes belong to one
    process."""
    names = [each.__module__ for each in kind.__mro__ if each is not Module]
    if any(_root(name) in _CLOSED or name.startswith("torch.nn.parallel") for name in names):
        return None
    if not all(_root(name) in FRAMEWORKS for name in names):
        return Owner.SCRIPT
    return Owner.LAYER if any(name.startswith(_LAYERS) for name in names) else None


def every(thing: Any) -> dict[str, Any]:
    """Return all attributes of a module or parameter, without those that every module has."""
    own = {name: value for name, value in vars(thing).items() if name not in _OF_EVERY_MODULE}
    if slots := slots_of(class_of(thing)):
        own |= {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return own


@cache
def slots_of(kind: Any) -> frozenset[str]:
    """Return the names of a module class's slots: attributes outside the `__dict__` of its objects."""
    return frozenset(copyreg._slotnames(kind)) if issubclass(kind, Module) else frozenset()  # type: ignore[attr-defined]


def change(thing: Any, come: Mapping[str, Any], gone: Collection[str]) -> None:
    """Set the attributes `come` on a module or parameter, and delete those named in `gone`."""
    attributes, slots = vars(thing), slots_of(class_of(thing))
    for name in gone:
        if name in slots:
            object.__delattr__(thing, name)
        else:
            del attributes[name]
    for name, value in come.items():
        if name in slots:
            object.__setattr__(thing, name, value)
        elif attributes.get(name, come) is not value:
            attributes[name] = value


def looked_at(thing: Any, owner: Owner) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module or parameter that the script may have set."""
    own, kind = every(thing), class_of(thing)
    if owner is Owner.SCRIPT:
        yield from own.items()
    elif owner is Owner.LAYER:
        for name, value in own.items():
            known = type(value) in PLAIN or is_fixed(value)
            if (
                (name[:1] != "_" and (known or is_put_on(kind, name)))
                or (not known and is_scripts_object(value))
                or (name[:1] == "_" and is_private(kind, name, value))
            ):
                yield name, value
    else:
        mine = (name for name in own if name[:1] != "_" and name not in _ON_PARAMETERS and not name.startswith("ds_"))
        yield from ((name, own[name]) for name in mine)


def is_fixed(value: Any) -> bool:
    """Whether a change of the attribute shows in its value's identity: the value itself never changes, or the Session saves it as a source
    of its own."""
    return is_constant(value) or is_source(class_of(value))


def is_constant(value: Any) -> bool:
    kind = class_of(value)
    if kind is types.MethodType:
        return not (is_scripts_object(value) or kind_of(class_of(value.__self__)) in type_adapters.CHANGING)
    if type_adapters.is_bound(value):
        return False
    if kind in _CONSTANTS or (kind is tuple and PLAIN.issuperset(map(type, value))):
        return True
    return _by_kind(kind)


@cache
def _by_kind(kind: Any) -> bool:
    """Whether no value of this type ever changes: functions, classes, members of an Enum, numpy's dtypes and numbers."""
    constants = GLOBAL, ENUM, type_adapters.DTYPE, type_adapters.NUMPY_SCALAR
    return kind_of(kind) in constants and not issubclass(kind, np.void)


@cache
def is_by_name(kind: Any) -> bool:
    """Whether values of this type are functions or classes. A restart finds such values by name, if they have one."""
    return kind_of(kind) is GLOBAL


def is_told(value: Any) -> bool:
    """Whether a snapshot can store the constant. A snapshot can store any constant except a function without a name."""
    return not is_by_name(class_of(value)) or has_a_name(value)


def is_scripts_function(value: Any) -> bool:
    """Whether the script defines the function's code. `__globals__` decides, because a framework's wrapper copies `__module__`."""
    at = value.__globals__.get("__name__") if isinstance(value, types.FunctionType) else None
    return is_scripts(str(at or getattr(value, "__module__", None)))


def is_remade(one: Any, other: Any) -> bool:
    """Whether two functions differ only in identity, because the script creates the function again at each pass."""
    if not (isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType)):
        return False
    same_code = one.__code__ is other.__code__ and one.__closure__ is None is other.__closure__
    return same_code and one.__defaults__ is None is other.__defaults__


def same(one: Any, other: Any) -> bool:
    """Whether two fixed values are equal, bit for bit."""
    if one is other or type(one) is not type(other):
        return one is other
    if type(one) is tuple:
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) in PLAIN:
        return text(one) == text(other)
    if not is_constant(one):
        return False
    known = kind_of(class_of(one))
    if known in (None, GLOBAL, type_adapters.METHOD):
        return bool(one == other)
    return same(known.save(one), known.save(other))


def is_value(kind: type, of: type) -> bool:
    """Whether values of this type belong to the state: the type comes from Python, torch or numpy, from the package of the class `of`, or
    from the script's own files, or it is an Enum or a named tuple."""
    known = kind_of(kind)
    if kind in _VALUES or is_sharded(kind) or known in (*type_adapters.CHANGELESS, *type_adapters.CHANGING):
        return True
    mine = {_root(each.__module__) for each in of.__mro__} - {*FRAMEWORKS, *WRAPPERS}
    if known is None or known is GLOBAL:
        return False
    if known in (ENUM, VALUE, type_adapters.DTYPE, type_adapters.NUMPY_SCALAR, type_adapters.RETURNED):
        return True
    return _root(kind.__module__) in mine or is_scripts(kind.__module__)


def is_scripts_object(value: Any) -> bool:
    """Whether the value is a changeable object of one of the script's classes, a method of such an object, or a partial that contains
    one."""
    kind = class_of(value)
    if kind is types.MethodType:
        return is_scripts_object(value.__self__)
    if kind is functools.partial:
        return any(map(is_scripts_object, (value.func, *value.args, *value.keywords.values())))
    if kind in _CONSTANTS or kind in _VALUES or is_source(kind) or not is_scripts(kind.__module__):
        return False
    return kind_of(kind) not in (GLOBAL, ENUM, VALUE)


def declares(value: Any) -> bool:
    """Whether the value has a `state_dict` and is one of the script's objects, or torch's GradScaler."""
    kind = class_of(value)
    if kind in PLAIN or isinstance(value, (Module, type)) or not is_source(kind):
        return False
    return is_scripts(kind.__module__) or isinstance(value, torch.amp.GradScaler)


def why_lost(value: Any) -> str:
    """Return the reason why no snapshot can store the changing part of an attribute. The text is empty if no
    reason shows when the loop begins."""
    if declares(value):
        return "it has a state_dict of its own: give it to the Session"
    if isinstance(value, types.FunctionType):
        found = {each.path[0] for each in carried_from_outside(value.__code__) if each.method is None or each.fills}
        if names := [name for name in value.__code__.co_freevars if name in found]:
            return f"it is a function that changes {', '.join(names)} from call to call. Make it an object of a class"
    return ""


def is_made_late(value: Any) -> bool:
    """Whether the value is an optimizer, a scheduler, or a script's object with a `state_dict`. If created before the Session, it is a
    source."""
    return isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)) or declares(value)


def _root(name: str) -> str:
    return name.partition(".")[0]


def is_private(of: type, name: str, value: Any) -> bool:
    """Whether a script has set this private attribute (`_name`) to a number, text, tensor or container."""
    kind = type(value)
    if kind not in PLAIN and kind not in _VALUES:
        return False
    return not name.startswith(_OF_FRAMEWORKS) and is_put_on(of, name)


@cache
def is_put_on(kind: Any, name: str) -> bool:
    """Whether the class neither has nor stores an attribute of this name, so that code outside the class has set the attribute."""
    return not hasattr(kind, name) and not any(name in _stored(each) for each in kind.__mro__)


@cache
def _stored(kind: Any) -> frozenset[str]:
    """Return the names of the attributes that the code of the class stores."""
    held = (getattr(each, "__func__", getattr(each, "fget", each)) for each in vars(kind).values())
    codes: list[Any] = [each.__code__ for each in held if isinstance(each, types.FunctionType)]
    found: set[str] = set()
    for code in codes:  # the loop extends the list
        found.update(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(found)
