# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tidal_connector.config import PageKind, Protocol, TidalConfig, load_config, parse_bytes, with_aliases
from tidal_connector.errors import ConfigError


def test_nothing_given_means_the_documented_defaults() -> None:
    config = load_config({})
    assert config == TidalConfig()
    assert config.pool.size == 1 << 30
    assert config.control.bind == "127.0.0.1:0"


def test_a_full_configuration_is_taken_over() -> None:
    config = load_config(
        {
            "offload": "on",
            "pool": {"bytes": "2 GiB", "pages": "2m", "numa": 0, "prefault": False},
            "control": {"bind": "127.0.0.1:7100", "lease_s": 3, "quarantine_s": 0.5},
            "transfer": {"protocol": "rdma", "window": 4},
            "peers": {"prefill-0": "127.0.0.1:7100"},
        }
    )
    assert config.pool.size == 2 << 30
    assert config.pool.pages is PageKind.HUGE_2M
    assert config.transfer.protocol is Protocol.RDMA
    assert config.quarantine_s == 0.5


@pytest.mark.parametrize(("protocol", "seconds"), [("tcp", 120.0), ("rdma", 10.0), ("ascend", 30.0)])
def test_quarantine_follows_the_transport(protocol: str, seconds: float) -> None:
    assert load_config({"transfer": {"protocol": protocol}}).quarantine_s == seconds


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"poool": {}}, ("'poool'", "did you mean 'pool'")),
        ({"pool": {"byte": 1}}, ("'pool.byte'", "did you mean 'pool.bytes'")),
        ({"control": {"xyzzy": 1}}, ("'control.xyzzy'", "known:", "lease_s")),
        ({"pool": {"bytes": "lots"}}, ("pool.bytes = 'lots'", '"2GiB"')),
        ({"pool": {"bytes": 0}}, ("pool.bytes", ">= 1")),
        ({"pool": {"pages": "3m"}}, ("pool.pages = '3m'", "'thp' or 'plain'")),
        ({"control": {"lease_s": -1}}, ("control.lease_s = -1", "> 0")),
        ({"control": {"bind": "here"}}, ("control.bind = 'here'", '"host:port"')),
        ({"control": {"bind": "127.0.0.1:99999"}}, ("control.bind", '"host:port"')),
        ({"peers": {"p": "there"}}, ("peers.p = 'there'", '"host:port"')),
        ({"control": {"lease_s": "soon"}}, ("control.lease_s", "float")),
        ({"transfer": {"window": 99}}, ("transfer.window", "<= 32")),
        ({"offload": "maybe"}, ("offload = 'maybe': expected 'auto' or 'on' or 'off'",)),
        ({"peers": {"p": 1}}, ("peers", "str")),
    ],
)
def test_a_bad_setting_gets_one_line_that_names_it(given: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(given)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("1024", 1024),
        ("1KiB", 1024),
        ("1.5 MiB", 3 << 19),
        ("3gib", 3 << 30),
        ("1TiB", 1 << 40),
        ("9B", 9),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes("x", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1GB", "1 XiB", "0", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="x = "):
        parse_bytes("x", text)


@pytest.mark.parametrize(
    ("text", "advice"), [("64GB", "64GiB"), ("64 g", "64GiB"), ("1.5tb", "1.5TiB"), ("9KB", "9KiB")]
)
def test_a_unit_that_may_mean_either_is_refused_with_the_one_that_is_known(text: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=f'is unknown; write ..B, as in "{advice}"$'):
        parse_bytes("x", text)


def test_offload_by_role_and_setting() -> None:
    assert [load_config({"offload": o}).offloads("kv_both") for o in ("auto", "on", "off", "adaptive")] == [
        False,
        True,
        False,
        True,
    ]


def test_the_selection_cache_is_twice_the_top_k_unless_told() -> None:
    assert load_config({}).selection.slots_for(2048) == 4096
    assert load_config({"selection": {"slots": 2048}}).selection.slots_for(2048) == 2048
    with pytest.raises(ConfigError, match=r"selection.slots = 2047: expected at least the model's index_topk, 2048"):
        load_config({"selection": {"slots": 2047}}).selection.slots_for(2048)
    assert load_config({"selection": {"bytes": "1.5MiB"}}).selection.size == 3 << 19
    with pytest.raises(ConfigError, match=r"selection.bytes = 'much'"):
        load_config({"selection": {"bytes": "much"}})


def test_the_variables_of_tidalcache_stand_in_for_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_aliases({}) == ({}, [])
    monkeypatch.setenv("VLLM_DSA_KV_OFFLOAD", "1")
    monkeypatch.setenv("VLLM_DSA_OFFLOAD_HUGEPAGE_PATH", "/dev/hugepages")
    merged, notes = with_aliases({"pool": {"bytes": "2GiB"}})
    config = load_config(merged)
    assert (config.offload, config.pool.path, config.pool.pages) == ("on", "/dev/hugepages", "hugetlbfs")
    assert config.pool.size == 2 << 30
    assert notes == [
        'VLLM_DSA_KV_OFFLOAD=1 is taken for offload = "on"',
        "VLLM_DSA_OFFLOAD_HUGEPAGE_PATH=/dev/hugepages is taken for pool.path",
    ]
    own = {"offload": "off", "pool": {"path": "/own"}}
    assert with_aliases(own) == (own, [])  # what is said outright counts
    monkeypatch.setenv("VLLM_DSA_KV_OFFLOAD", "yes")
    with pytest.raises(ConfigError, match="VLLM_DSA_KV_OFFLOAD = 'yes': expected 1"):
        with_aliases({})


@pytest.mark.parametrize(
    ("control", "transfer", "host"),
    [
        ({}, {}, "127.0.0.1"),
        ({"bind": "[fd00::1]:7100"}, {}, "fd00::1"),
        ({"bind": "[::]:7100", "advertise": "fd00::1"}, {}, "fd00::1"),
        ({"bind": "[::]:7100", "advertise": "[fd00::1]"}, {}, "fd00::1"),
        ({"bind": "[::]:7100", "advertise": "[fd00::1]:7101"}, {}, "fd00::1"),
        ({"bind": "0.0.0.0:7100", "advertise": "10.0.0.1"}, {}, "10.0.0.1"),
        ({"bind": "0.0.0.0:7100", "advertise": "node-1:7101"}, {}, "node-1"),
        ({"bind": "10.0.0.1:7100"}, {"host": "[fd00::2]"}, "fd00::2"),
        ({"bind": "10.0.0.1:7100"}, {"host": "fd00::2"}, "fd00::2"),
    ],
)
def test_the_data_ports_are_reached_where_the_control_channel_is_unless_told(
    control: dict[str, str], transfer: dict[str, str], host: str
) -> None:
    assert load_config({"control": control, "transfer": transfer}).transfer_host == host


@pytest.mark.parametrize(
    ("control", "transfer", "words"),
    [
        ({"bind": "0.0.0.0:7100"}, {}, r"control\.advertise = None with .*peers cannot connect to 0\.0\.0\.0"),
        ({"bind": "[::]:7100"}, {}, r"peers cannot connect to ::; set control\.advertise"),
        ({}, {"host": "0.0.0.0"}, r"transfer\.host = '0\.0\.0\.0': expected an address"),
        ({}, {"host": "::"}, r"transfer\.host = '::': expected an address"),
        ({}, {"host": "a b"}, r"transfer\.host = 'a b': expected"),
        ({"advertise": ""}, {}, r"control\.advertise = '': expected"),
        ({"advertise": "fd00::1:"}, {}, r"control\.advertise = 'fd00::1:': expected"),
    ],
)
def test_an_address_that_no_peer_can_use_is_refused(
    control: dict[str, str], transfer: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _ = load_config({"control": control, "transfer": transfer}).transfer_host
