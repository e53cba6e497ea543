# SPDX-License-Identifier: Apache-2.0
"""Checks of ports, addresses, kernel settings, clock and registry. Pure."""

from __future__ import annotations

import statistics
from collections import Counter

from tidal_connector.cli.doctor.facts import Facts, Listener, Registry
from tidal_connector.cli.doctor.finding import Finding, fail, good, warn
from tidal_connector.cli.doctor.sockets import covers
from tidal_connector.cli.doctor.wishes import PortRange, PortWish, Wishes
from tidal_connector.errors import ConfigError
from tidal_connector.registry.addresses import is_loopback, split
from tidal_connector.registry.members import State
from tidal_connector.registry.settings import RegistryConfig, on_one_machine

MOONCAKE_PORTS = (15000, 17000)
"""The range from which Mooncake takes two ports for each engine of its own."""

_ENOUGH_PORTS = 64
_PORTS_OF_ENGINE = 2  # HTTP and control channel
_PATIENT_SYN = 3
_OURS = ("tidal", "vllm", "VLLM")
_STEPPED_S, _ERROR_S, _SKEW_S = 0.05, 1.0, 2.0
_SLOW_S = 0.1


def check_ports(facts: Facts, wishes: Wishes) -> list[Finding]:
    """Each port that the files listen on: free, or taken by whom; and twice the same port in two files (FR-20)."""
    lines = []
    counted = Counter(port.port for port in wishes.ports if port.port)
    for number in sorted(port for port, count in counted.items() if count > 1):
        who = [each for each in wishes.ports if each.port == number]
        if any(_overlap(one, other) for one in who for other in who if one is not other):
            text = f"{number} is asked for by {' and '.join(f'{each.field} of {each.file}' for each in who)}"
            lines.append(fail(f"port {number}", text, "give each engine of a machine its own ports"))
    for wish in wishes.ports:
        lines.append(_port(wish, [found for found in facts.listeners if found.port == wish.port]))
    lines += [_range(each, facts) for each in wishes.ranges]
    free = _free(facts, *MOONCAKE_PORTS)
    name = f"ports {MOONCAKE_PORTS[0]} to {MOONCAKE_PORTS[1]}"
    if free < _ENOUGH_PORTS:
        fix = "end what holds them, or set MC_MIN_RPC_PORT and MC_MAX_RPC_PORT for the engines"
        lines.append(fail(name, f"{free} free; each pair of engines takes two on either side", fix))
    else:
        lines.append(good(name, f"{free} free for Mooncake; open them between the nodes, and to nobody else"))
    return lines


def _free(facts: Facts, first: int, last: int) -> int:
    """Count the ports of a range on which nobody listens."""
    return last - first + 1 - len({found.port for found in facts.listeners if first <= found.port <= last})


def _connecting(facts: Facts, first: int, last: int) -> list[str]:
    """Return the bounds of the ports that connections of this machine take, if a range overlaps them; else nothing."""
    bounds = facts.sysctl.get("net.ipv4.ip_local_port_range", "").split()
    return bounds if len(bounds) == 2 and int(bounds[0]) <= last and int(bounds[1]) >= first else []


def _range(wish: PortRange, facts: Facts) -> Finding:
    name = f"ports {wish.first} to {wish.last}"
    if bounds := _connecting(facts, wish.first, wish.last):
        text = f"of {wish.file} overlap net.ipv4.ip_local_port_range = {' '.join(bounds)}: an engine may lose its port"
        return warn(name, text, f"choose another range in {wish.file}, below {bounds[0]}")
    free = _free(facts, wish.first, wish.last)
    if free < _PORTS_OF_ENGINE:
        text = f"{free} free of those of {wish.file}; an engine takes {_PORTS_OF_ENGINE}"
        return fail(name, text, f"choose another or a wider range in {wish.file}, or end what holds them")
    return good(name, f"{free} free, for engines of {wish.file}")


