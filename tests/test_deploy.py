"""The files in `deploy/` name only commands, options and settings that there are, and leave workers time to stop."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from redis import Redis

import producer.cli
import worker.cli
from contract import server
from contract.ledger import Ledger
from contract.settings import ProducerSettings, WorkerSettings, read
from tests.producer.conftest import run as run  # a fixture
from tests.servers import free_port, running
from worker.intake import Intake

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFEST = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
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
        assert unit(name)["EnvironmentFile"] == ["/etc/dllm/dllm.env"]
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


def test_every_container_and_probe_runs_a_command_that_there_is() -> None:
    seen = 0
    for _, container in containers():
        commands = [container["command"]]
        commands += [
            container[probe]["exec"]["command"] for probe in ("readinessProbe", "livenessProbe") if probe in container
        ]
        for words in commands:
            plain = [word.replace("$(POD_NAME)", "pod") for word in words]
            check(shlex.split(plain[2])[: shlex.split(plain[2]).index("|")] if plain[0] == "sh" else plain)
            seen += 1
    assert seen == 7


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
        if container["name"] in ("producer", "worker"):
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


def test_a_worker_is_ready_when_the_others_know_it(
    redis: Redis,
    ledger: Ledger,
    worker_settings: Callable[..., WorkerSettings],
    run: Callable[..., Any],
    tmp_path: Path,
) -> None:
    _, container = next(one for one in containers() if one[1]["name"] == "worker")
    probe = container["readinessProbe"]["exec"]["command"]
    with Intake(redis, ledger, worker_settings(name="dllm-worker-1")):
        told = run("status", "--json").stdout
    stub = tmp_path / "producer"
    stub.write_text(f"#!/bin/sh\ncat <<'END'\n{told}END\n")
    stub.chmod(0o755)
    codes = []
    for pod in ("dllm-worker-1", "dllm-worker-0", "dllm-worker"):
        path = f"{tmp_path}:{os.environ['PATH']}"
        codes.append(subprocess.run(probe, env={"PATH": path, "POD_NAME": pod}).returncode)
    assert codes == [0, 1, 1]


# Documents


def test_every_file_that_the_guide_names_is_there() -> None:
    names = set(re.findall(r"deploy/(?:systemd|kubernetes)[a-z./*-]*", OPERATIONS))
    assert "deploy/kubernetes.yaml" in names
    for name in names:
        assert list(ROOT.glob(name.rstrip("/."))), name
    for name in re.findall(r"systemctl \S+(?: --now)? ((?:dllm-\S+ ?)+)", OPERATIONS):
        for one in name.split():
            assert (DEPLOY / "systemd" / f"{re.sub(r'@.*', '@', one)}.service").exists(), one
