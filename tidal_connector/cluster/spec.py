# SPDX-License-Identifier: Apache-2.0
"""What a cluster shall be: the shape of ``configs/cluster.toml``, its checks, and what its content is called.

Pure but for reading the file. A *revision* names the content of the whole file, a *template* the part of a group that
an engine is made of: engines are replaced when their template changes, and left alone when only a count, a deadline or
the comments do. Where the registry is does not belong to the revision.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tidal_connector.cluster.vllm_args import has_flag
from tidal_connector.config import Positive, load_config
from tidal_connector.errors import ConfigError
from tidal_connector.ids import Role
from tidal_connector.tables import convert_strict, read_toml

Count = Annotated[int, msgspec.Meta(ge=0, le=1024)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ID_BYTES = 5
_OURS = {
    "--host": "the agent sets it",
    "--kv-transfer-config": "write [group.tidal] instead",
    "--model": "write model = ... instead",
    "--port": "write port = ... instead, or leave it to the agent",
}


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request that a new engine must answer, through a pair of engines, before clients' requests reach it.

    Attributes:
        prompt: its text.
        max_tokens: tokens to generate; the answer must hold some text.
        expect: a text that the answer must contain; empty: any text is good.
        deadline_s: seconds for the answer.
        tries: attempts before the engine counts as failed; a connection may break for another reason.
    """

    prompt: str = "One, two, three,"
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 4
    expect: str = ""
    deadline_s: Positive = 60.0
    tries: Annotated[int, msgspec.Meta(ge=1, le=10)] = 2


class ClusterTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What holds for all groups.

    Attributes:
        name: of the cluster; several may share an etcd.
        max_unavailable: engines of a role that may be missing at once while engines are replaced.
        max_surge: further engines of a group that may run meanwhile, where there is hardware for them.
        allow_outage: whether the last pair that serves may be stopped: for clusters too small to do without.
        drain_deadline_s: how long running requests may go on in an engine that is to stop.
        ready_deadline_s: from the start of an engine until it is healthy.
        max_restarts: how often a new engine may end by itself before it counts as failed.
        restart: any text; changing it replaces every engine.
        registry: where the registry is (``registry.settings.RegistryConfig``).
        probe: what a new engine must answer.
    """

    name: str = "default"
    max_unavailable: Count = 1
    max_surge: Count = 0
    allow_outage: bool = False
    drain_deadline_s: Positive = 120.0
    ready_deadline_s: Positive = 900.0
    max_restarts: Count = 2
    restart: str = ""
    registry: dict[str, Any] = {}
    probe: Probe = Probe()


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Engines that are alike.

    The texts of ``vllm``, ``command``, ``environment`` and ``tidal`` may hold ``{engine}``, ``{group}``, ``{slot}``
    (counts the group's engines), ``{node}`` and ``{place}`` (counts the group's engines on one node, for the number of
    a device).

    Attributes:
        role: what they do.
        name: of the group; its role where it is not said. Engines are called NAME-0, NAME-1, ...
        count: how many.
        nodes: agents that run them; engine N is on node N modulo their number.
        model: folder or name of the model.
        vllm: further arguments of vLLM.
        tidal: the connector's settings, what ``configs/decode.toml`` has under ``[tidal]``.
        environment: further variables.
        load_failure_policy: what vLLM does with a request whose KV did not arrive.
        port: first HTTP port, that of place 0; 0: the agent picks free ones.
        control_port: first port of the control channel; 0: the agent picks free ones.
        command: what runs in place of vLLM (a stand-in for tests and rehearsals).
    """

    role: Role
    name: str = ""
    count: Count
    nodes: tuple[str, ...]
    model: str = ""
    vllm: tuple[str, ...] = ()
    tidal: dict[str, Any] = {}
    environment: dict[str, str] = {}
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    port: Port = 0
    control_port: Port = 0
    command: tuple[str, ...] = ()


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file.

    Attributes:
        group: at least one.
        cluster: what holds for all of them.
    """

    group: tuple[Group, ...]
    cluster: ClusterTable = ClusterTable()

    def groups(self) -> dict[str, Group]:
        """Return the groups by name."""
        return {item.name: item for item in self.group}


class Slot(msgspec.Struct, frozen=True):
    """Where one engine of a group runs.

    Attributes:
        engine: its id.
        node: the agent that runs it.
        place: counts the group's engines on that node.
    """

    engine: str
    node: str
    place: int


def slot_of(group: Group, number: int) -> Slot:
    """Return the slot of a group with a number."""
    nodes = len(group.nodes)
    return Slot(f"{group.name}-{number}", group.nodes[number % nodes], number // nodes)


def template_id(spec: ClusterSpec, group: Group) -> str:
    """Return the short name of what an engine of a group is made of."""
    parts = msgspec.structs.asdict(group)
    for left_out in ("count", "nodes"):
        del parts[left_out]
    return _short({"group": parts, "restart": spec.cluster.restart})


def revision_id(spec: ClusterSpec) -> str:
    """Return the short name of a file's content."""
    return _short(msgspec.to_builtins(without_registry(spec)))


def without_registry(spec: ClusterSpec) -> ClusterSpec:
    """Return a specification as it is kept in the registry: without the way there, which may name secrets' files."""
    return msgspec.structs.replace(spec, cluster=msgspec.structs.replace(spec.cluster, registry={}))


