# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: real HTTP, real control channel, answers that can be checked. For soaks and tests.

``python -m tidal_connector.cluster.standin --role decode --engine decode-0 --http 127.0.0.1:8200
--control 127.0.0.1:7200``. It also takes the arguments that ``tidal serve`` gives a vLLM server (``--host``,
``--port``, ``--served-model-name``, ``--kv-transfer-config``) and ignores vLLM's others, so that it stands in for one:
``command = ["python", "-m", "tidal_connector.cluster.standin"]`` in the engine's file.

Like vLLM it binds its HTTP port first, listens once it is ready, and drops what it is doing at SIGTERM. Clients compare
with :func:`tidal_connector.cluster.standin_answers.expected_text`. Starts in well under a second; knows neither torch
nor vLLM.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import FrameType

import msgspec
import uvicorn

from tidal_connector.address import join_address, parse_address
from tidal_connector.cluster.standin_http import Manner, Server
from tidal_connector.cluster.standin_rooms import PAGE_TOKENS, PAGES, Rooms, settings
from tidal_connector.config import load_config
from tidal_connector.control.handshake import Capacity
from tidal_connector.errors import ConfigError, TidalError
from tidal_connector.ids import EngineId, Role
from tidal_connector.log import configure
from tidal_connector.metrics import Counters

_KV_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}
_BACKLOG = 2048


class Place(msgspec.Struct, frozen=True):
    """Who a stand-in is and where it listens.

    Attributes:
        engine: the operator's name.
        role: what it does.
        http: host and port of its HTTP server.
        control: ``host:port`` of its control channel.
        advertise: what peers are told instead.
        tag: names its layout.
    """

    engine: EngineId
    role: Role
    http: tuple[str, int]
    control: str
    advertise: str | None
    tag: str


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="standin", description="An engine without a model, for soaks and tests.")
    add = parser.add_argument
    add("--role", choices=[str(role) for role in Role], default="both")
    add("--engine", default="standin", help="engine id")
    add("--http", help="HOST:PORT of the HTTP server; port 0 takes a free one")
    add("--control", default="127.0.0.1:0", help="HOST:PORT of the control channel")
    add("--advertise", help="host, or HOST:PORT, of the control channel that peers are told")
    add("--layout", default="v1", help="names the layout: stand-ins fit one another if these are equal")
    add("--model", help="name under which it serves, and the only one then; tidal, and any name, if not said")
    add("--served-model-name", help="the same; counts before --model")
    add("--token-ms", type=float, default=0.0, help="milliseconds per answered token")
    add("--prefill-ms", type=float, default=0.0, help="milliseconds per prompt")
    add("--max-num-seqs", type=int, default=256, help="requests that run at once")
    add("--start-s", type=float, default=0.0, help="seconds until it serves")
    add("--never-ready", action="store_true", help="listen, and answer 503 for ever")
    add("--recompute", action="store_true", help="serve a request whose KV did not arrive, instead of failing it")
    add("--fail-rate", type=float, default=0.0, help="share of requests that get 500")
    add("--wrong-rate", type=float, default=0.0, help="share of answers with one wrong token")
    add("--seed", type=int, default=0, help="of the rates")
    add("--lease-s", type=float, default=3.0, help="of the control channel; its other timers follow")
    add("--host", default="127.0.0.1", help="like vLLM; without --http")
    add("--port", type=int, default=8000, help="like vLLM; without --http")
    add("--kv-transfer-config", help="like vLLM: JSON with engine id, role and control addresses")
    return parser


def place_of(given: argparse.Namespace) -> Place:
    """Return who and where the stand-in is, from its own options or from vLLM's.

    Raises:
        ConfigError: an address or the transfer configuration cannot be read.
    """
    http = parse_address("--http", given.http) if given.http else (given.host, given.port)
    place = Place(EngineId(given.engine), Role(given.role), http, given.control, given.advertise, given.layout)
    if given.kv_transfer_config is None:
        return place
    try:
        transfer = msgspec.json.decode(given.kv_transfer_config, type=dict)
        role, engine = _KV_ROLES[transfer["kv_role"]], EngineId(transfer["engine_id"])
        config = load_config(transfer.get("kv_connector_extra_config", {}))
    except (msgspec.DecodeError, KeyError) as error:
        raise ConfigError(f"--kv-transfer-config: {error}") from None
    control = config.control
    tag = config.weights or given.layout
    return msgspec.structs.replace(
        place, engine=engine, role=role, control=control.bind, advertise=control.advertise, tag=tag
    )


def bind_http(address: tuple[str, int]) -> socket.socket:
    """Bind the HTTP port, without listening yet.

    Raises:
        ConfigError: it cannot be bound.
    """
    host, port = address
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ConfigError(f"{join_address(host, port)}: {error.strerror}") from None
    return found


def serve(given: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: a setting cannot be used.
    """
    place, counters = place_of(given), Counters()
    manner = Manner(
        model=given.served_model_name or given.model or "tidal",
        only_model=bool(given.served_model_name or given.model),
        token_ms=given.token_ms,
        prefill_ms=given.prefill_ms,
        max_seqs=given.max_num_seqs,
        ready=not given.never_ready,
        recompute=given.recompute,
        fail_rate=given.fail_rate,
        wrong_rate=given.wrong_rate,
        seed=given.seed,
    )
    capacity = Capacity(given.max_num_seqs, PAGES * PAGE_TOKENS)
    control = settings(place.control, place.advertise, given.lease_s)
    with bind_http(place.http) as listener:
        time.sleep(given.start_s)
        with Rooms(place.engine, place.role, place.tag, control, capacity, counters) as rooms:
            app = Server(place.engine, place.role, manner, rooms, counters).app()
            options = uvicorn.Config(app, log_level="critical", ws="none", lifespan="off", backlog=_BACKLOG)
            host, port = listener.getsockname()[:2]
            said = f"{place.role} stand-in {place.engine}: http {join_address(host, port)}, control {rooms.control}"
            print(f"{said}, layout {place.tag}", flush=True)
            _Uvicorn(options).run(sockets=[listener])


class _Uvicorn(uvicorn.Server):
    """Ends at the first signal, as vLLM does: what runs is dropped."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Leave at once."""
        del sig, frame
        self.should_exit = True
        self.force_exit = True


def main(words: Sequence[str]) -> int:
    """Run a stand-in; return its exit status."""
    parser = arguments()
    given, unknown = parser.parse_known_args(words)
    if unknown and given.kv_transfer_config is None:
        parser.error(f"unknown: {' '.join(unknown)}")
    configure("WARNING")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until uvicorn takes it over
    try:
        serve(given)
    except TidalError as error:
        print(f"standin: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
