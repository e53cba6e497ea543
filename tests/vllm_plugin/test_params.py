# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tidal_connector.config import TidalConfig, load_config
from tidal_connector.errors import ParamsError
from tidal_connector.vllm_plugin.params import (
    DecodeLeg,
    Leg,
    PrefillLeg,
    Sabotage,
    decode_params,
    parse_params,
    prefill_params,
    sequential_answer,
    split_address,
)

OPEN = TidalConfig()
PEERS = load_config({"peers": {"prefill-0": "127.0.0.1:7100"}})
TESTING = load_config({"allow_sabotage": True})


def parse(raw: object, config: TidalConfig = OPEN, *, producer: bool = True, consumer: bool = True) -> Leg | None:
    return parse_params(raw, config, producer=producer, consumer=consumer)


def decode(**changes: object) -> dict[str, object]:
    base = {"mode": "push", "role": "decode", "transfer_id": "xfer-1", "prefill_engine": "prefill-0"}
    return {**base, "prefill_control": "127.0.0.1:7100", **changes}


def test_no_params_means_no_transfer() -> None:
    assert parse(None) is None
    assert parse({"do_remote_decode": False, "do_remote_prefill": False}) is None


def test_both_legs_of_the_push_dialect() -> None:
    assert parse({"mode": "push", "role": "prefill", "transfer_id": "xfer-1"}) == PrefillLeg("xfer-1", sequential=False)
    assert parse(decode()) == DecodeLeg("xfer-1", "prefill-0", "127.0.0.1:7100")


def test_what_is_made_for_both_legs_is_what_is_read() -> None:
    assert parse(prefill_params("xfer-1", "decode-0")) == PrefillLeg("xfer-1", sequential=False)
    assert parse(prefill_params("xfer-1")) == PrefillLeg("xfer-1", sequential=False)
    given = DecodeLeg("xfer-1", "prefill-0", "127.0.0.1:7100")
    assert parse(decode_params("xfer-1", "prefill-0", "127.0.0.1:7100")) == given
    assert parse(decode_params("xfer-1", "prefill-0", None), PEERS) == given


def test_an_address_may_come_from_the_settings() -> None:
    without = {k: v for k, v in decode().items() if k != "prefill_control"}
    assert parse(without, PEERS) == DecodeLeg("xfer-1", "prefill-0", "127.0.0.1:7100")


def test_the_sequential_dialect_of_the_toy_proxy() -> None:
    asked = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert parse(asked) == PrefillLeg(None, sequential=True)
    answer = sequential_answer("xfer-2", "prefill-0", "127.0.0.1:7100", 1e9)
    assert parse(answer) == DecodeLeg("xfer-2", "prefill-0", "127.0.0.1:7100")
    assert parse({**answer, "remote_prefill_cached_tokens": 0}) == parse(answer)


def test_ipv6_survives_the_sequential_round_trip() -> None:
    answer = sequential_answer("xfer-2", "prefill-0", "[::1]:7100", 1e9)
    assert answer["remote_host"] == "::1"
    leg = parse(answer)
    assert isinstance(leg, DecodeLeg)
    assert leg.control == "[::1]:7100"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("push", ("object", "str")),
        ([1], ("object", "list")),
        (decode(transferid="x"), ("'transferid'", "did you mean 'transfer_id'")),
        ({"do_remote_decod": True}, ("'do_remote_decod'", "do_remote_decode")),
        (decode(mode="pull"), ("mode = 'pull'", '"push"')),
        (decode(role="boss"), ("role = 'boss'", "prefill", "decode")),
        (decode(transfer_id=7), ("transfer_id = 7", "1 to 128")),
        (decode(transfer_id=""), ("transfer_id = ''",)),
        (decode(transfer_id="a\nb"), ("transfer_id",)),
        (decode(transfer_id="x" * 300), ("transfer_id",)),
        (decode(prefill_engine=None), ("prefill_engine = None",)),
        (decode(prefill_control="nowhere"), ("'nowhere'", "host:port")),
        (decode(prefill_control="h:0"), ("'h:0'",)),
        (decode(prefill_control=5), ("5", "host:port")),
        (decode(prefill_control=None), ("prefill_control is missing", "peers")),
        (decode(sabotage={"layer": 0, "token": 0}), ("sabotage is refused", "allow_sabotage")),
        ({"do_remote_decode": True, "do_remote_prefill": True}, ("both true",)),
        ({"do_remote_decode": "yes"}, ("do_remote_decode = 'yes'", "true or false")),
        ({"do_remote_prefill": True, "remote_engine_id": "p"}, ("remote_host = None",)),
        (
            {"do_remote_prefill": True, "remote_engine_id": "p", "remote_host": "h", "remote_port": True},
            ("True",),
        ),
    ],
)
def test_a_bad_value_gets_one_line_that_names_it(raw: object, words: tuple[str, ...]) -> None:
    with pytest.raises(ParamsError) as caught:
        parse(raw)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("kv_transfer_params")
    for word in words:
        assert word in text


def test_an_engine_that_the_settings_do_not_name_is_unknown() -> None:
    with pytest.raises(ParamsError, match="unknown engine 'prefill-9'; known: prefill-0"):
        parse(decode(prefill_engine="prefill-9"), PEERS)


def test_a_client_cannot_move_a_known_engine_to_another_address() -> None:
    with pytest.raises(ParamsError, match=r"is at 127\.0\.0\.1:7100, not at '10\.0\.0\.1:1'"):
        parse(decode(prefill_control="10.0.0.1:1"), PEERS)


def test_a_role_that_the_engine_does_not_have_is_refused() -> None:
    with pytest.raises(ParamsError, match="only decodes"):
        parse({"do_remote_decode": True}, producer=False)
    with pytest.raises(ParamsError, match="only prefills"):
        parse(decode(), consumer=False)


def test_sabotage_is_a_test_beds_privilege() -> None:
    leg = parse(decode(sabotage={"layer": 1, "token": 9}), TESTING)
    assert isinstance(leg, DecodeLeg)
    assert leg.sabotage == Sabotage(1, 9)
    with pytest.raises(ParamsError, match="sabotage"):
        parse(decode(sabotage={"layer": "x"}), TESTING)


@pytest.mark.parametrize("address", ["", ":1", "h", "h:", "h:x", "h:70000", "::1:5", "[h]:5", "h:²", "h:" + "9" * 5000])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ParamsError, match="host:port"):
        split_address(address)
