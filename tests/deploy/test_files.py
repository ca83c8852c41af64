"""deploy/ keeps its promises as far as can be seen without a container engine or a cluster."""

import json
import re
import shutil
import subprocess

import pytest

from kvq.formats.names import parse_format
from tests.deploy.files import FOLDER, dashboard_expressions, load, load_all, names_in, rule_expressions
from tests.waiting import HANG_S

GRACE_S = 30
SERVE, VLLM = "kubernetes", "kubernetes/vllm"


def kubernetes(folder: str = SERVE) -> dict[str, dict]:
    """Every document by kind."""
    files = sorted((FOLDER / folder).glob("*.yaml"))
    documents = [doc for file in files for doc in load_all(f"{folder}/{file.name}")]
    return {document["kind"]: document for document in documents if "kind" in document}


def pod(folder: str = SERVE) -> dict:
    return kubernetes(folder)["Deployment"]["spec"]["template"]["spec"]


def test_metric_names_are_read_out_of_expressions():
    text = 'f(0.9, sum by (le, a) (rate(x_bucket{b="c d"}[5m]))) / on (i) group_left (v) (y:z > 0)'
    assert names_in(text) == {"x_bucket", "y:z"}
    assert len(dashboard_expressions()) > 30
    assert len(rule_expressions()) > 12


def test_the_pods_probes_and_end():
    [container] = pod()["containers"]
    ready, live, start = (container[f"{kind}Probe"] for kind in ("readiness", "liveness", "startup"))
    assert ready["initialDelaySeconds"] == 180
    assert "/health/ready" in ready["exec"]["command"]
    assert live["initialDelaySeconds"] == 300
    assert live["httpGet"]["path"] == "/health/live"
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800  # as long as the server waits
    assert f"--grace={GRACE_S}" in container["args"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] >= GRACE_S + pause + 10


