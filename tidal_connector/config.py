# SPDX-License-Identifier: Apache-2.0
"""The connector's settings as frozen values, and the only reader of the environment.

``kv_connector_extra_config`` (JSON on vLLM's command line, or a TOML file of the same shape given to ``tidal
serve``) is translated once, by :func:`load_config`. Unknown keys are refused, with the nearest known key in
the message.
"""

from __future__ import annotations

import enum
import os
import typing
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from tidal_connector.address import is_unspecified, join_address, parse_address, parse_host
from tidal_connector.errors import ConfigError
from tidal_connector.tables import convert_strict

Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_LAST_PORT = 65535
_DECIMAL = ("K", "M", "G", "T")  # which some count by 1000 and others by 1024: refused, not guessed


class PageKind(enum.StrEnum):
    """Kinds of host memory for the pool, best first."""

    HUGETLBFS = "hugetlbfs"
    HUGE_1G = "1g"
    HUGE_2M = "2m"
    TRANSPARENT = "thp"
    PLAIN = "plain"


class DeviceAccess(enum.StrEnum):
    """How an NPU reaches the host pool."""

    AUTO = "auto"
    PAGES = "pages"
    RUNTIME = "runtime"
    OFF = "off"


class Offload(enum.StrEnum):
    """Where the latents of this engine live."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"
    ADAPTIVE = "adaptive"


class PlaneKind(enum.StrEnum):
    """Implementations of the transfer plane."""

    MOONCAKE = "mooncake"
    LOOPBACK = "loopback"


class Protocol(enum.StrEnum):
    """Mooncake's transports."""

    TCP = "tcp"
    RDMA = "rdma"
    ASCEND = "ascend"


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host pool.

    Attributes:
        bytes: size, in bytes or as text such as ``"2GiB"``.
        pages: demand one kind of pages; None tries them in the order of :class:`PageKind` and falls back
            visibly.
        path: a mounted hugetlbfs directory, for ``hugetlbfs``; None looks it up in the mount table.
        numa: NUMA node to bind the pool to; None leaves the choice to the kernel.
        prefault: touch every page at start, so that no page is missing later.
        register: how an NPU reaches the pool. ``pages``: the pages above are registered with its runtime, or the start
            fails. ``runtime``: memory that the runtime gives (``aclrtMallocHost``) is registered; up to Linux 5.10 no
            other can be. ``auto``: the first, on such a Linux the second. ``off``: nothing is, and kernels on the NPU
            cannot read the pool. Without an NPU nothing is registered and nothing is asked.
        register_chunk: most bytes that one registration covers, a multiple of 2 MiB. Registrations of 64 GiB are known
            to work and those of more than 200 GB to fail (207001), and the fewer there are, the fewer borders must lie
            between layers; one that is refused for want of memory is tried again with half of it.
    """

    bytes: PositiveInt | str = "1GiB"
    pages: PageKind | None = None
    path: str | None = None
    numa: Annotated[int, msgspec.Meta(ge=0)] | None = None
    prefault: bool = True
    register: DeviceAccess = DeviceAccess.AUTO
    register_chunk: PositiveInt | str = "64GiB"

    @property
    def size(self) -> int:
        """The size in bytes.

        Raises:
            ConfigError: the text is no size.
        """
        return parse_bytes("pool.bytes", self.bytes)

    @property
    def chunk(self) -> int:
        """The most bytes of one registration.

        Raises:
            ConfigError: the text is no size, or no multiple of 2 MiB.
        """
        return _parse_chunk("pool.register_chunk", self.register_chunk)


class ControlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The control channel and the timers of the protocol (seconds; ``control/README.md`` says what each bounds).

    Attributes:
        bind: ``host:port`` to listen on; port 0 lets the kernel choose. Of an engine of several ranks, rank k listens
            k ports higher; data-parallel replicas on one machine follow one another.
        advertise: host (or ``host:port``) that peers connect to; None takes that of ``bind``.
        lease_s: a peer silent for so long is lost; beats go out every third of it.
        accept_s: wait of a reservation for the prefill side's answer.
        park_s: how long a reservation may wait at prefill for its request.
        hold_s: how long finished prefill pages wait for a reservation.
        stall_s: longest time without progress before a transfer fails.
        quarantine_s: how long pages stay out of use after a transfer that did not end well; None: 120 on
            tcp, 30 on ascend, 10 on rdma.
    """

    bind: str = "127.0.0.1:0"
    advertise: str | None = None
    lease_s: Positive = 9.0
    accept_s: Positive = 60.0
    park_s: Positive = 120.0
    hold_s: Positive = 60.0
    stall_s: Positive = 10.0
    quarantine_s: Positive | None = None

    def for_rank(self, rank: int) -> ControlConfig:
        """Return the settings of one rank of an engine: every port that is named is that of the first.

        Args:
            rank: which rank, counted over all data-parallel replicas of the engine on this machine.

        Raises:
            ConfigError: an address cannot be read, or the ports of the ranks do not fit below 65536.
        """
        if not rank:
            return self
        host, port = parse_address("control.bind", self.bind)
        advertise = self.advertise
        if advertise is not None:
            shown, shown_port = parse_host("control.advertise", advertise)
            advertise = join_address(shown, _later("control.advertise", shown_port, rank)) if shown_port else advertise
        bind = join_address(host, _later("control.bind", port, rank))
        return msgspec.structs.replace(self, bind=bind, advertise=advertise)

    def advertised(self) -> tuple[str, int]:
        """Return the host that peers connect to, and the port, which is 0 where the one that is bound counts.

        Raises:
            ConfigError: an address cannot be read, or no peer can use it.
        """
        host, port = parse_address("control.bind", self.bind)[0], 0
        if self.advertise is not None:
            host, port = parse_host("control.advertise", self.advertise)
        if is_unspecified(host):
            raise ConfigError(
                f"control.advertise = {self.advertise!r} with control.bind = {self.bind!r}: peers cannot connect to "
                f"{host}; set control.advertise to an address of this machine that they reach"
            )
        return host, port