def _port(wish: PortWish, here: list[Listener]) -> Finding:
    name = f"port {wish.port}"
    if wish.port == 0:
        return good("port 0", f"{wish.field} of {wish.file}: the kernel chooses one, and that one is announced")
    holder = next((found for found in here if covers(found, wish.host)), None)
    if holder is None:
        return good(name, f"free, for {wish.field} of {wish.file}")
    who = f"pid {holder.pid} ({holder.command})" if holder.pid else "another user's process"
    text = f"taken by {who}, wanted for {wish.field} of {wish.file}"
    if any(word in holder.command for word in _OURS):
        return warn(name, text, "nothing, if that is the same engine or proxy already running; otherwise another port")
    return fail(name, text, f"end that process, or change {wish.field}")


def _overlap(one: PortWish, other: PortWish) -> bool:
    return covers(Listener(one.host, one.port, 0, ""), other.host)


def check_addresses(_: Facts, wishes: Wishes) -> list[Finding]:
    """Whether others can use what is advertised (FR-18): ``registry.addresses`` has the rules."""
    lines = []
    for address in wishes.addresses:
        name = f"address {address.text}"
        fix = f"set {address.field.replace('.bind', '.advertise')} to what others connect to"
        if address.problem:
            # Where nobody is told of it, an engine may bind all addresses.
            say = fail if wishes.registry is not None or "advertise" in address.field else warn
            lines.append(say(name, f"{address.file}: {address.problem}", fix))
        elif is_loopback(split(address.field, address.text)[0]):
            text = f"{address.field} of {address.file}: loopback, so peers have to be on this machine"
            local = wishes.registry is None or _is_local(wishes.registry)
            lines.append(good(name, text) if local else warn(name, text, fix))
        else:
            lines.append(good(name, f"{address.field} of {address.file}"))
    return lines


def _is_local(registry: RegistryConfig) -> bool:
    """Whether nobody on another machine can hear of what is announced."""
    try:
        return on_one_machine(registry)
    except ConfigError:
        return False  # a line of its own tells


def check_kernel(facts: Facts, _: Wishes) -> list[Finding]:
    """Kernel settings that decide how long a silent peer is waited for, and that ports do not run into one another."""
    lines = []
    retries = facts.sysctl.get("net.ipv4.tcp_syn_retries", "")
    if retries.isdigit() and int(retries) > _PATIENT_SYN:
        text = f"net.ipv4.tcp_syn_retries = {retries}: a peer that vanished holds a connection attempt for minutes"
        lines.append(warn("kernel", text, "sysctl -w net.ipv4.tcp_syn_retries=2"))
    if bounds := _connecting(facts, *MOONCAKE_PORTS):
        ours = " to ".join(map(str, MOONCAKE_PORTS))
        text = f"net.ipv4.ip_local_port_range = {' '.join(bounds)} overlaps Mooncake's {ours}"
        lines.append(warn("kernel", text, "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"))
    return lines or [good("kernel", f"tcp_syn_retries {retries or 'unknown'}")]


def check_clock(facts: Facts, _: Wishes) -> list[Finding]:
    """The clock. Leases count monotonic time, so a step ends none; logs and certificates still need the right hour."""
    clock, lines = facts.clock, []
    fix = "enable a time service: systemctl enable --now systemd-timesyncd (or chrony)"
    if abs(clock.stepped_s) > _STEPPED_S:
        text = f"wall time was stepped by {clock.stepped_s:+.3f} s while this ran"
        lines.append(
            warn("clock", text, "let the time service slew the clock instead of stepping it (chrony: makestep)")
        )
    if clock.synchronised is False:
        lines.append(warn("clock", "the kernel says that nothing keeps it right", fix))
    elif clock.synchronised and clock.error_s > _ERROR_S:
        lines.append(warn("clock", f"right only within {clock.error_s:.1f} s", fix))
    if facts.registry is not None:
        for engine, skew in sorted(facts.registry.skews_s.items()):
            if abs(skew) > _SKEW_S:
                where = "ahead of" if skew > 0 else "behind"
                text = f"the machine of engine {engine} is {abs(skew):.0f} s {where} this one"
                lines.append(warn("clock", text, fix + " on both"))
    said = "in step" if clock.synchronised else "the kernel does not say whether it is in step"
    return lines or [good("clock", f"{said}, source {clock.source or 'unknown'}")]