def test_vllms_probes_and_end():
    [container] = pod(VLLM)["containers"]
    probes = [container[f"{kind}Probe"] for kind in ("readiness", "liveness", "startup")]
    assert all(probe["httpGet"] == {"path": "/health", "port": "http"} for probe in probes)
    assert probes[2]["periodSeconds"] * probes[2]["failureThreshold"] >= 1800  # large models load long
    assert f"--shutdown-timeout={GRACE_S}" in container["args"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod(VLLM)["terminationGracePeriodSeconds"] >= GRACE_S + pause + 10


def test_vllm_is_given_a_format_of_kvqs_and_its_gpus():
    [container] = pod(VLLM)["containers"]
    options = dict(arg.removeprefix("--").split("=") for arg in container["args"])
    name, _, code = options["kv-cache-dtype"].partition("_")
    assert name == "kvq"
    parse_format(code, 128)
    assert int(options["tensor-parallel-size"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    [key] = [one for one in container["env"] if one["name"] == "VLLM_API_KEY"]
    secret = kubernetes(VLLM)["Secret"]
    assert key["valueFrom"]["secretKeyRef"]["name"] == secret["metadata"]["name"]
    assert key["valueFrom"]["secretKeyRef"]["key"] in secret["stringData"]


@pytest.mark.parametrize("folder", [SERVE, VLLM])
def test_nothing_in_the_pod_is_root_or_may_write_to_its_image(folder):
    assert pod(folder)["securityContext"]["runAsNonRoot"] is True
    for container in pod(folder)["containers"]:
        limits = container["securityContext"]
        assert limits["readOnlyRootFilesystem"] is True
        assert limits["allowPrivilegeEscalation"] is False
        assert limits["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("folder", [SERVE, VLLM])
def test_what_belongs_together_has_one_name(folder):
    found = kubernetes(folder)
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert found[kind]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    volumes = {volume["name"]: volume for volume in pod(folder)["volumes"]}
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == kubernetes()["PersistentVolumeClaim"]["metadata"]["name"]
    for container in pod(folder)["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
    scaler = found["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    assert scaler["metrics"][0]["pods"]["target"]["averageValue"] == "10"
    assert "replicas" not in found["Deployment"]["spec"]  # an apply would undo the autoscaler's choice
    files = set(found["Kustomization"]["resources"])
    assert all((FOLDER / folder / name).is_file() for name in files)
    assert "secret.example.yaml" not in files
    adapted = {rule["name"]["as"] for rule in load(f"{SERVE}/adapter.yaml")["rules"]["custom"]}
    assert {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]} <= adapted


def test_the_pods_keys_are_the_secrets():
    [keys] = [volume for volume in pod()["volumes"] if volume["name"] == "keys"]
    assert keys["secret"]["secretName"] == kubernetes()["Secret"]["metadata"]["name"]


def test_options_in_the_manifests_are_the_commands():
    from kvq.commands.serve import command

    known = {option for parameter in command.params for option in parameter.opts}
    [container] = pod()["containers"]
    compose = load("compose.yaml")["services"]["kvq"]["command"]
    entry = re.search(r"^ENTRYPOINT (.*)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)[1]
    used = [*container["args"], *compose, *json.loads(entry)]
    options = {option.split("=")[0] for option in used if option.startswith("--")}
    assert len(options) >= 6
    assert options <= known


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_an_image_has_no_root_and_no_secret_and_all_it_copies(name):
    text = (FOLDER / name).read_text(encoding="utf8")
    last = re.split(r"^FROM ", text, flags=re.MULTILINE)[-1]
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert last.index("USER") > last.rindex("RUN")
    assert "g++" not in last
    assert not re.search(r"(?i)(token|password|secret|api_key)\s*=", text)
    ignored = (FOLDER / f"{name}.dockerignore").read_text(encoding="utf8").split()
    for source in re.findall(r"^COPY (?:--chmod=\S+ )?((?!--from).*) \S+$", text, re.MULTILINE):
        for path in source.split():
            assert (FOLDER.parent / path).exists(), path
            assert f"!{path}" in ignored, path


def test_the_servers_image_has_its_stages_and_its_probe():
    text = (FOLDER / "Dockerfile").read_text(encoding="utf8")
    assert '"/health/live"' in re.search(r"^HEALTHCHECK .*$", text, re.MULTILINE)[0]
    named = set(re.findall(r" AS (\w+)$", text, re.MULTILINE))
    assert {"builder", "cpu", "cuda", "server"} <= named


def test_compose_starts_what_the_files_describe():
    compose = load("compose.yaml")
    services = compose["services"]
    assert set(services) == {"kvq", "prometheus", "grafana"}
    assert (FOLDER / services["kvq"]["build"]["dockerfile"].removeprefix("deploy/")).is_file()
    for service in services.values():
        assert set(service["secrets"]) <= set(compose["secrets"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (FOLDER / source).exists(), source
            elif not source.startswith("$"):
                assert source in compose["volumes"]
    assert int(services["kvq"]["stop_grace_period"].removesuffix("s")) > GRACE_S
    [scrape] = load("prometheus/prometheus.yml")["scrape_configs"]
    assert scrape["authorization"]["credentials_file"].removeprefix("/run/secrets/") in compose["secrets"]
    assert scrape["static_configs"][0]["targets"] == ["kvq:8000"]


def test_the_dashboard_is_whole():
    board = json.loads((FOLDER / "grafana/kvq.json").read_text(encoding="utf8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    cells = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        mine = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not mine & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= mine
    datasource = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    current = {entry["name"]: entry["current"] for entry in board["templating"]["list"]}
    assert current["datasource"]["value"] == datasource["uid"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_accepts_rules_and_configuration(tmp_path):
    for file in ("rules.yml", "alerts.yml"):
        shutil.copy(FOLDER / "prometheus" / file, tmp_path)
    key = tmp_path / "key"
    key.write_text("x")
    text = (FOLDER / "prometheus/prometheus.yml").read_text(encoding="utf8")
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/metrics_key", str(key)))
    run(["promtool", "check", "config", "prometheus.yml"], tmp_path)
    (tmp_path / "test.yml").write_text((FOLDER.parent / "tests/deploy/alerts_test.yml").read_text())
    run(["promtool", "test", "rules", "test.yml"], tmp_path)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize(("folder", "image"), [(SERVE, "kvq:cuda"), (VLLM, "kvq-vllm:cuda")])
def test_kustomize_accepts_the_manifests(folder, image):
    out = run(["kubectl", "kustomize", "."], FOLDER / folder)
    assert f"image: {image}" in out


def run(command: list[str], folder) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