def _later(field: str, port: int, rank: int) -> int:
    """Return the port of a rank, 0 where the kernel chooses it."""
    if port and port + rank > _LAST_PORT:
        raise ConfigError(f"{field}: port {port} leaves no port for rank {rank}; choose one below {_LAST_PORT - rank}")
    return port + rank if port else 0


class SelectionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The selection cache on the device, of an engine whose latents live in the host pool.

    Attributes:
        slots: rows that a request may keep in each layer; None: twice the model's top-k. At least top-k.
        bytes: size over all layers, in bytes or as text; None: what ``max_num_seqs`` requests of ``slots`` rows take,
            at most half of the device's KV budget (with ``offload = "adaptive"``: all that index keys leave of it).
            A request that finds no room is served without residency, more slowly.
        threads: workers that plan and move rows, at most.
        prefetch: fetch the rows of layers that share their leader's selection ahead of need, on a thread of its own.
    """

    slots: PositiveInt | None = None
    bytes: PositiveInt | str | None = None
    threads: PositiveInt = 1
    prefetch: bool = True

    def slots_for(self, top_k: int) -> int:
        """Return the slots of a request.

        Raises:
            ConfigError: fewer than ``top_k``, so that one step's selection would not fit.
        """
        slots = 2 * top_k if self.slots is None else self.slots
        if slots < top_k:
            raise ConfigError(
                f"selection.slots = {slots}: expected at least the model's index_topk, {top_k}; raise it, or leave it "
                f"out (then it is {2 * top_k})"
            )
        return slots

    @property
    def size(self) -> int | None:
        """The size in bytes, None where it is not set.

        Raises:
            ConfigError: the text is no size.
        """
        return None if self.bytes is None else parse_bytes("selection.bytes", self.bytes)


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The transfer plane.

    Attributes:
        plane: implementation.
        protocol: Mooncake transport.
        device: RDMA device names for Mooncake, comma-separated; empty lets it choose.
        host: address under which peers reach this process's data ports; None takes the control channel's.
        window: descriptors in flight per peer.
        descriptor_bytes: largest descriptor.
    """

    plane: PlaneKind = PlaneKind.MOONCAKE
    protocol: Protocol = Protocol.TCP
    device: str = ""
    host: str | None = None
    window: Annotated[int, msgspec.Meta(ge=1, le=32)] = 8
    descriptor_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 28)] = 4 << 20


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logging: level name, and a file to append to instead of standard error."""

    level: typing.Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    file: str | None = None


class TidalConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that ``kv_connector_extra_config`` may hold.

    Attributes:
        offload: latents in the host pool; ``auto`` means on for ``kv_consumer``, off otherwise. ``adaptive`` is on, and
            keeps requests wholly on the device while there is room.
        peers: engine id to control address (``host:port``) of the engines that requests may name; empty
            allows any.
        weights: text that names the checkpoint's revision, instead of a digest of its files; engines with
            different texts refuse one another.
        allow_sabotage: accept requests that ask to corrupt one of their own rows (proves a test bed; never
            in production).
    """

    offload: Offload = Offload.AUTO
    pool: PoolConfig = PoolConfig()
    control: ControlConfig = ControlConfig()
    transfer: TransferConfig = TransferConfig()
    selection: SelectionConfig = SelectionConfig()
    log: LogConfig = LogConfig()
    peers: dict[str, str] = {}
    weights: str = ""
    allow_sabotage: bool = False

    def offloads(self, kv_role: str) -> bool:
        """Whether an engine of this ``kv_role`` keeps its latents in the host pool."""
        if self.offload is Offload.AUTO:
            return kv_role == "kv_consumer"
        return self.offload is not Offload.OFF

    @property
    def transfer_host(self) -> str:
        """The address under which peers reach the data ports, without brackets: the control channel's, if not said.

        Raises:
            ConfigError: it cannot be read, or no peer can use it.
        """
        if self.transfer.host is None:
            return self.control.advertised()[0]
        host = parse_host("transfer.host", self.transfer.host)[0]
        if is_unspecified(host):
            raise ConfigError(f"transfer.host = {host!r}: expected an address of this machine that peers reach")
        return host

    @property
    def quarantine_s(self) -> float:
        """Seconds of quarantine, by the transport where it is not set."""
        if self.control.quarantine_s is not None:
            return self.control.quarantine_s
        # Ascend tries a write twice, and each attempt may last as long as its timeout.
        return {Protocol.TCP: 120.0, Protocol.ASCEND: 30.0, Protocol.RDMA: 10.0}[self.transfer.protocol]


