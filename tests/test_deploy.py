"""The files in `deploy/` name only commands, options and settings that there are, and leave workers time to stop.

The image is not built, for want of a Docker: its file is linted, what its steps name is there, and the package is
installed from what its context holds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from redis import Redis

import producer.cli
import worker.cli
from contract import server
from contract.settings import ProducerSettings, WorkerSettings, read
from tests.servers import free_port, running

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFEST = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
SETTINGS = {f"DLLM_{name.upper()}" for kind in (ProducerSettings, WorkerSettings) for name in kind.model_fields}
COMMANDS: dict[str, Any] = {
    name: typer.main.get_command(app) for name, app in (("producer", producer.cli.app), ("worker", worker.cli.app))
}
REST_S = 30
"""What a worker needs beyond its grace time: the step that runs, and publishing."""


def unit(name: str) -> dict[str, list[str]]:
    """The values of a unit's settings, whatever section they stand in."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / name).read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def environment(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))


def instructions(text: str = DOCKERFILE) -> list[tuple[str, str]]:
    """The lines of the Dockerfile as instruction and the rest, continued ones joined, comments left out."""
    plain = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", plain)
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def last_stage() -> dict[str, list[str]]:
    """Instruction -> its lines, of the stage that becomes the image."""
    found: dict[str, list[str]] = {}
    for word, rest in instructions():
        found = {} if word == "FROM" else found
        found.setdefault(word, []).append(rest)
    return found


def context() -> list[Path]:
    """What `.dockerignore` lets into the image's context: the names after `!`, but for what the last lines take out."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith(("#", "!"))] == ["*", "**/__pycache__", "**/*.pyc"]
    return [ROOT / line[1:] for line in lines if line.startswith("!")]


def check(words: list[str]) -> None:
    """Is that a command of ours that its parser takes? Anything else is a server's or a shell's."""
    program = Path(words[0]).name
    if program not in COMMANDS:
        assert program in {"valkey-server", "valkey-cli"}, words
        return
    COMMANDS[program].commands[words[1]].make_context(words[1], words[2:])


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each container with the pod that it is of."""
    for document in MANIFEST:
        if document["kind"] in ("Deployment", "StatefulSet"):
            pod = document["spec"]["template"]["spec"]
            yield from ((pod, container) for container in pod["containers"])


def named(kind: str, name: str) -> dict[str, Any]:
    return next(one for one in MANIFEST if (one["kind"], one["metadata"]["name"]) == (kind, name))


# systemd


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_every_unit_starts_a_command_that_there_is(file: Path) -> None:
    (command,) = unit(file.name)["ExecStart"]
    check(shlex.split(command.replace("%i", "0").replace("%H", "host")))


def test_the_environment_of_the_units_holds_settings() -> None:
    given = environment((DEPLOY / "systemd" / "dllm.env").read_text(encoding="utf-8"))
    assert {name for name in given if name.startswith("DLLM_")} <= SETTINGS
    for name in ("dllm-producer.service", "dllm-worker@.service"):
        assert unit(name)["EnvironmentFile"][0] == "/etc/dllm/dllm.env"
        assert given["DLLM_ROOT"] in unit(name)["ReadWritePaths"]


def test_the_values_in_both_environments_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    of_units = environment((DEPLOY / "systemd" / "dllm.env").read_text(encoding="utf-8"))
    of_pods = named("ConfigMap", "dllm")["data"] | {
        "DLLM_REDIS_URL": named("Secret", "dllm-redis")["stringData"]["url"]
    }
    for given in (of_units, of_pods):
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        settings = read(WorkerSettings)
        assert settings.grace_s == float(given["DLLM_GRACE_S"])
        assert str(read(ProducerSettings).root) == "/srv/dllm"


