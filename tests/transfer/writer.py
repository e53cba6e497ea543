# SPDX-License-Identifier: Apache-2.0
"""A process that writes into a peer's memory for as long as it lives: what a prefill engine is to decode."""

from __future__ import annotations

import sys

import numpy as np

from tidal_connector.config import TransferConfig
from tidal_connector.layout import Home
from tidal_connector.transfer.mooncake import MooncakePlane
from tidal_connector.transfer.runs import Run


def main(peer: str, address: int, length: int, stall_s: float, host: str = "127.0.0.1") -> None:
    source = np.full(length, 0x55, np.uint8)
    with MooncakePlane(TransferConfig(), host, lambda: None, stall_s=stall_s) as plane:
        plane.register(source.ctypes.data, length, Home.HOST, target=False)
        plane.submit(peer, [Run(source.ctypes.data, address, length)])
        print("writing", flush=True)
        sys.stdin.read()  # until the test lets go


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), *sys.argv[5:])