def parse_bytes(field: str, value: int | str) -> int:
    """Turn ``1048576``, ``"2GiB"`` or ``"512 MiB"`` into bytes.

    Raises:
        ConfigError: the text is no size.
    """
    if isinstance(value, int):
        return value
    text = value.strip().upper()
    digits = text.rstrip("BIKMGT ")
    unit = text[len(digits) :].strip()
    try:
        number = float(digits)
    except ValueError:
        number = -1.0
    if unit.rstrip("B") in _DECIMAL and 0 < number < 1 << 60:
        known = unit[0] + "iB"
        raise ConfigError(f'{field} = {value!r}: {unit} is unknown; write {known}, as in "{digits.strip()}{known}"')
    if unit not in _UNITS or not 0 < number < 1 << 60:
        raise ConfigError(f'{field} = {value!r}: expected bytes or a text such as "512MiB" or "2GiB"')
    return int(number * _UNITS[unit])


def _parse_chunk(field: str, value: int | str) -> int:
    chunk = parse_bytes(field, value)
    if chunk % (2 << 20):
        raise ConfigError(f"{field} = {value!r}: expected a multiple of 2MiB, so that no hugepage is in two chunks")
    return chunk


def load_config(extra: Mapping[str, Any], where: str = "kv_connector_extra_config") -> TidalConfig:
    """Translate ``kv_connector_extra_config``.

    Args:
        extra: the table as it was read.
        where: what it is called in messages.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named) or a value is of the wrong type, range or form.
    """
    config = convert_strict(TidalConfig, extra, where)
    parse_bytes(f"{where}: pool.bytes", config.pool.bytes)
    _parse_chunk(f"{where}: pool.register_chunk", config.pool.register_chunk)
    if config.selection.bytes is not None:
        parse_bytes(f"{where}: selection.bytes", config.selection.bytes)
    parse_address(f"{where}: control.bind", config.control.bind)
    for engine, address in config.peers.items():
        parse_address(f"{where}: peers.{engine}", address)
    return config


# --- environment ---

_SWITCH = "VLLM_DSA_KV_OFFLOAD"
_HUGEPAGE_PATH = "VLLM_DSA_OFFLOAD_HUGEPAGE_PATH"


def offload_asked() -> bool:
    """Whether ``VLLM_DSA_KV_OFFLOAD`` asks for the latents in the host pool.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    value = os.environ.get(_SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{_SWITCH} = {value!r}: expected 1 (latents in the host pool) or 0")
    return value == "1"


def with_aliases(extra: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Add to ``kv_connector_extra_config`` what the variables of TidalCache ask for and it does not say itself.

    Returns:
        The table, and one line for the log for each variable that was heard.

    Raises:
        ConfigError: a variable has a value that it cannot have.
    """
    merged, notes = dict(extra), []
    if offload_asked() and "offload" not in extra:
        merged["offload"] = str(Offload.ON)
        notes.append(f'{_SWITCH}=1 is taken for offload = "on"')
    path, pool = os.environ.get(_HUGEPAGE_PATH), extra.get("pool", {})
    if path and isinstance(pool, Mapping) and "path" not in pool:
        merged["pool"] = {"pages": str(PageKind.HUGETLBFS), **pool, "path": path}
        notes.append(f"{_HUGEPAGE_PATH}={path} is taken for pool.path")
    return merged, notes


