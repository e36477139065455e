"""Lets megatron.bridge.training be imported without the packages that only its optional features use.

Three kinds of help, all by one finder: whole packages that are stood in for, two package faces whose `__init__` would import the entire
model zoo, and nothing else. Whatever a stand-in is asked for is a class that nothing is an instance of, or a function that returns None.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

STAND_INS = (
    "datasets",  # fine-tuning on Hugging Face data
    "hydra",  # overrides on the command line
    "megatron.bridge.models.mamba",  # imports triton; named in a type union
    "megatron.bridge.peft.lora",  # imports transformer_engine; asked for in isinstance()
    "modelopt",  # distillation, quantization
    "nvidia_resiliency_ext",  # in-process restart, straggler detection
    "torch.utils.tensorboard",
)

FACES = {
    "megatron.bridge": {},
    "megatron.bridge.models": {
        "GPTModelProvider": "megatron.bridge.models.gpt_provider",
        "T5ModelProvider": "megatron.bridge.models.t5_provider",
    },
}
"""Packages whose `__init__` is left out, and the names that are wanted of them."""


def _stands_in(name: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in STAND_INS)


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {"__module__": self.__name__}) if name[0].isupper() else lambda *_, **__: None
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if _stands_in(name):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name in FACES:
            real = importlib.machinery.PathFinder.find_spec(name, path)
            if real is not None and real.submodule_search_locations is not None:
                face = importlib.machinery.ModuleSpec(name, self, origin=real.origin, is_package=True)
                face.submodule_search_locations = list(real.submodule_search_locations)
                return face
        return None

    def create_module(self, spec: Any) -> ModuleType | None:
        return _StandIn(spec.name) if _stands_in(spec.name) else None

    def exec_module(self, module: ModuleType) -> None:
        wanted = FACES.get(module.__name__)
        if wanted is None:
            return

        def __getattr__(name: str) -> Any:
            if name not in wanted:
                raise AttributeError(name)
            return getattr(importlib.import_module(wanted[name]), name)

        module.__getattr__ = __getattr__  # type: ignore[method-assign]


def install() -> None:
    """Once per process, before anything of megatron.bridge is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
