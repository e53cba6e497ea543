# SPDX-License-Identifier: Apache-2.0
"""Gathers what there is of NPUs: device nodes, and the files that driver, CANN and operator packages leave behind.

Nothing is asked of a device and no library is loaded; whether libraries load is tried by ``gather`` in processes of
their own.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tidal_connector.cli.doctor.npu_facts import Ascend, OpPackage
from tidal_connector.config import ascend_variables

OPERATORS = {
    "GatherSelectionKvCache": b"aclnnGatherSelectionKvCacheGetWorkspaceSize",
    "GatherMissRows": b"aclnnGatherMissRowsGetWorkspaceSize",
}
"""Our operators, and the name that a library exports for each."""

NPU_IMPORTS = {
    "libascendcl": "from tidal_connector.memory.acl import AclRuntime; AclRuntime.open()",
    "torch_npu": "import torch, torch_npu",
    "host registration": """
import sys
from tidal_connector.memory.acl import probe
found = probe(device=0)
sys.exit(None if found.registered else found.line())
""",
}
"""What is tried on a machine with an NPU, as ``gather.IMPORTS``; the last registers one hugepage for a moment."""

_LIBRARY = "op_api/lib/libcust_opapi.so"
_CUSTOM, _OPERATORS, _HOME = "ASCEND_CUSTOM_OPP_PATH", "ASCEND_OPP_PATH", "ASCEND_HOME_PATH"
_OWN_OF_VLLM = "_cann_ops_custom/vendors"
_INSTALLED = ("*-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info")


def read_ascend(root: Path, environment: Mapping[str, str], vllm_ascend: Path | None = None) -> Ascend:
    """Return what there is of NPUs.

    Args:
        root: folder that holds ``dev``, ``etc`` and ``usr``; ``/`` for the real ones.
        environment: variables that CANN's ``set_env.sh`` sets.
        vllm_ascend: folder of that Python package; None: it is not installed.
    """
    home = root / "usr/local/Ascend"
    toolkits = list(_toolkits(root, home, environment))
    libraries = [path for folder in toolkits for path in folder.glob("lib64/libascendcl.so")]
    libraries += [*home.glob("*/lib64/libascendcl.so"), *home.glob("*/*/lib64/libascendcl.so")]
    return Ascend(
        devices=tuple(sorted(path.name for path in (root / "dev").glob("davinci[0-9]*"))),
        manager=(root / "dev/davinci_manager").exists(),
        acl=str(libraries[0]) if libraries else "",
        driver=_version(home / "driver/version.info"),
        firmware=_version(home / "firmware/version.info"),
        cann=next((found for folder in toolkits if (found := _cann(folder))), ""),
        packages=tuple(_packages(root, environment, toolkits, vllm_ascend)),
        hccn=_hccn(root / "etc/hccn.conf"),
        variables=ascend_variables(environment),
    )


def _toolkits(root: Path, home: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """Folders of CANN, the one that the environment names first."""
    if named := environment.get(_HOME):
        yield _below(root, named)
    yield from (home / "ascend-toolkit/latest", home / "cann", home / "latest")
    yield from sorted(home.glob("cann-*"), reverse=True)


def _cann(folder: Path) -> str:
    """Version of the CANN in a folder: as its installer noted it down, else as the folder is called."""
    for pattern in _INSTALLED:
        for path in sorted(folder.glob(pattern)):
            if found := _version(path):
                return found
    name = re.fullmatch(r"cann-(\d[\w.]*)", folder.name)
    return name[1] if name and folder.is_dir() else ""


def _packages(
    root: Path, environment: Mapping[str, str], toolkits: list[Path], vllm_ascend: Path | None
) -> Iterator[OpPackage]:
    """Vendor folders, those first at which CANN looks, in its order."""
    named = [_below(root, part) for part in environment.get(_CUSTOM, "").split(":") if part]
    if environment.get(_OPERATORS):
        named += sorted((_below(root, environment[_OPERATORS]) / "vendors").glob("*"))
    if vllm_ascend is not None:  # it puts its own folder into the variable when it starts
        named += sorted((vllm_ascend / _OWN_OF_VLLM).glob("*"))
    others = [vendor for folder in toolkits for vendor in sorted((folder / "opp/vendors").glob("*"))]
    seen = set[Path]()
    for vendor in (*named, *others):
        library, real = vendor / _LIBRARY, vendor.resolve()
        if real not in seen and library.is_file():
            seen.add(real)
            yield OpPackage(str(vendor), _exported(library), vendor in named)


def _exported(library: Path) -> frozenset[str]:
    """Which of our operators' names a library holds; the symbol table is plain text, so no loader is needed."""
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            return frozenset(name for name, symbol in OPERATORS.items() if image.find(symbol) >= 0)
    except (OSError, ValueError):  # not readable, or empty
        return frozenset()


def _hccn(path: Path) -> int | None:
    try:
        return len(re.findall(r"(?m)^\s*address_\d+\s*=\s*\S", path.read_text(errors="replace")))
    except OSError:
        return None


def _version(path: Path) -> str:
    try:
        found = re.search(r"(?mi)^version=(\S+)", path.read_text(errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")