def read_spec(path: Path) -> ClusterSpec:
    """Read and check ``cluster.toml``.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or cannot be meant.
    """
    return build_spec(read_toml(path, "cluster file"), f"cluster file {path}")


def build_spec(given: Mapping[str, Any], where: str) -> ClusterSpec:
    """Check a table of settings and give every group its name.

    Raises:
        ConfigError: an unknown key, a wrong value, or settings that contradict one another.
    """
    spec = convert_strict(ClusterSpec, given, where)
    named = tuple(msgspec.structs.replace(item, name=item.name or str(item.role)) for item in spec.group)
    spec = msgspec.structs.replace(spec, group=named)
    for problem in _problems(spec):
        raise ConfigError(f"{where}: {problem}")
    for group in spec.group:
        load_config(_sample(group.tidal), f"{where}: group {group.name!r}: tidal")
    return spec


def _problems(spec: ClusterSpec) -> Iterator[str]:
    table = spec.cluster
    if not _NAME.fullmatch(table.name):
        yield f"cluster.name = {table.name!r}: expected 1 to 63 letters, digits or any of . _ -"
    if not table.max_unavailable and not table.max_surge:
        yield "max_unavailable and max_surge are both 0, so no engine could ever be replaced; set one of them"
    if not spec.group:
        yield "no [[group]]; give at least one"
    names = [group.name for group in spec.group]
    for group in spec.group:
        if names.count(group.name) > 1:
            yield f"group {group.name!r} is there twice; give each a name of its own"
        for problem in _group_problems(group):
            yield f"group {group.name!r}: {problem}"
    yield from _port_problems(spec)
    yield from _pair_problems(spec)


def _group_problems(group: Group) -> Iterator[str]:
    if not _NAME.fullmatch(group.name):
        yield "name: expected 1 to 63 letters, digits or any of . _ -"
    if not group.nodes:
        yield "nodes is empty; name the agents that run its engines"
    for node in group.nodes:
        if not _NAME.fullmatch(node):
            yield f"nodes holds {node!r}; expected 1 to 63 letters, digits or any of . _ -"
        if group.nodes.count(node) > 1:
            yield f"nodes holds {node!r} twice; engines are spread evenly over the nodes"
    if bool(group.model) == bool(group.command):
        yield "give model = ... (or command = [...], what runs in place of vLLM), one of them"
    for argument in group.vllm:
        for option, reason in _OURS.items():
            if has_flag([argument], option):
                yield f"vllm holds {argument!r}; {reason}"
    for name in group.environment:
        if not _VARIABLE.fullmatch(name):
            yield f"environment holds {name!r}; expected letters, digits and _"
    control = group.tidal.get("control", {})
    for key in ("bind", "advertise"):
        if isinstance(control, Mapping) and key in control:
            yield f"tidal.control.{key} is set by each node's agent; leave it out (control_port = ... fixes the port)"


def _port_problems(spec: ClusterSpec) -> Iterator[str]:
    taken: dict[tuple[str, int], str] = {}
    for group in spec.group:
        for number in range(group.count + spec.cluster.max_surge if group.count else 0):
            slot = slot_of(group, number)
            for key, first in (("port", group.port), ("control_port", group.control_port)):
                port = first + slot.place
                what = f"{key} of {slot.engine}"
                if first and port > 65535:
                    yield f"{what} would be {port}; choose a smaller {key}"
                other = taken.setdefault((slot.node, port), what) if first else what
                if other != what:
                    yield f"{what} and {other} would both be {port} on node {slot.node!r}; move one of them"


def _pair_problems(spec: ClusterSpec) -> Iterator[str]:
    counts = {role: sum(group.count for group in spec.group if group.role is role) for role in Role}
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if counts[role] and not counts[other]:
            yield f"there are {role} engines and no {other} engine; each needs the other"
    table = spec.cluster
    for role, count in counts.items():
        if count == 1 and not table.max_surge and not table.allow_outage:
            yield (
                f"there is one {role} engine, and replacing it would leave none; set max_surge = 1 where there is "
                "hardware for one more, or allow_outage = true"
            )


def filled(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value of a specification with ``{engine}`` and the like filled in, at any depth."""
    if isinstance(value, str):
        for name, text in names.items():
            value = value.replace("{" + name + "}", text)
        return value
    if isinstance(value, Mapping):
        return {key: filled(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [filled(item, names) for item in value]
    return value


def names_of(group: Group, number: int) -> dict[str, str]:
    """Return what the braces of a group's texts stand for in one engine."""
    slot = slot_of(group, number)
    return {
        "engine": slot.engine,
        "group": group.name,
        "slot": str(number),
        "node": slot.node,
        "place": str(slot.place),
    }


def _sample(tidal: dict[str, Any]) -> Any:
    """Fill in plausible texts, so that a setting is checked as an engine will read it."""
    return filled(tidal, {"engine": "e", "group": "g", "slot": "0", "node": "n", "place": "0"})


def _short(value: Any) -> str:
    """Return a name of a value: the same for the same content, however it was written."""
    text = msgspec.json.encode(value, order="deterministic")
    return hashlib.blake2b(text, digest_size=_ID_BYTES).hexdigest()