def test_a_worker_has_time_to_stop() -> None:
    given = environment((DEPLOY / "systemd" / "dllm.env").read_text(encoding="utf-8"))
    worker_unit = unit("dllm-worker@.service")
    assert int(worker_unit["TimeoutStopSec"][0]) >= float(given["DLLM_GRACE_S"]) + REST_S
    assert worker_unit["RestartPreventExitStatus"] == ["2"]
    pod = named("StatefulSet", "dllm-worker")["spec"]["template"]["spec"]
    grace_s = float(named("ConfigMap", "dllm")["data"]["DLLM_GRACE_S"])
    assert pod["terminationGracePeriodSeconds"] >= grace_s + REST_S
    serving_s = ProducerSettings.model_fields["serve_grace_s"].default + REST_S
    assert int(unit("dllm-gateway.service")["TimeoutStopSec"][0]) >= serving_s
    gateway = named("Deployment", "dllm-gateway")["spec"]["template"]["spec"]
    assert gateway["terminationGracePeriodSeconds"] >= serving_s


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_a_unit_can_do_no_more_than_it_needs(file: Path) -> None:
    given = unit(file.name)
    assert given["User"] == ["dllm"]
    assert given["CapabilityBoundingSet"] == [""]
    assert given["ProtectSystem"] == ["strict"]
    assert given["UMask"][0] in ("0027", "0077")
    assert ("PrivateDevices" in given) is ("worker" not in file.name)  # its GPUs are devices


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_systemd_understands_every_unit(file: Path, tmp_path: Path) -> None:
    """With programs, mounts and users that are there: those of the units are another machine's."""
    text = re.sub(r"^(ExecStart=)\S+", r"\1/bin/true", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    target = tmp_path / file.name.replace("@.", "@0.")
    target.write_text(text, encoding="utf-8")
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(target)], capture_output=True, text=True
    )
    assert (found.returncode, [line for line in found.stderr.splitlines() if target.name in line]) == (0, [])


def test_the_server_of_the_unit_starts_and_is_safe(tmp_path: Path) -> None:
    (command,) = unit("dllm-valkey.service")["ExecStart"]
    assert unit("dllm-valkey.service")["User"] == ["dllm"]
    configuration, place, folder, *options = shlex.split(command)[1:]
    assert (configuration, place) == ("/etc/dllm/valkey.conf", "--dir")
    assert folder == f"/var/lib/{unit('dllm-valkey.service')['StateDirectory'][0]}"
    safe(tmp_path, [str(DEPLOY / "systemd" / "valkey.conf"), *options])


def safe(folder: Path, options: list[str]) -> None:
    """Does a server with these options keep what it is given?"""
    port = free_port()
    with running(folder / "data", port, *options), Redis(port=port, password="CHANGE-ME") as client:
        server.check(client)
        assert client.config_get("appendonly") == {"appendonly": "yes"}


# Kubernetes


def test_every_container_runs_a_command_that_there_is() -> None:
    for _, container in containers():
        check([word.replace("$(POD_NAME)", "pod") for word in container["command"]])


def test_each_of_ours_is_asked_whether_it_lives_and_can_work() -> None:
    settings = named("ConfigMap", "dllm")["data"]
    ports = {"metrics": int(settings["DLLM_METRICS_PORT"]), "http": ProducerSettings.model_fields["serve_port"].default}
    seen = []
    for _, container in containers():
        if container["name"] == "redis":
            continue
        (port,) = container["ports"]
        assert port["containerPort"] == ports[port["name"]]
        assert port["name"] == ("http" if container["name"] == "gateway" else "metrics")
        for probe, path in (("startup", "/healthz"), ("liveness", "/healthz"), ("readiness", "/readyz")):
            assert container[f"{probe}Probe"]["httpGet"] == {"path": path, "port": port["name"]}
        seen.append(container["name"])
    assert seen == ["producer", "gateway", "worker"]
    assert settings["DLLM_METRICS_HOST"] == "0.0.0.0"  # the node asks from outside the pod


def test_no_container_of_ours_has_rights_that_it_does_not_need() -> None:
    for pod, container in containers():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        if container["name"] != "redis":  # SQLite, and what torch compiles
            assert {"name": "temporary", "mountPath": "/tmp"} in container["volumeMounts"]


