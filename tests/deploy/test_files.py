"""deploy/ keeps its promises as far as can be seen without a container engine or a cluster."""

import http.server
import json
import re
import runpy
import shutil
import subprocess
import threading

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
    assert "/health/ready" in ready["exec"]["command"]
    assert start["exec"] == ready["exec"]
    assert start["periodSeconds"] <= 5  # then a pod is ready; nothing else waits
    assert live["httpGet"]["path"] == "/health/live"
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800  # as long as the server waits
    assert f"--grace={GRACE_S}" in container["args"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] >= GRACE_S + pause + 10


@pytest.mark.parametrize("folder", [SERVE, VLLM])
def test_no_probe_waits_for_a_fixed_time(folder):
    [container] = pod(folder)["containers"]
    for kind in ("readiness", "liveness", "startup"):
        assert "initialDelaySeconds" not in container[f"{kind}Probe"]


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


@pytest.mark.parametrize(
    ("folder", "kind"), [(SERVE, "Deployment"), (SERVE, "Job"), (VLLM, "Deployment")], ids=lambda one: one
)
def test_nothing_in_the_pod_is_root_or_may_write_to_its_image(folder, kind):
    made = kubernetes(folder)[kind]["spec"]["template"]["spec"]
    assert made["securityContext"]["runAsNonRoot"] is True
    for container in made["containers"]:
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
    secret, [container] = kubernetes()["Secret"], pod()["containers"]
    assert keys["secret"]["secretName"] == secret["metadata"]["name"]
    assert {item["key"] for item in keys["secret"]["items"]} <= set(secret["stringData"])
    files = {f"/keys/{item['path']}" for item in keys["secret"]["items"]}
    asked = dict(arg.split("=") for arg in container["args"])
    assert {asked["--api-key-file"], asked["--metrics-key-file"]} == files
    [endpoint] = kubernetes()["PodMonitor"]["spec"]["podMetricsEndpoints"]
    given = endpoint["authorization"]["credentials"]
    assert given == {"name": secret["metadata"]["name"], "key": "metrics_key"}
    scraped = secret["stringData"]["metrics_key"]  # may read metrics and nothing else
    assert scraped in secret["stringData"]["metrics_keys"].splitlines()
    assert scraped not in secret["stringData"]["keys"]


def test_the_volume_is_filled_by_a_job_that_no_policy_holds_back_and_read_by_the_pods(tmp_path):
    """Its script makes the folder appear whole, goes on after a failure, and then only compares."""
    found = kubernetes()
    job = found["Job"]["spec"]["template"]
    assert job["metadata"]["labels"] != found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert "fill.yaml" not in found["Kustomization"]["resources"]  # a finished Job can't be applied again
    [container] = job["spec"]["containers"]
    [volume, _] = job["spec"]["volumes"]
    assert "readOnly" not in volume["persistentVolumeClaim"]
    assert volume["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    [image] = found["Kustomization"]["images"]
    assert container["image"] == f"{image['name']}:{image['newTag']}"
    folder = next(one["value"] for one in container["env"] if one["name"] == "FOLDER")
    assert f"--model={folder}" in pod()["containers"][0]["args"]

    log, models = tmp_path / "log", tmp_path / "models"
    models.mkdir()
    stub(
        tmp_path / "hf",
        f'echo "hf $@" >> {log}; mkdir -p $6/.cache; test -e {tmp_path}/there && touch $6/config.json',
    )
    stub(tmp_path / "kvq", f'echo "kvq $@" >> {log}; test -e ${{@: -1}}/config.json')
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL": "a/b", "REVISION": "main", "FOLDER": f"{models}/m"}
    run_job = [*container["command"], *container["args"]]
    assert subprocess.run(run_job, env=env, check=False, timeout=HANG_S).returncode != 0
    assert [path.name for path in models.iterdir()] == ["m.part"]
    (tmp_path / "there").touch()
    for _ in range(2):
        assert subprocess.run(run_job, env=env, check=False, timeout=HANG_S).returncode == 0
        assert [path.name for path in models.iterdir()] == ["m"]
        assert not (models / "m/.cache").exists()
    assert [line.split(" --local")[0] for line in log.read_text().splitlines()] == [
        *["hf download a/b --revision main"] * 2,
        f"kvq manifest {models}/m.part",
        f"kvq manifest --check {models}/m",
    ]


def test_the_probe_tries_one_key_after_the_other_and_passes_on_what_is_not_about_keys(tmp_path, monkeypatch):
    """A key that was just written to the file counts only once the server has read it again."""
    asked, refusals = [], {"Bearer new": 401, "Bearer broken": 503}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(refusals.get(self.headers["Authorization"], 200))
            self.end_headers()

        def log_message(self, *_):
            pass

    main = runpy.run_path(str(FOLDER / "probe.py"))["main"]
    keys = tmp_path / "keys"
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("KVQ_PROBE_URL", f"http://127.0.0.1:{server.server_port}")
        assert main("/health/live") == 0
        for text, status in [("# a\nnew\nold\n", 0), ("new\n", 1), ("broken\nold", 1), ("# none\n", 1)]:
            keys.write_text(text)
            assert main("/health/ready", str(keys)) == status
        server.shutdown()
    given = [key and key.removeprefix("Bearer ") for _, key in asked]
    assert given == [None, "new", "old", "new", "broken"]


def test_options_in_the_manifests_are_the_commands():
    from kvq.commands.use.serve import command

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


def stub(path, text):
    """A command of that name."""
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run(command: list[str], folder) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
