"""What ``.deploy`` has for Kubernetes, KServe and Ray, against schemas and against what the service knows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from service.http.routes import operations
from service.settings import Settings

DEPLOY = Path(__file__).parents[2] / ".deploy"
KUBERNETES = kubernetes_validate.latest_version()


def documents(*folders: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for folder in folders:
        for file in sorted((DEPLOY / folder).glob("*.yaml")):
            for document in yaml.safe_load_all(file.read_text()):
                yield f"{file.name}:{document['kind']}", document


ALL = dict(documents("kubernetes", "kserve", "ray"))


CUSTOM = ("serving.kserve.io", "keda.sh", "ray.io")
PLAIN = [name for name, document in ALL.items() if document["apiVersion"].partition("/")[0] not in CUSTOM]


def pod(containers: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x"},
        "spec": {"containers": containers, **spec},
    }


@pytest.mark.parametrize("name", [name for name in PLAIN if "bucket" not in name])
def test_kubernetes_takes_it(name: str) -> None:
    kubernetes_validate.validate(ALL[name], KUBERNETES, strict=True)


def test_the_validator_rejects_an_unknown_field() -> None:
    broken = yaml.safe_load(yaml.safe_dump(ALL["fxserve.yaml:Deployment"]))
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessProb"):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_the_patch_for_a_bucket_fits_the_deployment() -> None:
    """Merged as ``kubectl patch`` merges: lists of containers, variables and volumes by name, null takes away."""

    def merged(base: Any, patch: Any) -> Any:
        if isinstance(base, dict) and isinstance(patch, dict):
            both = {key: merged(base.get(key), value) if value is not None else None for key, value in patch.items()}
            return {key: value for key, value in {**base, **both}.items() if value is not None}
        if isinstance(base, list) and isinstance(patch, list) and all("name" in entry for entry in base + patch):
            by_name = {entry["name"]: entry for entry in base}
            return list({**by_name, **{e["name"]: merged(by_name.get(e["name"]), e) for e in patch}}.values())
        return patch

    deployment = merged(ALL["fxserve.yaml:Deployment"], ALL["bucket.yaml:Deployment"])
    kubernetes_validate.validate(deployment, KUBERNETES, strict=True)
    [cache] = [v for v in deployment["spec"]["template"]["spec"]["volumes"] if v["name"] == "cache"]
    assert list(cache) == ["name", "emptyDir"]


def test_the_runtime_of_kserve() -> None:
    """By the fields that KServe documents for ClusterServingRuntime; the containers by Kubernetes' schema."""
    runtime = ALL["runtime.yaml:ClusterServingRuntime"]
    assert runtime["apiVersion"] == "serving.kserve.io/v1alpha1"
    spec = runtime["spec"]
    assert set(spec) <= {"annotations", "labels", "supportedModelFormats", "protocolVersions", "containers", "volumes"}
    assert spec["protocolVersions"] == ["v2"]
    for format in spec["supportedModelFormats"]:
        assert set(format) <= {"name", "version", "autoSelect", "priority"}
        assert isinstance(format["version"], str)
    kubernetes_validate.validate(pod(spec["containers"]), KUBERNETES, strict=True)
    [container] = spec["containers"]
    assert container["name"] == "kserve-container"

    service = ALL["inferenceservice.yaml:InferenceService"]
    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    predictor = service["spec"]["predictor"]
    assert set(predictor) <= {"minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "model"}
    model = predictor["model"]
    assert set(model) <= {"runtime", "modelFormat", "protocolVersion", "storageUri", "env", "resources"}
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {format["name"] for format in spec["supportedModelFormats"]}
    kubernetes_validate.validate(pod([{**container, "env": model["env"]}]), KUBERNETES, strict=True)


def custom_errors(document: dict[str, Any]) -> list[str]:
    """What the CRD of its kind does not allow in ``document``, fields that it does not know included.

    No package carries the CRDs of KServe, KEDA and KubeRay. ``FXSERVE_TEST_CRDS`` names a folder of their YAML files:
    ``config/crd/full`` of kserve, ``config/crd/bases`` of keda and of kuberay's ray-operator.
    """
    folder = os.environ.get("FXSERVE_TEST_CRDS")
    if folder is None:
        pytest.skip("FXSERVE_TEST_CRDS names no folder with the CRDs of KServe, KEDA and KubeRay")
    group, _, version = document["apiVersion"].partition("/")
    for file in Path(folder).glob("*.yaml"):
        spec = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]
        if (spec["group"], spec["names"]["kind"]) == (group, document["kind"]):
            [schema] = [v["schema"]["openAPIV3Schema"] for v in spec["versions"] if v["name"] == version]
            schema["properties"].pop("metadata")
            _close(schema)
            body = {name: value for name, value in document.items() if name != "metadata"}
            return [str(error.message) for error in jsonschema.Draft4Validator(schema).iter_errors(body)]
    raise AssertionError(f"no CRD in {folder} is of {document['kind']}")