def test_policies_and_budgets_are_about_pods_that_there_are() -> None:
    apps = {
        document["spec"]["template"]["metadata"]["labels"]["app"]: document
        for document in MANIFEST
        if document["kind"] in ("Deployment", "StatefulSet")
    }
    policies = {one["metadata"]["name"]: one["spec"] for one in MANIFEST if one["kind"] == "NetworkPolicy"}
    assert policies["dllm-nobody"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    assert allowed(policies["dllm-redis"]) == (["dllm-redis"], 6379)
    (sender,) = policies["dllm-redis"]["ingress"][0]["from"]
    assert set(sender["podSelector"]["matchExpressions"][0]["values"]) == apps.keys() - {"dllm-redis"}
    assert allowed(policies["dllm-gateway"]) == (["dllm-gateway"], 8000)
    assert allowed(policies["dllm-metrics"]) == (["dllm-producer", "dllm-worker"], 9464)
    for budget in (one["spec"] for one in MANIFEST if one["kind"] == "PodDisruptionBudget"):
        pods = apps[budget["selector"]["matchLabels"]["app"]]["spec"]["replicas"]
        assert budget.get("minAvailable", 0) < pods  # or no node could be emptied
        assert budget.get("maxUnavailable", 1) >= 1
    (port,) = named("Service", "dllm-gateway")["spec"]["ports"]
    assert port["targetPort"] == apps["dllm-gateway"]["spec"]["template"]["spec"]["containers"][0]["ports"][0]["name"]


def allowed(policy: dict[str, Any]) -> tuple[list[str], int]:
    """The pods that a policy is about, and the one port that it opens."""
    selector = policy["podSelector"]
    labels = selector.get("matchLabels")
    pods = [labels["app"]] if labels else selector["matchExpressions"][0]["values"]
    (rule,) = policy["ingress"]
    (port,) = rule["ports"]
    return pods, port["port"]


def test_every_variable_is_a_setting_and_every_reference_leads_somewhere() -> None:
    for pod, container in containers():
        for reference in container.get("envFrom", ()):
            assert set(named("ConfigMap", reference["configMapRef"]["name"])["data"]) <= SETTINGS
        for variable in container["env"]:
            assert variable["name"] in SETTINGS or not variable["name"].startswith("DLLM_")
            if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert secret["key"] in named("Secret", secret["name"])["stringData"]
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert named("PersistentVolumeClaim", claim["claimName"])["spec"]["accessModes"] == ["ReadWriteMany"]
        own = {
            claim["metadata"]["name"]
            for one in MANIFEST
            for claim in one.get("spec", {}).get("volumeClaimTemplates", ())
        }
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys() | own
    for document in MANIFEST:
        if document["kind"] in ("Deployment", "StatefulSet"):
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert document["spec"]["selector"]["matchLabels"] == labels
        if document["kind"] == "StatefulSet":
            assert named("Service", document["spec"]["serviceName"])["spec"]["selector"] == labels
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "dllm"


def test_the_root_is_where_the_shared_folder_is_mounted_and_a_worker_has_a_gpu() -> None:
    root = named("ConfigMap", "dllm")["data"]["DLLM_ROOT"]
    for pod, container in containers():
        if container["name"] != "redis":
            assert {"name": "root", "mountPath": root} in container["volumeMounts"]
            assert pod["shareProcessNamespace"] is True
    _, container = next(one for one in containers() if one[1]["name"] == "worker")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_the_address_in_the_secret_is_that_of_the_service() -> None:
    secret = named("Secret", "dllm-redis")["stringData"]
    (port,) = named("Service", "dllm-redis")["spec"]["ports"]
    assert secret["url"] == f"redis://:{secret['password']}@dllm-redis:{port['port']}/0"


def test_the_server_of_the_manifest_starts_and_is_safe(tmp_path: Path) -> None:
    _, container = next(one for one in containers() if one[1]["name"] == "redis")
    options = [word.replace("$(REDISCLI_AUTH)", "CHANGE-ME") for word in container["args"]]
    assert options[:2] == ["--dir", "/data"]
    safe(tmp_path, options[2:])


# The image


def test_the_dockerfile_has_nothing_that_a_linter_complains_of() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("there is no hadolint here")
    found = subprocess.run([hadolint, "--no-color", str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_is_built_on_versions_for_both_kinds_of_device() -> None:
    stages = [rest.split() for word, rest in instructions() if word == "FROM"]
    names = {words[2] for words in stages if len(words) == 3}
    for base, *_ in stages:
        assert base in names | {"torch-${DEVICE}"} or re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    assert {"torch-cuda", "torch-cpu"} <= names
    assert instructions()[0] == ("ARG", "DEVICE=cuda")


def test_what_the_image_is_made_of_is_there_and_in_its_context() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    copied = [rest.split() for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    sources = {source for words in copied for source in words[:-1]}
    assert {ROOT / source for source in sources} == set(context())
    assert all((ROOT / source).exists() for source in sources)
    assert not any(word in ("models", ".git", "batch_inputs", "batch_outputs", "logs", ".redis") for word in sources)
    installs = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    assert all("--mount=type=cache" in one and "--constraint constraints.txt" in one for one in installs)
    extras = re.search(r"\.\[([a-z,]+)\]", installs[-1])
    assert extras
    assert set(extras[1].split(",")) == project["optional-dependencies"].keys() - {"dev", "demo"}
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_every_step_of_the_image_is_shell_that_can_be_read() -> None:
    for word, rest in instructions():
        if word == "RUN":
            step = re.sub(r"^(--mount=\S+ )+", "", rest)
            assert subprocess.run(["bash", "-n", "-c", step]).returncode == 0, step


def test_the_image_runs_as_nobody_in_particular_and_takes_signals_itself() -> None:
    stage = last_stage()
    assert stage["USER"] == ["$UID"]
    assert "UID=1000" in stage["ARG"]
    assert "ENTRYPOINT" not in stage
    check(json.loads(stage["CMD"][0]))  # a list: no shell stands between the signal and the process
    environment = dict(word.split("=", 1) for word in shlex.split(stage["ENV"][0]))
    assert {name for name in environment if name.startswith("DLLM_")} <= SETTINGS
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HEALTH_URL"] == f"http://127.0.0.1:{environment['DLLM_METRICS_PORT']}/healthz"
    assert f"VOLUME {environment['DLLM_ROOT']}" in DOCKERFILE


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_images_health_is_that_of_the_process(status: int, code: int) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    (rest,) = last_stage()["HEALTHCHECK"]
    words = json.loads(rest[rest.index("[") :])
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/healthz"
        found = subprocess.run([sys.executable, *words[1:]], env={"HEALTH_URL": url}, capture_output=True)
    assert found.returncode == code


def test_what_is_installed_from_the_context_is_complete(tmp_path: Path) -> None:
    """As `pip install .` does it, but for what it needs: both commands, and all files that are no modules."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for path in context():
        if path.is_dir():
            shutil.copytree(path, source / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(source)], check=True)
    packages = ("contract", "producer", "worker")
    files = {file.relative_to(source) for package in packages for file in (source / package).rglob("*.*")}
    assert {str(file) for file in files if not (target / file).exists()} == set()
    assert any(file.suffix == ".jsonl" for file in files)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    for command in COMMANDS:
        words = [sys.executable, str(target / "bin" / command), "--help"]
        shown = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert all(name in shown for name in COMMANDS[command].commands)
    words = [sys.executable, str(target / "bin" / "producer"), "init", "--root", str(tmp_path / "root")]
    subprocess.run(words, env=environment, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "root" / "configs" / "worker.yaml").exists()


# Documents


def test_every_file_that_the_guide_names_is_there() -> None:
    names = set(re.findall(r"deploy/(?:systemd|kubernetes|Dockerfile)[a-z./*-]*", OPERATIONS))
    assert {"deploy/kubernetes.yaml", "deploy/Dockerfile"} <= names
    for name in names:
        assert list(ROOT.glob(name.rstrip("/."))), name
    for name in re.findall(r"systemctl \S+(?: --now)? ((?:dllm-\S+ ?)+)", OPERATIONS):
        for one in name.split():
            assert (DEPLOY / "systemd" / f"{re.sub(r'@.*', '@', one)}.service").exists(), one
