# SPDX-License-Identifier: Apache-2.0
"""The proxy's settings refuse what they cannot use, in words that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tidal_connector.errors import ConfigError
from tidal_connector.proxy.settings import (
    Affinity,
    ProxyConfig,
    Timeouts,
    check_config,
    parse_decode,
    parse_prefill,
    read_config,
)

GOOD = """
listen = "127.0.0.1:8000"
[[prefill]]
engine = "prefill-0"
url = "http://127.0.0.1:8100"
control = "127.0.0.1:7100"
[[decode]]
engine = "decode-0"
url = "http://127.0.0.1:8200"
control = "127.0.0.1:7200"
"""


def read(folder: Path, text: str) -> ProxyConfig:
    file = folder / "proxy.toml"
    file.write_text(text)
    return check_config(read_config(file))


def test_a_good_file_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD)
    assert config.prefill[0].control == "127.0.0.1:7100"
    assert config.decode[0].engine == "decode-0"
    assert config.address() == ("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("control =", "controlx ="), "unknown key 'prefill[0].controlx'; did you mean 'prefill[0].control'?"),
        (("listen =", "lisen ="), "unknown key 'lisen'; did you mean 'listen'?"),
        (('url = "http://127.0.0.1:8200"', "url = 3"), "decode[0].url = 3: expected `str`"),
        (("http://127.0.0.1:8200", "127.0.0.1:8200"), "expected http://host:port"),
        (("127.0.0.1:7100", "7100"), "control = '7100': expected \"host:port\""),
        (("127.0.0.1:7200", "h:x"), "decode 'decode-0': control = 'h:x': expected \"host:port\""),
        (("127.0.0.1:8000", "localhost"), "listen = 'localhost': expected \"host:port\""),
        (("[[decode]]", "[[prefill]]"), "no decode engine; give [[decode]]"),
        (
            ("listen =", 'policy = "fastest"\nlisten ='),
            "policy = 'fastest': expected 'least_tokens' or 'prefix_affinity'",
        ),
        (("listen =", "max_in_flight = 0\nlisten ="), "max_in_flight = 0: expected `int` >= 1"),
        (("listen =", "[affinity]\noverload = 0.5\n#"), "affinity.overload = 0.5: expected `float` >= 1"),
        (("listen =", "[timeouts]\nqueue = 5\n#"), "unknown key 'timeouts.queue'; did you mean 'timeouts.queue_s'?"),
        (("listen =", '[registry]\nurl = "redis://h"\n#'), "registry.url = 'redis://h': expected \"etcd://host:2379\""),
        (("listen =", '[registry]\nurls = "x"\n#'), "unknown key 'registry.urls'; did you mean 'registry.url'?"),
        (("listen =", "[timeouts]\nkeepalive_s = 5.0\n#"), "timeouts.keepalive_s"),
        (("listen =", "listen"), "proxy.toml"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as found:
        read(tmp_path, GOOD.replace(*change))
    assert words in str(found.value)
    assert "\n" not in str(found.value)


def test_an_engine_id_may_be_used_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'decode-0' is named twice"):
        read(tmp_path, GOOD + '[[decode]]\nengine = "decode-0"\nurl = "http://127.0.0.1:1"\n')


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        read_config(tmp_path / "absent.toml")


def test_engines_can_be_given_as_options() -> None:
    prefill = parse_prefill("p=http://h:1,h:2")
    assert (prefill.engine, prefill.url, prefill.control) == ("p", "http://h:1", "h:2")
    assert parse_prefill("p=http://h:1").control == ""
    assert parse_decode("d=http://h:1").url == "http://h:1"
    assert parse_decode("d=http://h:1,h:2").control == "h:2"


@pytest.mark.parametrize("text", ["", "p", "p=", "=http://h:1"])
def test_options_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected ID=URL"):
        parse_prefill(text)
    with pytest.raises(ConfigError, match="expected ID=URL"):
        parse_decode(text)


def test_a_registry_makes_engines_in_the_file_optional_and_they_may_be_mixed(tmp_path: Path) -> None:
    alone = read(tmp_path, 'listen = "[::1]:0"\n[registry]\nurl = "etcd://[::1]:2379"\n')
    assert (alone.prefill, alone.decode) == ((), ())
    assert alone.address() == ("::1", 0)
    mixed = read(tmp_path, GOOD + '[registry]\nurl = "file:///run/tidal"\n')
    assert mixed.registry is not None
    assert len(mixed.prefill) == len(mixed.decode) == 1


def test_engines_may_have_ipv6_addresses(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD.replace("127.0.0.1", "[fd00::7]"))
    assert config.prefill[0].url == "http://[fd00::7]:8100"
    assert config.address() == ("fd00::7", 8000)
    prefill = parse_prefill("p=http://[::1]:8100,[::1]:7100")
    assert (prefill.url, prefill.control) == ("http://[::1]:8100", "[::1]:7100")


def test_every_setting_is_in_the_readme() -> None:
    text = (ROOT / "tidal_connector/proxy/README.md").read_text()
    for table, kind in (("", ProxyConfig), ("timeouts.", Timeouts), ("affinity.", Affinity)):
        missing = [name for name in kind.__struct_fields__ if f"`{table}{name}`" not in text]
        assert missing == [], f"not in the table: {missing}"


def test_the_example_file_holds_what_it_says() -> None:
    text = (ROOT / "configs/proxy.toml").read_text()
    config = check_config(read_config(ROOT / "configs/proxy.toml"))
    fresh = ProxyConfig()
    assert (config.policy, config.retries, config.timeouts) == (fresh.policy, fresh.retries, fresh.timeouts)
    assert (config.max_in_flight, config.max_queue, config.affinity) == (1024, 1024, fresh.affinity)
    assert "# [registry]" in text