def native_library_path() -> str | None:
    """Return ``TIDAL_NATIVE``: a native module to load instead of the installed one (development)."""
    return os.environ.get("TIDAL_NATIVE")


def ascendcl_path() -> str | None:
    """Return ``TIDAL_ASCENDCL``: the libascendcl to load in place of the toolkit's (tests, unusual installations)."""
    return os.environ.get("TIDAL_ASCENDCL") or None


def ascend_homes() -> list[tuple[str, str]]:
    """Return the variables that name an installed Ascend toolkit and are set, each with its folder, best first."""
    names = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
    return [(name, value) for name in names if (value := os.environ.get(name))]


def cann_operator_folders() -> list[str]:
    """Return the folders in which CANN looks for operator packages, its own last, as the environment names them."""
    custom = os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(os.pathsep)
    return [folder for folder in (*custom, os.environ.get("ASCEND_OPP_PATH", "")) if folder]


def log_level() -> str | None:
    """Return ``TIDAL_LOG``: a level that overrides ``log.level``.

    Raises:
        ConfigError: it is no level.
    """
    level = os.environ.get("TIDAL_LOG")
    levels = typing.get_args(typing.get_type_hints(LogConfig)["level"])
    if level and level.upper() not in levels:
        raise ConfigError(f"TIDAL_LOG = {level!r}: expected {' or '.join(map(repr, levels))}")
    return level or None


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with additions, for a child process."""
    return {**os.environ, **(extra or {})}


def grpc_environment() -> None:
    """Keep gRPC from logging each failed attempt to connect by itself, unless the operator has chosen a level.

    What went wrong is in the errors that its calls raise. Must run before ``grpc`` is imported.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


_OF_ASCEND = (
    "ASCEND_BASE_PORT",
    "ASCEND_BUFFER_POOL",
    "ASCEND_CONNECT_TIMEOUT",
    "ASCEND_GLOBAL_RESOURCE_CONFIG",
    "ASCEND_TRANSFER_TIMEOUT",
    "HCCL_INTRA_ROCE_ENABLE",
    "MC_FORCE_HCA",
    "MC_FORCE_TCP",
    "MC_MAX_RPC_PORT",
    "MC_MIN_RPC_PORT",
)


def ascend_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return of an environment what decides how Mooncake's ``ascend`` transport runs."""
    return {name: environment[name] for name in _OF_ASCEND if name in environment}


def ascend_environment(stall_s: float | None = None) -> dict[str, str]:
    """Return :func:`ascend_variables` of this process.

    Args:
        stall_s: seconds after which a transfer that moves nothing has failed: timeouts that the operator has not set
            are set so that a write has ended by then. None sets nothing. Must run before ``mooncake`` is imported.
    """
    if stall_s is not None:
        os.environ.setdefault("ASCEND_CONNECT_TIMEOUT", str(max(1000, round(250 * stall_s))))
        os.environ.setdefault("ASCEND_TRANSFER_TIMEOUT", str(max(1000, round(375 * stall_s))))
    return ascend_variables(os.environ)


def mooncake_environment(force_tcp: bool, progress_timeout_s: float, wait_timeout_s: float, ipv6: bool) -> bool:
    """Set the variables that Mooncake reads once at its import, and return whether its sockets will be of IPv6.

    Variables that the operator has set are left alone. Must run before ``mooncake`` is imported.

    Args:
        force_tcp: take TCP whatever devices are found.
        progress_timeout_s: seconds without a moved byte, or without an acknowledgement, before a descriptor
            fails.
        wait_timeout_s: bound of Mooncake's own blocking waits; must exceed the former.
        ipv6: open sockets of IPv6. They also take callers of IPv4, but without it nothing of IPv6 works.
    """
    defaults = {
        "MC_TRANSFER_TIMEOUT": str(max(5, round(wait_timeout_s))),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(max(1, round(progress_timeout_s))),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(max(1, round(progress_timeout_s))),
        "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
        "MC_TCP_SLICE_SIZE": str(1 << 20),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_LOG_LEVEL": "WARNING",
    }
    if force_tcp:
        defaults["MC_FORCE_TCP"] = "1"
    if ipv6:
        defaults["MC_USE_IPV6"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    return os.environ.get("MC_USE_IPV6") == "1"
