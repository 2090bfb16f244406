"""The Kubernetes example follows the schemas, agrees with itself and with the daemon's configuration."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from batond.clients.cli import app as batonctl
from batond.daemon.config_load import load_settings
from batond.daemon.front.server import LIVENESS, READINESS

if TYPE_CHECKING:
    from pathlib import Path

NAME = {"app.kubernetes.io/name": "batond"}


@pytest.fixture(scope="module")
def objects(deploy: Path) -> list[dict[str, Any]]:
    """Reads all objects of the example."""
    text = (deploy / "kubernetes" / "batond.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


@pytest.fixture(scope="module")
def by_kind(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Gives the objects that are the only ones of their kind."""
    kinds = [one["kind"] for one in objects]
    return {one["kind"]: one for one in objects if kinds.count(one["kind"]) == 1}


@pytest.fixture(scope="module")
def pod(by_kind: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Gives the specification of the pods."""
    spec: dict[str, Any] = by_kind["StatefulSet"]["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    """Gives the only container of a pod."""
    (one,) = pod["containers"]
    found: dict[str, Any] = one
    return found


def test_it_follows_the_schemas(objects: list[dict[str, Any]]) -> None:
    assert len(objects) == 7
    for one in objects:
        kubernetes_validate.validate(one, "1.31", strict=True)
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_the_schemas_would_find_something(objects: list[dict[str, Any]]) -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**objects[0], "dataa": {}}, "1.31", strict=True)


def test_its_configuration_is_one(
    by_kind: dict[str, dict[str, Any]],
    pod: dict[str, Any],
    container: dict[str, Any],
    bare_environment: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    text = by_kind["ConfigMap"]["data"]["batond.toml"]
    file = tmp_path / "batond.toml"
    file.write_text(text, encoding="utf-8")
    for variable in container["env"]:
        if variable["name"].startswith("BATOND_"):
            bare_environment.setenv(variable["name"], variable.get("value", "redis://:x@redis:6379/0"))
    settings = load_settings(file)
    assert settings.server.require_credentials
    assert settings.queue.url.get_secret_value() == "redis://:x@redis:6379/0"
    assert settings.server.advertise == "$(POD_NAME).batond-each:7431"
    assert pod["terminationGracePeriodSeconds"] >= settings.service.drain_timeout_s + 60
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "config"]
    assert container["args"][-1] == f"{mount['mountPath']}/{next(iter(by_kind['ConfigMap']['data']))}"
    pool = tomllib.loads(text)["engine"]["host_pool_bytes"]
    assert int(pool.removesuffix("GiB")) < int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert pod["enableServiceLinks"] is False  # BATOND_PORT and the like would stop the start.


def test_probes_ask_for_services_that_are_there(container: dict[str, Any]) -> None:
    asked = {kind: container[f"{kind}Probe"]["grpc"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: one["service"] for kind, one in asked.items()} == {
        "startup": LIVENESS,
        "liveness": LIVENESS,
        "readiness": READINESS,
    }
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {one["port"] for one in asked.values()} == {ports["grpc"]}


def test_a_pod_drains_before_it_ends(container: dict[str, Any]) -> None:
    program, flag, address, command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, flag, address) == ("batonctl", "--server", "unix:/run/batond/admin.sock")
    names = [
        one.name or (one.callback.__name__ if one.callback else "") for one in batonctl.registered_commands
    ]
    assert command in names


def test_objects_find_each_other(
    objects: list[dict[str, Any]],
    by_kind: dict[str, dict[str, Any]],
    pod: dict[str, Any],
    container: dict[str, Any],
) -> None:
    stateful = by_kind["StatefulSet"]["spec"]
    assert stateful["template"]["metadata"]["labels"] == NAME
    selectors = [
        stateful["selector"]["matchLabels"],
        by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ]
    selectors.append(by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"])
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    selectors += [service["selector"] for service in services.values()]
    assert selectors == [NAME] * 5
    assert services[stateful["serviceName"]]["clusterIP"] == "None"
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for service in services.values() for port in service["ports"]} <= ports
    rules = by_kind["NetworkPolicy"]["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} <= ports
    assert pod["serviceAccountName"] == by_kind["ServiceAccount"]["metadata"]["name"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in stateful["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_a_pod_has_no_rights_that_are_not_needed(
    pod: dict[str, Any], container: dict[str, Any], deploy: Path
) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    user = pod["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in (deploy / "Containerfile").read_text(encoding="utf-8")
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/run/batond", "/tmp", "/var/cache/batond", "/var/lib/batond"}