def _close(schema: Any) -> None:
    """Forbid fields that ``schema`` does not name, and write what is Kubernetes' own as JSON Schema has it."""
    if isinstance(schema, list):
        for member in schema:
            _close(member)
    elif isinstance(schema, dict):
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("anyOf", None)
            schema["type"] = ["integer", "string"]
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for member in schema.values():
            _close(member)


@pytest.mark.parametrize("name", [name for name in ALL if name not in PLAIN])
def test_the_definition_of_its_kind_takes_it(name: str) -> None:
    assert custom_errors(ALL[name]) == []
    broken = yaml.safe_load(yaml.safe_dump(ALL[name]))
    broken["spec"]["misspelt"] = 1
    assert "misspelt" in str(custom_errors(broken))


def test_scaling_by_keda() -> None:
    """By the fields that KEDA documents; what it asks Prometheus for are metrics that there are."""
    scaled = ALL["keda.yaml:ScaledObject"]
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    spec = scaled["spec"]
    assert set(spec) <= {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "cooldownPeriod", "triggers"}
    assert spec["scaleTargetRef"]["name"] == ALL["fxserve.yaml:Deployment"]["metadata"]["name"]
    known = Path(operations.metrics.__file__).read_text()
    for trigger in spec["triggers"]:
        assert trigger["type"] == "prometheus"
        assert set(trigger["metadata"]) <= {"serverAddress", "query", "threshold", "activationThreshold"}
        assert all(isinstance(value, str) for value in trigger["metadata"].values())
        for metric in re.findall(r"fxserve_(\w+)", trigger["metadata"]["query"]):
            assert f'gauge("{metric}"' in known, metric


def test_the_service_of_kuberay() -> None:
    """By the fields that KubeRay documents; pods by Kubernetes' schema, what Serve reads by Serve's where Ray is."""
    service = ALL["rayservice.yaml:RayService"]
    assert service["apiVersion"] == "ray.io/v1"
    assert set(service["spec"]) == {"serveConfigV2", "rayClusterConfig"}
    cluster = service["spec"]["rayClusterConfig"]
    assert set(cluster) <= {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
    assert set(cluster["headGroupSpec"]) <= {"rayStartParams", "template"}
    for group in cluster["workerGroupSpecs"]:
        assert set(group) <= {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        kubernetes_validate.validate(pod(**group["template"]["spec"]), KUBERNETES, strict=True)
    schema = pytest.importorskip("ray.serve.schema")
    [application] = schema.ServeDeploySchema.model_validate(
        yaml.safe_load(service["spec"]["serveConfigV2"])
    ).applications
    assert application.import_path == "service.cluster.serve:app"
    from service.cluster import serve

    assert serve.app(application.args)


def _pods(value: Any) -> Iterator[dict[str, Any]]:
    """Every ``containers`` list's owner, wherever it is."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for member in value.values():
            yield from _pods(member)
    elif isinstance(value, list):
        for member in value:
            yield from _pods(member)


@pytest.mark.parametrize("name", ALL)
def test_every_setting_and_probe_is_one_of_ours(name: str) -> None:
    settings = {f"FXSERVE_{field.upper()}" for field in Settings.model_fields}
    for spec in _pods(ALL[name]):
        for container in spec["containers"]:
            for variable in container.get("env", []):
                assert variable["name"] in settings or not variable["name"].startswith("FXSERVE_"), variable
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if "httpGet" in container.get(probe, {}):
                    assert container[probe]["httpGet"]["path"] in {
                        "/readyz",
                        "/healthz",
                        "/v2/health/ready",
                        "/v2/health/live",
                    }


def test_a_pod_ends_after_what_it_accepted() -> None:
    spec = ALL["fxserve.yaml:Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    grace = Settings(
        **{name.removeprefix("FXSERVE_").lower(): value for name, value in env.items()}  # type: ignore[arg-type]
    ).grace_period
    waiting = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > grace + waiting
