"""deploy/kubernetes: the chart and its values, and the manifests for KServe. Templates need helm on PATH."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from deploy.release import IMAGES
from jsonschema import Draft7Validator
from tools.docs.snippets import ROOT

from attention_contract.operations import OPERATIONS
from attention_service.settings import Settings, listed

FOLDER = ROOT / "deploy" / "kubernetes"
CHART = FOLDER / "chart"
TEMPLATES = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
VALUE_FILES = sorted((FOLDER / "values").glob("*.yaml"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
PATHS = {operation.path for operation in OPERATIONS}
SETTINGS = set(Settings.model_fields)

every_value_file = pytest.mark.parametrize("file", VALUE_FILES, ids=lambda file: file.stem)
rendered = pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm")


def read(path):
    return yaml.safe_load(path.read_text())


def merged(default, own):
    """Return values as helm lays them over those of the chart."""
    return {
        name: merged(default[name], own[name])
        if isinstance(default.get(name), dict) and isinstance(own.get(name), dict)
        else own.get(name, default.get(name))
        for name in default | own
    }


def faults(own):
    return list(Draft7Validator(SCHEMA).iter_errors(merged(read(CHART / "values.yaml"), own)))


# ── what needs no helm ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_schema_names_every_value():
    Draft7Validator.check_schema(SCHEMA)
    assert faults({}) == []
    assert set(SCHEMA["properties"]) - {"global"} == set(read(CHART / "values.yaml"))  # helm sets `global` itself
    used = {name for text in TEMPLATES.values() for name in re.findall(r"\.Values\.(\w+)", text)}
    used |= set(re.findall(r"\$values\.(\w+)", TEMPLATES["_helpers.tpl"]))
    assert used == set(read(CHART / "values.yaml"))


@every_value_file
def test_a_value_file_meets_the_schema_and_its_settings_are_the_service_s(file):
    assert faults(read(file)) == []
    settings = read(file).get("settings", {})
    assert set(settings) <= SETTINGS
    Settings(_env_file=None, **settings)


@pytest.mark.parametrize(
    ("values", "at"),
    [
        ({"replica": 2}, []),
        ({"gpus": 2}, ["gpus"]),
        ({"replicas": 0}, ["replicas"]),
        ({"memoryMiB": "4Gi"}, ["memoryMiB"]),
        ({"settings": {"port": 80}}, ["settings"]),
        ({"settings": {"max_queue": [1]}}, ["settings", "max_queue"]),
        ({"store": {"accessMode": "ReadOnlyMany"}}, ["store", "accessMode"]),
        ({"autoscaling": {"kind": "vpa"}}, ["autoscaling", "kind"]),
        ({"monitoring": {"interval": "often"}}, ["monitoring", "interval"]),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused_by_the_schema(values, at):
    assert [list(fault.path) for fault in faults(values)] == [at]


def test_settings_that_the_chart_sets_exist_and_cannot_be_set_twice():
    (helper,) = re.findall(r'define "attention.settings".*?toYaml', TEMPLATES["_helpers.tpl"], re.DOTALL)
    begun, own = (re.search(rf"{name} := dict (.*) -}}}}", helper)[1] for name in (r"\$fixed", r"\$own"))
    fixed = {*re.findall(r'"(\w+)" ["\d]', begun), *re.findall(r'set \$fixed "(\w+)"', helper)}
    changed = {*re.findall(r'"(\w+_budget|log_format)"', own), *re.findall(r'set \$own "(\w+)"', helper)}
    assert fixed == set(SCHEMA["properties"]["settings"]["propertyNames"]["not"]["enum"])
    assert changed == {
        "memory_budget", "host_memory_budget", "log_format", "max_connections_per_address", "allowed_hosts",
    }  # fmt: skip
    assert fixed | changed <= SETTINGS


def test_probes_ask_what_the_service_answers_on_its_health_port():
    (container,) = read(FOLDER / "kserve" / "serving_runtime.yaml")["spec"]["containers"]
    for text in (TEMPLATES["deployment.yaml"], json.dumps(container).replace('"', "")):
        paths = re.findall(r"httpGet: {path: (\S+), port: (\w+)}", text)
        assert [path for path, _ in paths] == ["/health/ready", "/health/ready", "/health/live"]
        assert {path for path, _ in paths} <= PATHS
        assert len({port for _, port in paths} & {"health", "8001"}) == 1
    assert "{name: health, containerPort: 8001}" in TEMPLATES["deployment.yaml"]


def test_the_gauge_by_which_pods_are_added_exists():
    (gauge,) = set(re.findall(r"attention_\w+_requests", TEMPLATES["scaling.yaml"]))
    assert f'"{gauge}"' in (ROOT / "service/attention_service/api/observation/metrics.py").read_text()


def test_images_have_the_names_that_a_release_gives_them():
    assert 'printf "v%s-%s" .Chart.AppVersion (ternary "cuda" "cpu"' in TEMPLATES["deployment.yaml"]
    assert set(IMAGES) == {"cuda", "cpu"}
    assert "attention-service:v{version}-{target}" in (ROOT / "deploy" / "release.py").read_text()


def test_the_runtime_of_kserve_serves_what_its_example_asks_for():
    runtime = read(FOLDER / "kserve" / "serving_runtime.yaml")
    (container,) = runtime["spec"]["containers"]
    environment = {each["name"].removeprefix("ATTENTION_").lower(): each["value"] for each in container["env"]}
    assert set(environment) <= SETTINGS
    settings = Settings(_env_file=None, **environment)
    assert settings.oip
    assert settings.port == container["ports"][0]["containerPort"]
    assert str(settings.models_dir) == "/mnt/models"  # KServe's own path
    model = read(FOLDER / "kserve" / "inference_service.yaml")["spec"]["predictor"]["model"]
    (offered,) = runtime["spec"]["supportedModelFormats"]
    assert (model["runtime"], model["modelFormat"]["name"]) == (runtime["metadata"]["name"], offered["name"])
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]


# ── rendered ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def render(*files, **values):
    """Return what `helm template` makes of value files and more values, by kind and name. Raises AssertionError."""
    command = ["helm", "template", "attention", str(CHART), "--namespace", "research"]
    for file in files:
        command += ["-f", str(file)]
    if values:
        command += ["-f", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [each for each in yaml.safe_load_all(done.stdout) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def pod_of(objects):
    return objects["Deployment", "attention"]["spec"]["template"]["spec"]


def settings_of(objects):
    (container,) = pod_of(objects)["containers"]
    named = {each["name"].removeprefix("ATTENTION_").lower(): each["value"] for each in container["env"]}
    assert len(named) == len(container["env"])
    assert set(named) <= SETTINGS
    return Settings(_env_file=None, **named)


KINDS = {
    "minimal": "Deployment Service",
    "cpu": "Deployment PersistentVolumeClaim Service",
    "gpu": "Deployment PersistentVolumeClaim Service",
    "scale": "BackendTrafficPolicy Deployment HTTPRoute HorizontalPodAutoscaler PodDisruptionBudget Service "
    "ServiceMonitor",
    "keda": "Deployment Ingress Ingress PersistentVolumeClaim ScaledObject Service Service ServiceMonitor",
    "secured": "Deployment NetworkPolicy PersistentVolumeClaim PodDisruptionBudget Service ServiceMonitor",
}
OF_KUBERNETES = {"v1", "apps/v1", "autoscaling/v2", "networking.k8s.io/v1", "policy/v1"}


@rendered
@every_value_file
def test_helm_finds_no_fault(file):
    command = ["helm", "lint", "--strict", str(CHART), "-f", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@rendered
@every_value_file
def test_a_value_file_makes_these_objects(file):
    assert " ".join(sorted(kind for kind, _ in render(file))) == KINDS[file.stem]


@rendered
@every_value_file
@pytest.mark.parametrize("release", ["1.31", "1.34", "1.37"])
def test_kubernetes_knows_every_field(file, release):
    check = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    own = [each for each in render(file).values() if each["apiVersion"] in OF_KUBERNETES]
    assert len(own) >= 2
    for each in own:
        check.validate(each, release, strict=True)


@rendered
@every_value_file
def test_objects_fit_each_other(file):
    objects = render(file)
    deployment, pod = objects["Deployment", "attention"]["spec"], pod_of(objects)
    (container,) = pod["containers"]
    labels = deployment["template"]["metadata"]["labels"].items()
    assert deployment["selector"]["matchLabels"].items() <= labels
    ports = {port["name"] for port in container["ports"]}
    for (kind, _), each in objects.items():
        if kind == "Service":
            assert each["spec"]["selector"].items() <= labels
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports
        if kind in {"HorizontalPodAutoscaler", "ScaledObject"}:
            assert each["spec"]["scaleTargetRef"]["name"] == "attention"
            assert "replicas" not in deployment
        if kind == "ServiceMonitor":
            chosen = each["spec"]["selector"]["matchLabels"].items()
            services = [one for (other, _), one in objects.items() if other == "Service"]
            assert [one["metadata"]["name"] for one in services if chosen <= one["metadata"]["labels"].items()] == [
                "attention"
            ]
        if kind == "Ingress":
            for path in each["spec"]["rules"][0]["http"]["paths"]:
                assert ("Service", path["backend"]["service"]["name"]) in objects
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert pod["enableServiceLinks"] is False


@rendered
@every_value_file
def test_a_pod_has_its_memory_its_share_and_time_to_drain(file):
    objects, values = render(file), merged(read(CHART / "values.yaml"), read(file))
    settings, pod = settings_of(objects), pod_of(objects)
    (container,) = pod["containers"]
    scaling = values["autoscaling"]
    assert settings.replicas == (values["replicas"] if scaling["kind"] == "none" else scaling["maxReplicas"])
    budget = settings.host_memory_budget if values["gpus"] else settings.memory_budget
    share = budget / settings.replicas / 2**20
    assert share == pytest.approx(0.8 * (values["memoryMiB"] - 512), abs=1)
    assert container["resources"]["limits"]["memory"] == f"{values['memoryMiB']}Mi"
    assert container["resources"]["limits"].get("nvidia.com/gpu") == ("1" if values["gpus"] else None)
    assert settings.device == ("cuda" if values["gpus"] else "cpu")
    stops = container["lifecycle"]["preStop"]["sleep"]["seconds"] + settings.drain_seconds
    assert pod["terminationGracePeriodSeconds"] == stops + 10
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= values["startupSeconds"]


@rendered
def test_settings_of_the_values_arrive_as_they_are_written():
    objects = render(settings={"max_body_bytes": 2**30, "memory_budget": "3GiB", "hub": True, "default_wait_s": 0.5})
    settings = settings_of(objects)
    assert (settings.max_body_bytes, settings.memory_budget) == (2**30, 3 * 2**30)
    assert (settings.hub, settings.default_wait_s) == (True, 0.5)
    assert settings_of(render(preStopSeconds=0, drainSeconds=0)).drain_seconds == 0


@rendered
def test_a_service_without_keys_is_reached_by_its_own_names():
    gateway = {"enabled": True, "name": "public", "hosts": ["attention.example"]}
    settings = settings_of(render(keys={"required": False}, gateway=gateway))
    names = "attention attention.research attention.research.svc attention.research.svc.cluster.local attention.example"
    assert settings.require_keys is False
    assert listed(settings.allowed_hosts) == names.split()
    assert settings_of(render()).allowed_hosts == ""


@rendered
def test_calls_of_a_session_and_only_these_pass_the_hash_of_the_ingress():
    objects = render(FOLDER / "values" / "keda.yaml")
    hashed, plain = objects["Ingress", "attention-sessions"], objects["Ingress", "attention"]
    key = "nginx.ingress.kubernetes.io/upstream-hash-by"
    assert hashed["metadata"]["annotations"][key] == "$http_x_session_id"
    assert key not in plain["metadata"]["annotations"]
    patterns = [path["path"] for path in hashed["spec"]["rules"][0]["http"]["paths"]]
    for path in [*PATHS, "/v1/sessions/stream"]:
        real = re.sub(r"{\w+}", "x", path)
        assert any(re.match(pattern, real) for pattern in patterns) == ("session" in path), path


@rendered
def test_calls_of_a_session_reach_its_pod_behind_a_gateway():
    objects = render(FOLDER / "values" / "scale.yaml")
    policy, route = objects["BackendTrafficPolicy", "attention"]["spec"], objects["HTTPRoute", "attention"]
    assert policy["loadBalancer"]["consistentHash"] == {"type": "Header", "header": {"name": "x-session-id"}}
    assert policy["targetRefs"][0]["name"] == route["metadata"]["name"]


@rendered
@pytest.mark.parametrize(
    ("values", "detail"),
    [
        ({"replicas": 2}, "store.accessMode"),
        ({"replicas": 2, "store": {"ephemeral": True}}, "store.ephemeral"),
        ({"autoscaling": {"kind": "hpa"}}, "store.accessMode"),
        ({"autoscaling": {"kind": "keda", "maxReplicas": 1}}, "autoscaling.prometheusAddress"),
        ({"autoscaling": {"minReplicas": 5}}, "autoscaling.maxReplicas"),
        ({"gateway": {"enabled": True}}, "gateway.name"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"gateway": {"enabled": True, "name": "g"}, "ingress": {"enabled": True, "host": "h"}}, "one of the two"),
        ({"settings": {"port": 1}}, "'port'"),
    ],
    ids=str,
)
def test_values_that_do_not_go_together_are_refused_by_name(values, detail):
    with pytest.raises(AssertionError, match=re.escape(detail)):
        render(**values)
