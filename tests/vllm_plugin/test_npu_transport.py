# SPDX-License-Identifier: Apache-2.0
"""The NPUs before the transfer plane, on machines that have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidal_connector.config import load_config
from tidal_connector.errors import ConfigError, TidalError
from tidal_connector.vllm_plugin.npu_transport import check_control_port, npus


class EightNpus:
    """Eight NPUs."""

    def current(self) -> int | None:
        return 0

    def devices(self) -> int:
        return 8

    def enter(self, device: int) -> None:
        raise AssertionError("nobody writes here")


def test_a_control_port_among_those_of_the_listeners_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_BASE_PORT", raising=False)
    check_control_port("10.0.0.7:7100", EightNpus())
    check_control_port("[fd00::7]:28000", EightNpus())
    check_control_port("10.0.0.7:27999", None)
    with pytest.raises(ConfigError, match=r"control.bind: port 27999 meets 20000\.\.27999, .*8 NPUs"):
        check_control_port("10.0.0.7:27999", EightNpus())
    monkeypatch.setenv("ASCEND_BASE_PORT", "30000")
    check_control_port("10.0.0.7:27999", EightNpus())


def test_other_transports_need_no_npu() -> None:
    assert npus(load_config({"transfer": {"protocol": "tcp"}})) is None
    assert npus(load_config({"transfer": {"protocol": "rdma"}})) is None


def test_without_the_library_the_error_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIDAL_ASCENDCL", str(tmp_path / "libascendcl.so"))
    with pytest.raises(TidalError, match="libascendcl"):
        npus(load_config({"transfer": {"protocol": "ascend"}}))
