# SPDX-License-Identifier: Apache-2.0
"""Corrupts one row that landed, on request, to prove that a test bed notices (``allow_sabotage``)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from tidal_connector.layout import Region
from tidal_connector.log import get_logger
from tidal_connector.vllm_plugin.metadata import Receive

logger = get_logger(__name__)

_SIGN = 0x80


def corrupt_row(regions: Iterable[Region], receive: Receive, element_bytes: int) -> None:
    """Turn the signs of the latent row that a request named.

    Args:
        regions: where this engine keeps its KV.
        receive: the request's reservation, landed; a row that it does not hold is left alone, with a line in the log.
        element_bytes: size of a latent element (little-endian, so the sign is in its last byte).
    """
    row = receive.sabotage
    if row is None:
        return
    region = next((r for r in regions if r.kind.latent and r.layer == row.layer), None)
    if region is None or not receive.first <= row.token < receive.end:
        logger.warning(
            "request %s: cannot corrupt layer %d token %d: not received", receive.request, row.layer, row.token
        )
        return
    page = receive.pages[row.token // region.page_tokens - receive.first // region.page_tokens]
    address = region.address(page, row.token % region.page_tokens)
    data = (ctypes.c_ubyte * region.row_bytes).from_address(address)
    for index in range(element_bytes - 1, region.row_bytes, element_bytes):
        data[index] ^= _SIGN
    logger.warning("request %s: corrupted layer %d token %d on request", receive.request, row.layer, row.token)
