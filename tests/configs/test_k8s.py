# SPDX-License-Identifier: Apache-2.0
"""The manifests for Kubernetes fit its schemas, the settings in them, and one another."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tidal_connector.address import parse_address, parse_host
from tidal_connector.cli.doctor.check_network import MOONCAKE_PORTS
from tidal_connector.cli.proxy import _GRACEFUL_S
from tidal_connector.cluster.serving import ServeConfig, read_serve_config
from tidal_connector.config import PageKind, load_config, parse_bytes
from tidal_connector.proxy.app import build_app
from tidal_connector.proxy.settings import ProxyConfig, read_config
from tidal_connector.registry.settings import endpoints_of

FOLDER = Path(__file__).parents[2] / "configs/k8s"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
FILES = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
ROLES = ("prefill", "decode")
VERSIONS = ("1.29", "1.33", "1.37")


def documents() -> Iterator[dict[str, Any]]:
    for name in FILES:
        yield from yaml.safe_load_all((FOLDER / name).read_text())


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = [item for item in documents() if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def workloads() -> list[dict[str, Any]]:
    return [item for item in documents() if item["kind"] in ("StatefulSet", "Deployment")]


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def containers() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for workload in workloads():
        spec = pod(workload)
        name = workload["metadata"]["name"]
        found += [(name, each) for each in (*spec.get("initContainers", ()), *spec["containers"])]
    return found


def engine_settings(role: str) -> ServeConfig:
    return read_serve_config(FOLDER / f"{role}.toml")


def bytes_of(quantity: str) -> int:
    """Kubernetes writes Gi where we write GiB."""
    return parse_bytes("quantity", f"{quantity}B")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FILES)
def test_manifests_fit_the_schemas_of_kubernetes(name: str, version: str) -> None:
    for item in yaml.safe_load_all((FOLDER / name).read_text()):
        kubernetes_validate.validate(item, version, strict=True)


def test_the_schema_check_can_fail() -> None:
    item = one("StatefulSet", "decode")
    pod(item)["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(item, VERSIONS[-1], strict=True)


def test_the_kustomization_takes_every_file() -> None:
    assert sorted(KUSTOMIZATION["resources"]) == FILES
    made = {item["name"]: item["files"] for item in KUSTOMIZATION["configMapGenerator"]}
    for files in made.values():
        assert all((FOLDER / file.rpartition("=")[2]).is_file() for file in files)
    mounted = {
        volume["configMap"]["name"]
        for workload in workloads()
        for volume in pod(workload).get("volumes", ())
        if "configMap" in volume
    }
    assert mounted == set(made)


def test_images_are_placeholders_that_nobody_takes_for_real_ones() -> None:
    known = {item["name"]: item for item in KUSTOMIZATION["images"]}
    assert {container["image"] for _, container in containers()} == set(known)
    for item in known.values():
        assert "REPLACE-ME" in item["newName"]
        assert item["newTag"] != "latest"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed, which renders kustomizations")
def test_what_kustomize_renders_fits_the_schemas_too() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    for item in rendered:
        kubernetes_validate.validate(item, VERSIONS[-1], strict=True)
        assert item["kind"] == "Namespace" or item["metadata"]["namespace"] == KUSTOMIZATION["namespace"]
    assert len(rendered) == len(list(documents())) + len(KUSTOMIZATION["configMapGenerator"])
    settings = [item for item in rendered if item["kind"] == "ConfigMap"]
    assert {name for item in settings for name in item["data"]} == {"engine.toml", "proxy.toml"}


@pytest.mark.parametrize("role", ROLES)
def test_ports_are_those_of_the_settings(role: str) -> None:
    config = engine_settings(role)
    wanted = {
        "http": parse_host("http.bind", config.http.bind)[1],
        "control": parse_address("control.bind", load_config(config.tidal).control.bind)[1],
    }
    container = pod(one("StatefulSet", role))["containers"][0]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == wanted
    assert {port["name"]: port["port"] for port in one("Service", role)["spec"]["ports"]} == wanted
    opened = [port["port"] for rule in one("NetworkPolicy", "engines")["spec"]["ingress"] for port in rule["ports"]]
    assert set(wanted.values()) <= set(opened)
    assert container["command"][:3] == ["tidal", "serve", role]
    assert not {"--host", "--port"} & set(container["args"])  # http.bind says them


def test_the_proxy_s_port_is_that_of_its_settings() -> None:
    port = read_config(FOLDER / "proxy.toml").address()[1]
    container = pod(one("Deployment", "proxy"))["containers"][0]
    assert [each["containerPort"] for each in container["ports"]] == [port]
    assert [each["port"] for each in one("Service", "proxy")["spec"]["ports"]] == [port]
    assert one("NetworkPolicy", "proxy")["spec"]["ingress"] == [{"ports": [{"port": port}]}]


def test_data_ports_are_open_between_our_pods_only() -> None:
    rules = one("NetworkPolicy", "engines")["spec"]["ingress"]
    (rule,) = [rule for rule in rules if any(port.get("endPort") for port in rule["ports"])]
    assert {"port": MOONCAKE_PORTS[0], "endPort": MOONCAKE_PORTS[1]} in rule["ports"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "tidal"}}}]


def test_hugepages_are_those_of_the_pool() -> None:
    pool = load_config(engine_settings("decode").tidal).pool
    spec = pod(one("StatefulSet", "decode"))
    resources = spec["containers"][0]["resources"]
    assert resources["requests"]["hugepages-2Mi"] == resources["limits"]["hugepages-2Mi"]
    assert bytes_of(resources["limits"]["hugepages-2Mi"]) == pool.size
    assert pool.pages is PageKind.HUGETLBFS
    (volume,) = [volume for volume in spec["volumes"] if volume.get("emptyDir", {}).get("medium") == "HugePages-2Mi"]
    (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == volume["name"]]
    assert mount["mountPath"] == pool.path
    assert "cpu" in resources["requests"]  # Kubernetes wants cpu or memory beside hugepages


def test_prefill_needs_no_hugepages() -> None:
    assert "hugepages" not in yaml.safe_dump(one("StatefulSet", "prefill"))
    assert not load_config(engine_settings("prefill").tidal).offloads("kv_producer")


@pytest.mark.parametrize("role", ROLES)
def test_an_engine_has_time_to_drain(role: str) -> None:
    watch = engine_settings(role).supervise
    spec = pod(one("StatefulSet", role))
    assert spec["terminationGracePeriodSeconds"] >= watch.settle_s + watch.drain_s + 30
    (hook,) = [spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]]
    assert re.search(r"--deadline (\d+)", hook)[1] == f"{watch.drain_s:g}"  # type: ignore[index]


def test_a_proxy_has_time_for_its_requests() -> None:
    spec = pod(one("Deployment", "proxy"))
    hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert spec["terminationGracePeriodSeconds"] >= int(hook[1]) + _GRACEFUL_S + 5


@pytest.mark.parametrize("role", ROLES)
def test_the_init_container_writes_settings_that_can_be_used(role: str, tmp_path: Path) -> None:
    spec = pod(one("StatefulSet", role))
    (init,) = spec["initContainers"]
    script = init["args"][0].replace("/etc/tidal", str(tmp_path)).replace("/run/tidal", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    # A registry that refuses at once: the engine must start all the same.
    text = re.sub(r"(?m)^url = .*$", 'url = "etcd://127.0.0.1:9"', (FOLDER / f"{role}.toml").read_text())
    (tmp_path / "engine.toml").write_text(text)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    environment |= {"POD_NAME": f"{role}-1", "POD_IP": "fd00::17", "NODE_NAME": "node-7"}
    done = subprocess.run(
        [*init["command"], script], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "the registry was not reached" in done.stdout
    config = read_serve_config(tmp_path / "run/engine.toml")
    assert (config.engine, config.node, config.http.advertise) == (f"{role}-1", "node-7", "fd00::17")
    assert load_config(config.tidal).control.advertise == "fd00::17"
    written = {each["name"] for each in init["env"]}
    assert {"POD_NAME", "POD_IP", "NODE_NAME"} <= written
    started = spec["containers"][0]["command"]
    assert started[started.index("--config") + 1] == "/run/tidal/engine.toml"


def test_every_part_asks_the_same_registry_and_it_is_the_one_here() -> None:
    urls = {engine_settings(role).registry.url for role in ROLES}  # type: ignore[union-attr]
    given = read_config(FOLDER / "proxy.toml").registry
    assert given is not None
    assert urls == {given.url}
    etcd = one("StatefulSet", "etcd")
    members = [f"etcd-{number}" for number in range(etcd["spec"]["replicas"])]
    service = etcd["spec"]["serviceName"]
    assert endpoints_of(given.url) == [(f"{member}.{service}", 2379) for member in members]
    command = pod(etcd)["containers"][0]["command"]
    cluster = ",".join(f"{member}=http://{member}.{service}:2380" for member in members)
    assert f"--initial-cluster={cluster}" in command
    assert one("Service", service)["spec"]["publishNotReadyAddresses"] is True


def test_every_selector_selects_pods_of_one_workload() -> None:
    labels = {item["metadata"]["name"]: item["spec"]["template"]["metadata"]["labels"] for item in workloads()}
    for item in documents():
        spec = item.get("spec", {})
        if item["kind"] == "Service":
            wanted = spec["selector"]
        elif item["kind"] in ("PodDisruptionBudget", "StatefulSet", "Deployment"):
            wanted = spec["selector"]["matchLabels"]
        else:
            continue
        chosen = [name for name, known in labels.items() if wanted.items() <= known.items()]
        assert chosen == [item["metadata"]["name"]], item["metadata"]["name"]
    budgets = {item["metadata"]["name"] for item in documents() if item["kind"] == "PodDisruptionBudget"}
    assert budgets == set(labels)


def test_stateful_sets_have_a_headless_service() -> None:
    for item in workloads():
        if item["kind"] == "StatefulSet":
            assert one("Service", item["spec"]["serviceName"])["spec"]["clusterIP"] == "None"


def test_probes_ask_ports_and_paths_that_are_there() -> None:
    routes = {getattr(route, "path", "") for route in build_app(ProxyConfig()).routes}
    for workload in workloads():
        for container in pod(workload)["containers"]:
            ports = {port["name"] for port in container["ports"]}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = container[kind]["httpGet"]
                assert asked["port"] in ports
                if workload["metadata"]["name"] == "proxy":
                    assert asked["path"] in routes
            slow, quick = (
                container[kind]["periodSeconds"] * container[kind].get("failureThreshold", 3)
                for kind in ("livenessProbe", "readinessProbe")
            )
            assert slow > 2 * quick  # out of service long before it is killed


def test_pods_have_no_more_rights_than_they_need() -> None:
    for workload in workloads():
        spec = pod(workload)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
    for name, container in containers():
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["capabilities"]["drop"] == ["ALL"]
        assert "memory" in container["resources"]["limits"]


def test_mounts_have_volumes() -> None:
    for workload in workloads():
        spec = pod(workload)
        claims = workload["spec"].get("volumeClaimTemplates", ())
        there = {volume["name"] for volume in spec.get("volumes", ())} | {each["metadata"]["name"] for each in claims}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= there
        assert there == {
            mount["name"]
            for container in (*spec.get("initContainers", ()), *spec["containers"])
            for mount in container["volumeMounts"]
        }
