# SPDX-License-Identifier: Apache-2.0
"""A process that owns a pool: maps a file, registers it, says where it is, counts connections when asked."""

from __future__ import annotations

import json
import sys

import numpy as np

from tidal_connector.config import TransferConfig
from tidal_connector.layout import Home
from tidal_connector.transfer.mooncake import MooncakePlane


def main(path: str, host: str, stall_s: float) -> None:
    memory = np.memmap(path, np.uint8, mode="r+")
    with MooncakePlane(TransferConfig(), host, lambda: None, stall_s=stall_s) as plane:
        address = memory.ctypes.data
        plane.register(address, memory.size, Home.HOST)
        print(json.dumps({"endpoint": plane.endpoint(), "address": address}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"connections": plane.peer_connections(host)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
