# SPDX-License-Identifier: Apache-2.0
"""Stands in for what only a machine with an NPU has: torch_npu, CANN's Python modules, and the compiled operators.

Every tensor stays in ordinary memory. An operator is either a reference in ``operators/`` or refuses by name when it
is called. vllm-ascend's own operators get the schemas that its C++ source declares, so a call with an argument that
the real operator does not take fails here, too. Call :func:`install` before anything imports vLLM.

What a bed like this cannot see: the Triton kernel that rotates index keys on a chip (vllm-ascend's branch without
Triton runs), the fused preprocessing of W8A8 weights, the packed int8 latents of SFA-C8, graph capture, time, and
the order of streams.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.vllm_plugin.ascend.bed import streams
from tests.vllm_plugin.ascend.bed.operators import attention, matrices, rows

A3_SOC = 250
"""What the runtime of an Atlas A3 calls its chip."""

TORCH_NPU: dict[str, Callable[..., Any]] = {
    "npu_kv_rmsnorm_rope_cache": rows.kv_rmsnorm_rope_cache,
    "npu_interleave_rope": rows.interleave_rope,
    "npu_rotary_mul": rows.rotary_mul,
    "npu_rms_norm": rows.rms_norm,
    "npu_scatter_nd_update_": rows.scatter_nd_update_,
    "npu_dynamic_quant": rows.dynamic_quant,
    "npu_format_cast": matrices.format_cast,
    "npu_transpose_batchmatmul": matrices.transpose_batchmatmul,
    "npu_lightning_indexer": attention.lightning_indexer,
}

C_ASCEND: dict[str, Callable[..., Any]] = {
    "npu_sparse_flash_attention": attention.sparse_flash_attention,
    "npu_lightning_indexer": attention.lightning_indexer,
    "npu_lightning_indexer_quant": attention.lightning_indexer_quant,
    "batch_matmul_transpose": matrices.batch_matmul_transpose,
}


LIBRARIES = ("scipy", "gguf", "torchvision")
"""What vLLM 0.23 and vllm-ascend import at the top of modules that the bed uses, for features that it does not."""

MEMBERS = {
    "scipy": {
        "stats": SimpleNamespace(norm=SimpleNamespace(ppf=NormalDist().inv_cdf)),  # called by an import
        "linalg": SimpleNamespace(hadamard=matrices.hadamard),
    }
}
"""The little of them that is called."""


class NotInBed(NotImplementedError):
    """The code under test reached something of the NPU that the bed has no reference for."""


def absent(name: str) -> Any:
    """Return something that can be named and refuses to be called: a class where the name looks like one."""

    def refuse(*args: object, **kwargs: object) -> Any:
        raise NotInBed(f"{name} was called, and the bed has no reference for it (bed/standin.py)")

    last = name.rsplit(".", 1)[-1]
    return type(last, (), {"__init__": refuse}) if last.lstrip("_")[:1].isupper() else refuse


class StandIn(ModuleType):
    """A module that holds what it is given; every other public name of it is :func:`absent`."""

    def __init__(self, name: str, **members: object) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self.__version__ = "1.0.0"
        vars(self).update(members)
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = absent(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Submodules(MetaPathFinder, Loader):
    """Makes ``import root.some.thing`` give a stand-in wherever ``root`` is one."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        root, _, rest = name.partition(".")
        inside = bool(rest) and isinstance(sys.modules.get(root), StandIn)
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return


def install(operator_schemas: Path) -> None:
    """Put the stand-ins in place; ``operator_schemas`` is vllm-ascend's ``csrc/torch_binding.cpp``."""
    sys.meta_path.append(Submodules())
    torch.utils.rename_privateuse1_backend("npu")
    npu = StandIn("torch_npu.npu", **_device_interface())
    torch._register_device_module("npu", npu)
    StandIn("torch_npu", npu=npu, _C=StandIn("torch_npu._C"), **TORCH_NPU)
    StandIn("acl")
    for name in LIBRARIES:
        _library(name)
    define_operators(operator_schemas)


def _library(name: str) -> None:
    """Stand in for a library that is imported but not needed, without transformers counting on it."""
    if find_spec(name.split(".", 1)[0]) is None:
        from transformers.utils import is_gguf_available, is_scipy_available, is_torchvision_available

        is_scipy_available(), is_gguf_available(), is_torchvision_available()  # they remember their answers
        StandIn(name, **MEMBERS.get(name, {}))


def _device_interface() -> dict[str, object]:
    return {
        "memory": StandIn("torch_npu.npu.memory"),
        "Stream": streams.Stream,
        "Event": streams.Event,
        "ExternalEvent": streams.Event,
        "stream": streams.on,
        "current_stream": streams.current,
        "default_stream": streams.current,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_soc_version": lambda: A3_SOC,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
    }


def define_operators(source: Path) -> torch.library.Library:
    """Declare ``torch.ops._C_ascend`` as the source does; those without a reference refuse when they are called."""
    library = torch.library.Library("_C_ascend", "DEF")
    _KEPT.append(library)
    for schema in schemas_in(source.read_text()):
        name = schema.split("(", 1)[0]
        library.define(schema)
        reference = C_ASCEND.get(name, absent(f"torch.ops._C_ascend.{name}"))
        library.impl(name, reference, "CompositeExplicitAutograd")
    return library


_KEPT: list[torch.library.Library] = []  # a library that nobody holds takes its operators with it


def schemas_in(source: str) -> list[str]:
    """Return what each ``ops.def("..." "...")`` declares, once per operator, and of the flat namespace only."""
    found: dict[str, str] = {}
    for match in re.finditer(r'\bops\.def\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)[,)]', source):
        pieces = re.findall(r'"((?:[^"\\]|\\.)*)"', match.group(1))
        schema = "".join(pieces).replace('\\"', '"')
        name = schema.split("(", 1)[0].strip()
        if "->" in schema and name.isidentifier():
            found.setdefault(name, schema.strip())
    return list(found.values())
