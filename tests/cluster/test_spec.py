# SPDX-License-Identifier: Apache-2.0
"""A cluster's file is read strictly, and its names change exactly when they should."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidal_connector.cluster.agent_settings import to_toml
from tidal_connector.cluster.spec import build_spec, filled, names_of, read_spec, revision_id, slot_of, template_id
from tidal_connector.errors import ConfigError

ROOT = Path(__file__).parents[2]


def given(**cluster: Any) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "group": [
            {"role": "prefill", "count": 2, "nodes": ["a", "b"], "model": "m", "vllm": ["--max-num-seqs", "4"]},
            {"role": "decode", "count": 2, "nodes": ["a", "b"], "model": "m", "tidal": {"offload": "on"}},
        ],
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    found = given()
    *places, last = path.split(".")
    table: Any = found
    for place in places:
        table = table[int(place)] if place.isdigit() else table.setdefault(place, {})
    table[last] = value
    return found


def test_the_example_is_valid() -> None:
    spec = read_spec(ROOT / "configs/cluster.toml")
    assert {group.name for group in spec.group} == {"prefill", "decode"}


def test_the_example_is_valid_with_all_that_it_offers(tmp_path: Path) -> None:
    everything = tmp_path / "cluster.toml"
    text = (ROOT / "configs/cluster.toml").read_text()
    everything.write_text(re.sub(r"(?m)^# ([\w-]+ = )", r"\1", text))
    spec = read_spec(everything)
    assert (spec.cluster.max_restarts, spec.cluster.allow_outage, spec.cluster.probe.expect) == (2, True, "four")
    assert spec.group[0].port == 8100


def test_groups_are_called_after_their_role_and_engines_after_their_group() -> None:
    spec = build_spec(given(), "x")
    found = [msgspec.structs.astuple(slot_of(spec.group[0], number)) for number in range(3)]
    assert found == [("prefill-0", "a", 0), ("prefill-1", "b", 0), ("prefill-2", "a", 1)]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cluster.max_unavailble", 1, "did you mean 'cluster.max_unavailable'?"),
        ("cluster.name", "a b", "cluster.name"),
        ("cluster.max_unavailable", 0, "both 0"),
        ("group", [], "no [[group]]"),
        ("group.0.role", "pre", "expected 'prefill' or 'decode' or 'both'"),
        ("group.1.name", "prefill", "group 'prefill' is there twice"),
        ("group.0.count", 1, "there is one prefill engine, and replacing it would leave none"),
        ("group.0.count", 0, "there are decode engines and no prefill engine"),
        ("group.0.nodes", [], "nodes is empty"),
        ("group.0.nodes", ["a", "a"], "twice"),
        ("group.0.nodes", ["a/b"], "nodes holds 'a/b'"),
        ("group.0.model", "", "give model"),
        ("group.0.command", ["x"], "one of them"),
        ("group.0.vllm", ["--port=1"], "write port = ... instead"),
        ("group.0.vllm", ["--kv-transfer-config", "{}"], "[group.tidal]"),
        ("group.0.vllm", ["--kv_transfer_config={}"], "[group.tidal]"),
        ("group.0.environment", {"A=B": "c"}, "environment holds 'A=B'"),
        ("group.0.tidal", {"control": {"bind": "x:1"}}, "set by each node's agent"),
        ("group.1.cuont", 2, "unknown key 'group[1].cuont'; did you mean 'group[1].count'?"),
        ("group.0.tidal", {"ofload": "on"}, "did you mean 'offload'?"),
        ("group.0.port", 65535, "would be"),
        ("cluster.probe", {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_reason(path: str, value: Any, message: str) -> None:
    settings = changed(path, value)
    if path == "group.0.port":
        settings["group"][0]["count"] = 4
    with pytest.raises(ConfigError) as caught:
        build_spec(settings, "cluster file x")
    assert message in str(caught.value)
    assert str(caught.value).startswith("cluster file x")


def test_ports_that_would_meet_on_one_node_are_refused() -> None:
    settings = changed("group.0.port", 8100)
    settings["group"][1]["control_port"] = 8100
    with pytest.raises(ConfigError, match="control_port of decode-0 and port of prefill-0 would both be 8100"):
        build_spec(settings, "x")
    settings["group"][1]["nodes"] = ["c", "d"]
    build_spec(settings, "x")


def test_one_engine_of_a_role_needs_room_for_another_or_an_outage() -> None:
    for table in ({"max_surge": 1}, {"allow_outage": True}):
        settings = given(**table)
        settings["group"][0]["count"] = settings["group"][1]["count"] = 1
        build_spec(settings, "x")


def test_the_revision_is_the_content_and_the_template_what_an_engine_is_made_of() -> None:
    base = build_spec(given(), "x")
    same = build_spec(copy.deepcopy(given()), "y")
    assert revision_id(base) == revision_id(same)
    assert template_id(base, base.group[0]) == template_id(same, same.group[0])
    for path, value in (("group.0.count", 3), ("group.0.nodes", ["a"]), ("cluster.ready_deadline_s", 5.0)):
        other = build_spec(changed(path, value), "x")
        assert revision_id(other) != revision_id(base)
        assert template_id(other, other.group[0]) == template_id(base, base.group[0])
    for path, value in (
        ("group.0.model", "n"),
        ("group.0.vllm", ["--max-num-seqs", "5"]),
        ("group.0.tidal", {"offload": "on"}),
        ("group.0.environment", {"A": "1"}),
        ("cluster.restart", "again"),
    ):
        other = build_spec(changed(path, value), "x")
        assert template_id(other, other.group[0]) != template_id(base, base.group[0])


def test_where_the_registry_is_does_not_belong_to_the_revision() -> None:
    spec = build_spec(changed("cluster.registry", {"url": "etcd://secret:1"}), "x")
    assert revision_id(spec) == revision_id(build_spec(given(), "x"))


def test_names_in_braces_are_filled_in_and_other_braces_left_alone() -> None:
    spec = build_spec(given(), "x")
    names = names_of(spec.group[0], 3)
    text = {"ASCEND_RT_VISIBLE_DEVICES": "{place}", "other": ['{"json": {"a": 1}}', "{engine}@{node}/{slot}/{group}"]}
    assert filled(text, names) == {
        "ASCEND_RT_VISIBLE_DEVICES": "1",
        "other": ['{"json": {"a": 1}}', "prefill-3@b/3/prefill"],
    }


def test_tables_are_written_as_toml_that_reads_the_same() -> None:
    table = {
        "text": 'a "quote", a \\, a\nline, a tab\t, \x7f, ü, 😀',
        "number": 3,
        "size": 1 << 40,
        "share": 0.25,
        "true": True,
        "list": ["a", {"b": [1, 2]}],
        "table": {"a-b": {"c d": "e"}, "empty": {}},
    }
    assert tomllib.loads(to_toml(table)) == table
    assert tomllib.loads(to_toml({"none": None, "inner": {"none": None}})) == {"inner": {}}
