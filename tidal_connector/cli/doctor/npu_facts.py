# SPDX-License-Identifier: Apache-2.0
"""What is known of NPUs and their software, as plain values; part of :class:`~.facts.Facts`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class OpPackage(msgspec.Struct, frozen=True):
    """A vendor folder of custom operators that was found.

    Attributes:
        folder: the vendor's folder, as a run package installs it.
        operators: those of ours whose aclnn function its ``libcust_opapi.so`` exports.
        searched: whether CANN looks there: below the ``vendors`` of its own operators, or in ASCEND_CUSTOM_OPP_PATH.
    """

    folder: str
    operators: frozenset[str] = frozenset()
    searched: bool = False


class Ascend(msgspec.Struct, frozen=True):
    """What there is of an NPU.

    Attributes:
        devices: names such as ``davinci0``.
        manager: whether ``davinci_manager`` is there, without which no process opens a device.
        acl: path of libascendcl.so; empty: not found.
        driver: version of the driver, which is also that of the HDK; empty: not found.
        firmware: version of the firmware; empty: not found.
        cann: version of CANN; empty: not found.
        packages: vendor folders with a ``libcust_opapi.so``.
        hccn: addresses of NPU network cards in ``/etc/hccn.conf``; None: there is no such file.
        variables: of the environment, those that decide how Mooncake's ``ascend`` transport runs.
    """

    devices: tuple[str, ...] = ()
    manager: bool = False
    acl: str = ""
    driver: str = ""
    firmware: str = ""
    cann: str = ""
    packages: tuple[OpPackage, ...] = ()
    hccn: int | None = None
    variables: Mapping[str, str] = {}