def check_registry(facts: Facts, wishes: Wishes) -> list[Finding]:
    """Whether the registry answers, how fast, how safely, and what it says of the engines."""
    registry = facts.registry
    if registry is None:
        text = "none is named, so engines and proxies know only what their files say"
        return [good("registry", f"{text}; give --registry or a [registry] table")] if wishes.files else []
    if registry.absent:
        return [warn("registry", registry.error, "nothing, if no agent or engine was started yet; else correct it")]
    if registry.error:
        fix = (
            registry.fix
            or "open its port to this machine; `etcdctl endpoint health --endpoints HOST:PORT` asks it directly"
        )
        return [fail("registry", registry.error, fix)]
    lines = [_latency(registry)]
    if registry.writable:
        fix = "grant the user readwrite on the cluster's prefix (etcdctl role grant-permission)"
        lines.append(fail("registry", f"nothing can be written: {registry.writable}", fix))
    if registry.url.startswith("etcd://"):
        lines += _safety(registry)
    return [*lines, *_members(registry)]


def _latency(registry: Registry) -> Finding:
    middle, slowest = statistics.median(registry.latencies_s), max(registry.latencies_s)
    reads = len(registry.latencies_s)
    text = f"{registry.url} answers in {middle * 1e3:.1f} ms (slowest of {reads}: {slowest * 1e3:.1f} ms)"
    if middle > _SLOW_S:
        return warn(
            "registry", text, "give etcd a disk and a core of its own; look at etcd_disk_wal_fsync_duration_seconds"
        )
    return good("registry", text)


def _safety(registry: Registry) -> list[Finding]:
    """Whoever can write to etcd can send KV elsewhere (FR-43)."""
    if registry.secure and registry.authenticated:
        return [good("registry", "TLS and a user")]
    lacking = [name for name, there in (("TLS", registry.secure), ("a user", registry.authenticated)) if not there]
    text = f"without {' and '.join(lacking)}: whoever reaches etcd can redirect engines' transfers"
    if _is_local(RegistryConfig(url=registry.url)):
        return [good("registry", f"{text}; it is on this machine's loopback")]
    fix = "registry.ca turns TLS on; registry.user and registry.password_file log in (etcdctl auth enable)"
    return [warn("registry", text, fix)]


def _members(registry: Registry) -> list[Finding]:
    members, lines = registry.members, []
    if members is None:
        return []
    states = Counter(member.state for member in members.engines.values())
    shown = ", ".join(f"{states[state]} {state}" for state in State if states[state]) or ""
    shown = shown or f"no engine is announced in cluster {registry.cluster}"
    lines.append(good("engines", shown))
    for key, why in sorted(members.odd.items()):
        lines.append(warn("engines", f"{key} cannot be read: {why}", f"find who writes it; etcdctl del --prefix {key}"))
    for engine, why in sorted(registry.unreachable.items()):
        say = fail if members.engines.get(engine) and members.engines[engine].state is State.READY else warn
        text = f"{engine} cannot be reached from here: {why}"
        lines.append(say("engines", text, "check its advertised address and the firewall between the two machines"))
    layouts = {member.layout for member in members.engines.values() if member.layout and member.state is State.READY}
    if len(layouts) > 1:
        text = f"ready engines have {len(layouts)} different KV layouts; only equal ones are paired"
        lines.append(warn("engines", text, "finish the rollout, or compare model, dtype and block size"))
    return lines


def check_files(_: Facts, wishes: Wishes) -> list[Finding]:
    """What is wrong with the files themselves."""
    lines = [fail(f"file {file}", problem, "correct the file") for file, problem in wishes.problems.items()]
    return [*(good(f"file {file}", "can be used") for file in wishes.files), *lines]
