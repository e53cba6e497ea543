# SPDX-License-Identifier: Apache-2.0
"""Asks the registry, and the engines that it names, and hands on what came of it. Every wait is bounded."""

from __future__ import annotations

import concurrent.futures
import email.utils
import secrets
import time

import httpx
import msgspec

from tidal_connector.cli.doctor.facts import Registry
from tidal_connector.cluster.rollout_records import AGENTS
from tidal_connector.errors import ConfigError, TidalError
from tidal_connector.registry.base import Delete, Put, Store
from tidal_connector.registry.members import Member, Members, peers
from tidal_connector.registry.settings import NothingThere, RegistryConfig, check, open_store, refuse_absent

_READS = 5
_ENGINE_S = 2.0
_ENGINES = 64  # asked at most; a cluster of more is not looked at engine by engine


def ask_registry(config: RegistryConfig) -> Registry:
    """Open the registry, read, write and delete a key of our own, and look at each engine that is announced."""
    encrypted = bool(config.ca)
    facts = Registry(url=config.url, cluster=config.cluster, secure=encrypted, authenticated=bool(config.user))
    try:
        check(config)
        refuse_absent(config)
        with open_store(config) as store:
            latencies, members = [], Members({})
            for _ in range(_READS):
                began = time.perf_counter()
                members = peers(store)
                latencies.append(time.perf_counter() - began)
            agents = frozenset(key.removeprefix(AGENTS) for key in store.read(AGENTS).entries)
            writable = _try_to_write(store)
    except NothingThere as error:
        return msgspec.structs.replace(facts, error=str(error), absent=True)
    except ConfigError as error:
        return msgspec.structs.replace(facts, error=str(error), fix="correct this setting, or --registry")
    except TidalError as error:
        return msgspec.structs.replace(facts, error=str(error))
    skews, unreachable = _look_at(members)
    return msgspec.structs.replace(
        facts,
        agents=agents,
        latencies_s=tuple(latencies),
        writable=writable,
        members=members,
        skews_s=skews,
        unreachable=unreachable,
    )


def _try_to_write(store: Store) -> str:
    key = f"doctor/{secrets.token_hex(8)}"
    try:
        store.write([Put(key, b"{}")])
        store.write([Delete(key)])
    except TidalError as error:
        return str(error)
    return ""


def _look_at(members: Members) -> tuple[dict[str, float], dict[str, str]]:
    engines = list(members.engines.values())[:_ENGINES]
    skews: dict[str, float] = {}
    unreachable: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=16) as pool:
        for member, (skew, problem) in zip(engines, pool.map(_engine, engines), strict=True):
            if problem:
                unreachable[member.engine] = problem
            elif skew is not None:
                skews[member.engine] = skew
    return skews, unreachable


def _engine(member: Member) -> tuple[float | None, str]:
    """Return by how much an engine's clock is ahead, from the date of its answer, or why there is none."""
    url = member.http.rstrip("/") + "/health"
    try:
        answer = httpx.get(url, timeout=_ENGINE_S, trust_env=False)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        return None, f"{url}: {type(error).__name__}"
    date = email.utils.parsedate_to_datetime(answer.headers["date"]) if "date" in answer.headers else None
    # The date is cut to whole seconds, so half a second is added on average.
    return None if date is None else date.timestamp() + 0.5 - time.time(), ""
