# SPDX-License-Identifier: Apache-2.0
"""``tidal up``: a cluster's file as a whole cluster on this machine, for development; Ctrl-C ends everything.

The same agents, rollouts and proxy as in production; only where engines run is changed: every node of the file is an
agent on this machine, and a model that is not here is replaced by a small one.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console

from tidal_connector.address import parse_address
from tidal_connector.cli.interrupts import sigterm_interrupts
from tidal_connector.cli.rollout import show_status
from tidal_connector.cli.rollout_wait import wait_for
from tidal_connector.cluster import rollout as verbs
from tidal_connector.cluster.launch import StartFailed, tail_of, wait_ready
from tidal_connector.cluster.local import LocalCluster
from tidal_connector.cluster.rollout_records import Status
from tidal_connector.cluster.rollout_status import RolloutStatus
from tidal_connector.cluster.spec import ClusterSpec, Group, read_spec
from tidal_connector.cluster.vllm_args import find_option
from tidal_connector.errors import ConfigError
from tidal_connector.ids import Role
from tidal_connector.registry.settings import open_store

_START_S = 900.0
_PROXY_S = 30.0
_POLL_S = 0.5
_MODEL_NAME = "tidal"
_SMALL_ARGS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", "16", "--max-model-len", "4096"),
    *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(256 << 20)),
)
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class UpOptions(msgspec.Struct, frozen=True):
    """What ``tidal up`` was asked for; its help says what each means."""

    file: Path
    model: Path | None = None
    count: int = 1
    listen: str = "127.0.0.1:8000"
    keep: Path | None = None
    until_ready: bool = False


def run_up(options: UpOptions, console: Console) -> None:
    """Start everything, say where it is, and stay until Ctrl-C.

    Raises:
        ConfigError: a setting cannot be used.
        StartFailed: the cluster did not become ready.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything is ended.
    """
    spec = read_spec(options.file)
    host, port = parse_address("--listen", options.listen)
    if host not in ("127.0.0.1", "localhost"):
        raise ConfigError(f"--listen {options.listen}: tidal up is for this machine; expected 127.0.0.1:PORT")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"--listen {options.listen}: {error.strerror}; choose another port") from None
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidal-up-")))
        folder = folder.absolute()
        here = local_spec(spec, options, folder, console)
        nodes = sorted({node for group in here.group for node in group.nodes})
        scratch = folder / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        cluster = LocalCluster(
            folder / "cluster", nodes, spec.cluster.name, listen=port, environment={**_QUIET, "TMPDIR": str(scratch)}
        )
        with console.status("starting the registry, the agents and the proxy"):
            stack.enter_context(cluster)
        store = stack.enter_context(open_store(cluster.registry))
        begun = verbs.apply(store, here, verbs.whoami())
        found = wait_for(store, begun.number, _START_S, console)
        show_status(found, console)
        if found.rollout.status is not Status.DONE:
            raise StartFailed(_why(found, cluster))
        wait_ready([cluster.proxy], _PROXY_S)
        _say(cluster, here, options, console)
        while not options.until_ready:
            time.sleep(_POLL_S)
            if not cluster.proxy.running():
                raise StartFailed(f"the proxy has ended; {cluster.proxy.log_tail()}")
        stack.enter_context(console.status("ending the processes"))


def local_spec(spec: ClusterSpec, options: UpOptions, folder: Path, console: Console) -> ClusterSpec:
    """Return a cluster's specification as this machine can run it, and say what was changed."""
    small: Path | None = None
    groups = []
    for group in spec.group:
        changed = group
        if options.count and group.count > options.count:
            changed = msgspec.structs.replace(changed, count=options.count)
        if not group.command:
            model = options.model
            if model is None and not Path(group.model).is_dir():
                small = small or _small_model(folder / "model", group.model, console)
                model = small
            if model is not None:
                changed = _on_model(changed, model, own=model is not small)
        groups.append(msgspec.structs.replace(changed, port=0, control_port=0))
    counts = ", ".join(f"{group.count} {group.name}" for group in groups)
    console.print(f"on this machine: {counts}; --count changes it")
    table = msgspec.structs.replace(spec.cluster, registry={}, allow_outage=True)
    return msgspec.structs.replace(spec, group=tuple(groups), cluster=table)


def _on_model(group: Group, model: Path, own: bool) -> Group:
    """Return a group that serves another model: with arguments for a small one, unless the user chose it."""
    if own:
        return msgspec.structs.replace(group, model=str(model.absolute()))
    served = find_option(group.vllm, "--served-model-name") or _MODEL_NAME
    tidal = {key: item for key, item in group.tidal.items() if key not in ("pool", "transfer", "selection")}
    if group.role is not Role.PREFILL:
        tidal["pool"] = {"bytes": "256MiB"}
    return msgspec.structs.replace(
        group, model=str(model), vllm=("--served-model-name", served, *_SMALL_ARGS), tidal=tidal, environment={}
    )


def _small_model(folder: Path, instead_of: str, console: Console) -> Path:
    from tidal_connector.modelmaker.api import make_model

    if not folder.is_dir():
        with console.status("making a small checkpoint"):
            make_model(folder, arch="v32", dtype="float32")
    console.print(
        f"{instead_of} is not on this machine: a small checkpoint with random weights takes its place, with arguments "
        "of its own; --model DIR serves another one"
    )
    return folder


def _say(cluster: LocalCluster, spec: ClusterSpec, options: UpOptions, console: Console) -> None:
    group = next((item for item in spec.group if item.role is not Role.PREFILL), spec.group[0])
    model = find_option(group.vllm, "--served-model-name") or group.model
    url, registry = cluster.proxy.url, cluster.registry
    where = f"--registry {registry.url}" + (f" --cluster {registry.cluster}" if registry.cluster != "default" else "")
    for line in (
        f"proxy       {url}   (dashboard: {url}/dashboard)",
        f"registry    {registry.url}",
        f"logs        {cluster.folder}",
        "",
        f"try         curl {url}/v1/completions -H 'content-type: application/json' \\",
        f'              -d \'{{"model": "{model}", "prompt": "Hello", "max_tokens": 8}}\'',
        f"look        tidal rollout status {where}",
        "Ctrl-C ends everything.",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _why(found: RolloutStatus, cluster: LocalCluster) -> str:
    engine = next((item for item in found.engines if item.phase != "ready"), None)
    if engine is None:
        return f"the cluster did not become ready: {found.rollout.reason or found.summary}"
    tail = tail_of(cluster.engine_log(engine.node, engine.engine))
    reason = found.rollout.reason or engine.note or found.summary
    return f"{engine.engine} did not become ready: {reason}\n{tail}\n(--keep DIR keeps the logs)"
