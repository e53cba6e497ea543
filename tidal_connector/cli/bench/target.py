# SPDX-License-Identifier: Apache-2.0
"""The process that is written to: a pool as the decode engine has one, and a plain socket into the same memory.

Speaks JSON lines: says on standard output where it can be reached; for each line on standard input, a list of
``[offset, length]`` within its pool, it answers with a digest of those bytes. Ends with its standard input.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import threading

from tidal_connector.config import PoolConfig, TidalConfig
from tidal_connector.layout import Home
from tidal_connector.memory.region import MemoryRegion, open_region
from tidal_connector.transfer.plane import open_plane

LENGTH_BYTES = 8
ACKNOWLEDGED = b"a"


def main(host: str, size: int) -> None:
    """Serve until standard input ends.

    Args:
        host: address that peers use.
        size: bytes of the pool.
    """
    with open_region(size, PoolConfig()) as pool, open_plane(TidalConfig(), host, _nobody) as plane:
        plane.register(pool.address, pool.length, Home.HOST)
        with socket.create_server((host, 0)) as server:
            threading.Thread(target=_receive, args=(server, pool), daemon=True).start()
            hello = {
                "endpoint": plane.endpoint(),
                "address": pool.address,
                "pages": pool.report.line(),
                "port": server.getsockname()[1],
            }
            print(json.dumps(hello), flush=True)
            for line in sys.stdin:
                digest = hashlib.blake2b()
                for offset, length in json.loads(line):
                    digest.update(pool.buffer[offset : offset + length])
                print(json.dumps(digest.hexdigest()), flush=True)


def _nobody() -> None:
    """Take the news of receipts; this side sends nothing."""


def _receive(server: socket.socket, pool: MemoryRegion) -> None:
    """Take one connection at a time: a length, then so many bytes from the pool's start on, then one byte back."""
    while True:
        connection, _ = server.accept()
        with connection:
            while head := connection.recv(LENGTH_BYTES, socket.MSG_WAITALL):
                rest = pool.buffer[: int.from_bytes(head, "little")]
                while rest:
                    rest = rest[connection.recv_into(rest) :]
                connection.sendall(ACKNOWLEDGED)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
