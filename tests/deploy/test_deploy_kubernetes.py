"""The manifests: every resource by Kubernetes' own schema, and all of them by what the daemon needs."""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from daemon.api.auth_middleware import OPEN
from daemon.api.openapi import described
from daemon.config.load import Config, ConfigError, load_config
from daemon.config.tenants_file import read_tenants
from feeds.durations import parse_duration
from metrics.catalogue import BY_NAME
from tests.kit.kustomize import rendered
from tests.kit.prometheus import PrometheusServer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = [path for path in sorted(FOLDER.rglob("*.yaml")) if path.stem not in ("kustomization", "resources")]
VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""The oldest Kubernetes that has all we use (the action `sleep`), and the newest whose schemas are here."""
KEDA = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "keda.sh/v1alpha1"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["scaleTargetRef", "triggers"],
            "properties": {
                "scaleTargetRef": {
                    "additionalProperties": False,
                    "required": ["name"],
                    "properties": {name: {"type": "string"} for name in ("apiVersion", "kind", "name")},
                },
                **{
                    name: {"type": "integer", "minimum": 1}
                    for name in ("minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod")
                },
                "triggers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "additionalProperties": False,
                        "required": ["type", "metadata"],
                        "properties": {
                            "type": {"const": "prometheus"},
                            "name": {"type": "string"},
                            "metricType": {"enum": ["AverageValue", "Value"]},
                            "metadata": {
                                "additionalProperties": False,
                                "required": ["serverAddress", "query", "threshold"],
                                "properties": {
                                    name: {"type": "string"}
                                    for name in (
                                        "serverAddress",
                                        "query",
                                        "threshold",
                                        "activationThreshold",
                                        "ignoreNullValues",
                                    )
                                },
                            },
                        },
                    },
                },
                "advanced": {
                    "additionalProperties": False,
                    "properties": {
                        "horizontalPodAutoscalerConfig": {
                            "additionalProperties": False,
                            "properties": {"behavior": {"type": "object"}},
                        }
                    },
                },
            },
        },
    },
}
"""The part of KEDA's resource that we use; its `behavior` is Kubernetes' own, and validated as that."""


@pytest.fixture(scope="module")
def resources() -> list[dict[str, Any]]:
    """What the example's overlay makes."""
    return rendered(FOLDER / "example")


