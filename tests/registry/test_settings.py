# SPDX-License-Identifier: Apache-2.0
"""The ``[registry]`` table: what it refuses, and the store that it opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidal_connector.errors import ConfigError
from tidal_connector.registry.etcd_store import EtcdStore
from tidal_connector.registry.file import FileStore
from tidal_connector.registry.memory import MemoryStore
from tidal_connector.registry.settings import (
    NothingThere,
    RegistryConfig,
    check,
    endpoints_of,
    open_store,
    refuse_absent,
)
from tidal_connector.tables import convert_strict


def test_each_url_opens_its_store(tmp_path: Path) -> None:
    kinds = {"memory:": MemoryStore, f"file://{tmp_path}/r": FileStore, "etcd://127.0.0.1:1,[::1]:2379": EtcdStore}
    for url, kind in kinds.items():
        with open_store(RegistryConfig(url=url)) as store:
            assert type(store) is kind


def test_clusters_share_a_directory_and_no_entry(tmp_path: Path) -> None:
    from tidal_connector.registry.base import Put

    one, two = (open_store(RegistryConfig(url=f"file://{tmp_path}", cluster=name)) for name in ("one", "two"))
    with one, two:
        one.write([Put("k", b"")])
        assert two.read("").entries == {}


def test_who_only_reads_is_told_of_a_folder_or_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/r"
    with pytest.raises(NothingThere, match=r"^registry\.url = 'file://.*/r': no such folder; the first agent"):
        refuse_absent(RegistryConfig(url=url))
    assert list(tmp_path.iterdir()) == []
    for name in ("one", "two"):
        open_store(RegistryConfig(url=url, cluster=name)).close()
    refuse_absent(RegistryConfig(url=url, cluster="two"))
    with pytest.raises(NothingThere, match=r"^registry\.cluster = 'nope': no such cluster in .*; there: one, two$"):
        refuse_absent(RegistryConfig(url=url, cluster="nope"))
    assert sorted(each.name for each in (tmp_path / "r").iterdir()) == ["one", "two"]
    refuse_absent(RegistryConfig(url="etcd://127.0.0.1:9"))
    with pytest.raises(ConfigError, match="absolute path"):
        refuse_absent(RegistryConfig(url="file://relative"))


def test_endpoints() -> None:
    assert endpoints_of("etcd://a:1, [::1]:2,10.0.0.5:3/") == [("a", 1), ("::1", 2), ("10.0.0.5", 3)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://x:1"}, r"registry\.url = 'http://x:1': expected \"etcd://"),
        ({"url": ""}, r"registry\.url"),
        ({"url": "etcd://"}, r"registry\.url = ''"),
        ({"url": "etcd://host"}, r"registry\.url = 'host': expected \"host:port\""),
        ({"url": "etcd://::1:2379"}, r"registry\.url = '::1:2379'"),
        ({"url": "file://relative/path"}, "absolute path"),
        ({"url": "memory:", "cluster": "a/b"}, r"registry\.cluster = 'a/b'"),
        ({"url": "memory:", "cluster": ""}, r"registry\.cluster = ''"),
        ({"url": "memory:", "user": "u"}, r"registry\.user is set, but .* is no etcd"),
        ({"url": "etcd://h:1", "user": "u"}, r"registry\.user is set without registry\.password_file"),
        ({"url": "etcd://h:1", "password_file": "p"}, r"registry\.password_file is set without registry\.user"),
        ({"url": "etcd://h:1", "certificate": "c"}, r"registry\.certificate is set without registry\.key"),
        ({"url": "etcd://h:1", "certificate": "c", "key": "k"}, r"without registry\.ca"),
        ({"url": "etcd://h:1", "ca": "none/such.pem"}, r"registry\.ca = 'none/such\.pem': cannot be read \(No such"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(convert_strict(RegistryConfig, settings, "registry"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"url": "memory:", "ttl": 3}, "did you mean 'ttl_s'"),
        ({"url": "memory:", "ttl_s": 0.5}, r"ttl_s = 0\.5"),
        ({"url": "memory:", "ttl_s": "10"}, "ttl_s = '10'"),
        ({}, "url"),
    ],
)
def test_the_table_is_strict(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert_strict(RegistryConfig, table, "serve.toml: registry")


def test_an_empty_file_is_no_password(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("\n")
    with pytest.raises(ConfigError, match="the file is empty"):
        check(RegistryConfig(url="etcd://h:1", user="u", password_file=str(tmp_path / "p")))


def test_a_directory_that_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match=r'registry\.url = "file:///proc/nothing/default": cannot be used'):
        open_store(RegistryConfig(url="file:///proc/nothing"))