@pytest.fixture(scope="module")
def find(resources: list[dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The only resource of a kind, or the one of a name."""

    def found(kind: str, name: str = "") -> dict[str, Any]:
        (one,) = [r for r in resources if r["kind"] == kind and name in ("", r["metadata"]["name"])]
        return one

    return found


@pytest.fixture(scope="module")
def pod(find: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = find("StatefulSet")["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return dict(only)


@pytest.fixture
def config(find: Callable[..., dict[str, Any]], container: dict[str, Any], tmp_path: Path) -> Config:
    """As the fourth pod of the set loads it: the ConfigMap's file, and the container's environment."""
    file = tmp_path / "foretick.toml"
    file.write_text(find("ConfigMap")["data"]["foretick.toml"])
    return load_config(file, dict(environment(container, "foretick-3")))


def environment(container: dict[str, Any], name: str) -> Iterator[tuple[str, str]]:
    """The container's variables in a pod of that name; one may name those before it."""
    known: dict[str, str] = {}
    for each in container["env"]:
        if "valueFrom" in each:
            assert each["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
            known[each["name"]] = name
        else:
            known[each["name"]] = re.sub(r"\$\((\w+)\)", lambda m: known[m[1]], each["value"])
    yield from known.items()


def mounted(pod: dict[str, Any], container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The volumes by where they are mounted; those of claims are empty."""
    volumes = {each["name"]: each for each in pod["volumes"]}
    return {each["mountPath"]: volumes.get(each["name"], {}) for each in container["volumeMounts"]}


def validate(resource: dict[str, Any], version: str) -> None:
    """Raises ValidationError of jsonschema."""
    if resource["kind"] != "ScaledObject":
        kubernetes_validate.validate(resource, version, strict=True)
        return
    jsonschema.validate(resource, KEDA)
    spec = resource["spec"]
    behaviour = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    scaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": resource["metadata"],
        "spec": {"scaleTargetRef": spec["scaleTargetRef"], "maxReplicas": 1, "behavior": behaviour},
    }
    kubernetes_validate.validate(scaler, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_valid_before_it_is_rendered(path: Path, version: str) -> None:
    """A StatefulSet's selector comes from the kustomization."""
    for resource in yaml.safe_load_all(path.read_text()):
        if resource["kind"] == "StatefulSet":
            resource["spec"]["selector"] = {}
        validate(resource, version)


@pytest.mark.timeout(960)  # the first of these tests builds Kustomize
@pytest.mark.parametrize("version", VERSIONS)
def test_every_rendered_resource_is_valid(resources: list[dict[str, Any]], version: str) -> None:
    for resource in resources:
        validate(resource, version)
        assert resource["metadata"]["namespace"] == "foretick"


def test_a_key_that_kubernetes_does_not_know_is_found(find: Callable[..., dict[str, Any]]) -> None:
    broken = deepcopy(find("StatefulSet"))
    (container,) = broken["spec"]["template"]["spec"]["containers"]
    container["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(jsonschema.ValidationError):
        validate(broken, VERSIONS[-1])
    scaled = deepcopy(find("ScaledObject"))
    scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleUp"]["policy"] = []
    with pytest.raises(jsonschema.ValidationError):
        validate(scaled, VERSIONS[-1])


def test_each_pod_is_a_member_of_its_own(container: dict[str, Any], config: Config) -> None:
    """By the ordinal; the others find its query socket by the headless service."""
    assert config.source.kafka.instance == "foretick-3"
    assert config.sink.kafka.transactional_id == "foretick-3"
    assert config.query.advertise == "tcp://foretick-3.foretick-daemons:7801"
    assert config.query.forward
    others = dict(environment(container, "foretick-0"))
    assert not set(others.values()) & set(dict(environment(container, "foretick-3")).values())


def test_no_variable_of_a_service_reaches_the_daemon(pod: dict[str, Any]) -> None:
    """Kubernetes makes FORETICK_PORT and others for the Service `foretick`, which are no settings."""
    assert pod["enableServiceLinks"] is False
    with pytest.raises(ConfigError, match="FORETICK_PORT"):
        load_config(None, {"FORETICK_PORT": "tcp://10.0.0.1:7800"})


def test_the_files_that_the_configuration_names_are_mounted(
    find: Callable[..., dict[str, Any]],
    pod: dict[str, Any],
    container: dict[str, Any],
    config: Config,
    tmp_path: Path,
) -> None:
    volumes, data = mounted(pod, container), find("ConfigMap")["data"]
    assert container["args"] == ["run", "--config", "/etc/foretick/foretick.toml"]
    assert volumes["/etc/foretick"]["configMap"]["name"] == find("ConfigMap")["metadata"]["name"]
    assert Path(config.tenants.file).parent == Path("/etc/foretick")
    (tmp_path / "tenants.toml").write_text(data[Path(config.tenants.file).name])
    assert any(tenant.operator for tenant in read_tenants(str(tmp_path / "tenants.toml")))
    secrets = Path(config.query.secret_key_file).parent
    assert volumes[str(secrets)]["secret"] == {"secretName": "foretick-keys", "defaultMode": 0o440}
    (claim,) = find("StatefulSet")["spec"]["volumeClaimTemplates"]
    state = next(m["mountPath"] for m in container["volumeMounts"] if m["name"] == claim["metadata"]["name"])
    assert config.recovery.path.is_relative_to(state)
    gibibytes = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
    assert config.recovery.max_bytes < gibibytes << 30


def test_only_what_must_be_written_is_writable(pod: dict[str, Any], container: dict[str, Any]) -> None:
    """The image's own variables name what is in the claim."""
    image = (ROOT / "deploy" / "Containerfile").read_text()
    (state,) = re.findall(r"STATE_DIRECTORY=(\S+)", image)
    (cache,) = re.findall(r"FORETICK_CACHE=(\S+)", image)
    assert Path(cache).parent == Path(state)
    writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
    assert writable == {state, "/tmp", "/dev/shm"}
    assert mounted(pod, container)["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def test_pods_are_restricted_as_the_strictest_pod_security_standard_asks(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    (user,) = re.findall(r"^USER (\d+):", (ROOT / "deploy" / "Containerfile").read_text(), re.M)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user)
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False


def test_ports_are_those_of_the_configuration(
    find: Callable[..., dict[str, Any]], container: dict[str, Any], config: Config
) -> None:
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    query_port = int(config.query.endpoint.rpartition(":")[2])
    assert ports == {"http": config.http.port, "query": query_port}
    clients, daemons = find("Service", "foretick"), find("Service", "foretick-daemons")
    for service in (clients, daemons):
        assert all(ports[each["targetPort"]] == each["port"] for each in service["spec"]["ports"])
    assert {each["name"] for each in clients["spec"]["ports"]} == set(ports)
    assert int(config.query.advertise.rpartition(":")[2]) == query_port


def test_services_and_budget_select_the_pods(find: Callable[..., dict[str, Any]]) -> None:
    workload = find("StatefulSet")["spec"]
    labels = workload["template"]["metadata"]["labels"].items()
    headless = find("Service", "foretick-daemons")["spec"]
    selectors = [find("Service", "foretick")["spec"]["selector"], headless["selector"]]
    selectors += [find("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]]
    spread = workload["template"]["spec"]["topologySpreadConstraints"]
    selectors += [each["labelSelector"]["matchLabels"] for each in spread]
    assert all(selector and selector.items() <= labels for selector in selectors)
    assert (workload["serviceName"], headless["clusterIP"]) == ("foretick-daemons", "None")
    assert headless["publishNotReadyAddresses"], "one that drains still answers for its sessions"


def test_probes_tell_starting_from_stuck(container: dict[str, Any], config: Config) -> None:
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/healthz", "readiness": "/readyz", "liveness": "/healthz"}
    served = described()["paths"]
    assert all("get" in served[path] and path in OPEN for path in paths.values())
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"http"}
    assert not config.http.tls_certificate_file, "with TLS the probes need scheme: HTTPS"


def test_a_pod_has_the_time_to_drain(pod: dict[str, Any], container: dict[str, Any], config: Config) -> None:
    """As the systemd unit's: twice the drain, in case a broker does not answer."""
    pause = parse_duration(f"{container['lifecycle']['preStop']['sleep']['seconds']}s")
    grace = parse_duration(f"{pod['terminationGracePeriodSeconds']}s")
    assert grace >= pause + 2 * config.process.drain
    assert config.source.kafka.session_timeout >= 2 * config.process.drain, "or a restart moves partitions"


def test_more_daemons_come_by_freshness_and_load_and_never_by_lag(
    find: Callable[..., dict[str, Any]],
) -> None:
    scaled, workload = find("ScaledObject")["spec"], find("StatefulSet")
    reference = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": workload["metadata"]["name"]}
    assert scaled["scaleTargetRef"] == reference
    assert scaled["minReplicaCount"] == workload["spec"]["replicas"] < scaled["maxReplicaCount"]
    named = [set(re.findall(r"\bforetick_\w+", each["metadata"]["query"])) for each in scaled["triggers"]]
    assert "foretick_freshness_misses_total" in named[0]
    assert "foretick_utilisation_ratio" in named[1]
    assert set.union(*named) <= set(BY_NAME)
    assert not [name for name in set.union(*named) if "lag" in name]


@pytest.mark.prometheus
def test_prometheus_understands_the_queries(
    find: Callable[..., dict[str, Any]], start_prometheus: Callable[[str], PrometheusServer]
) -> None:
    prometheus = start_prometheus("127.0.0.1:9")
    misses, load = (each["metadata"]["query"] for each in find("ScaledObject")["spec"]["triggers"])
    assert [float(each["value"][1]) for each in prometheus.query(misses)] == [0.0], "no daemon, none late"
    assert prometheus.query(load) == [], "no daemon: not known, so the number stays"


def test_the_page_applies_files_that_exist_and_makes_what_the_pods_mount(pod: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "scale-out.md").read_text()
    named = re.findall(r"--(?:file|kustomize)[ =](\S+)", text)
    assert {"deploy/Containerfile", "deploy/kubernetes/example"} <= set(named)
    assert all((ROOT / path).exists() for path in named)
    (made, key) = re.findall(r"create secret generic (\S+) .*--from-file=(\S+)", text)[0]
    (keys,) = [each["secret"] for each in pod["volumes"] if "secret" in each]
    assert made == keys["secretName"]
    example = (FOLDER / "example" / "foretick.toml").read_text()
    assert f'/{key}"' in example
    for variable in re.findall(r"^FORETICK_\S+=\S+$", text, re.M):
        load_config(None, dict([variable.split("=", 1)]))


def test_prometheus_of_the_page_gives_the_label_that_the_queries_group_by(
    find: Callable[..., dict[str, Any]],
) -> None:
    (block,) = re.findall(
        r"```yaml\n(scrape_configs.*?)```", (ROOT / "docs" / "scale-out.md").read_text(), re.S
    )
    (job,) = yaml.safe_load(block)["scrape_configs"]
    labels = {each.get("target_label") for each in job["relabel_configs"]}
    queries = "".join(each["metadata"]["query"] for each in find("ScaledObject")["spec"]["triggers"])
    assert set(re.findall(r"by \((\w+)\)", queries)) <= labels
