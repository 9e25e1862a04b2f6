"""What `deploy/` ships: valid by the schemas that there are, and no door open that the pages say is shut."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement

from ensemble_ray.cli.app import make_app
from ensemble_ray.serve.api import MCP_PATH, build_api
from ensemble_ray.serve.app import EndpointOptions
from ensemble_ray.teamfile import load_runnable
from tests.serve.driving import driven
from tests.serve.teams import summaries

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RAY = next(Requirement(each) for each in PROJECT["dependencies"] if Requirement(each).name == "ray")
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OURS = "ensemble_ray.serve.app:app"
#: The version of Kubernetes whose schemas they are held against.
KUBERNETES = "1.34"


def documents(*kinds: str) -> Iterator[dict[str, Any]]:
    """The objects of the manifests, of these kinds."""
    for path in MANIFESTS:
        yield from (
            each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if not kinds or each["kind"] in kinds
        )


def clusters() -> Iterator[dict[str, Any]]:
    """The clusters that KubeRay makes."""
    for each in documents("RayService", "RayJob"):
        yield each["spec"].get("rayClusterConfig") or each["spec"]["rayClusterSpec"]


def templates() -> Iterator[dict[str, Any]]:
    """The templates of all pods."""
    for cluster in clusters():
        yield from (each["template"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]))
    yield from (each["spec"]["submitterPodTemplate"] for each in documents("RayJob"))


def serve_configs() -> Iterator[tuple[str, ServeDeploySchema]]:
    """The configurations of Serve, by where they are."""
    from ray.serve.schema import ServeDeploySchema  # only tests that use it pay for it

    for path in (DEPLOY / "serve.yaml", DEPLOY / "serve-llm.yaml"):
        yield path.name, ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    for each in documents("RayService"):
        yield "RayService", ServeDeploySchema.model_validate(yaml.safe_load(each["spec"]["serveConfigV2"]))


def check_object(each: dict[str, Any]) -> None:
    """Refuse an object that the schemas of Kubernetes do not know."""
    import kubernetes_validate  # only tests that use it pay for it

    kubernetes_validate.validate(each, KUBERNETES, strict=True)


def check_command(words: list[str]) -> None:
    """Refuse what this command line does not take; nothing is carried out."""
    assert Path(words[0]).name == "ensemble-ray"
    group: Any = typer.main.get_command(make_app())
    name, command, rest = group.resolve_command(group.make_context("ensemble-ray", [words[1]]), words[1:])
    command.make_context(name, list(rest))


# Serve.


def test_an_endpoint_beyond_loopback_needs_keys() -> None:
    """S-CLU-90, S-SRV-152: by Serve's own schema and the application's; on loopback the application decides."""
    for where, config in serve_configs():
        (found,) = [each for each in config.applications if each.import_path == OURS]
        options = EndpointOptions.model_validate(found.args)
        assert options.ensembles, where
        if config.http_options.host != "127.0.0.1" or len(config.applications) > 1:
            assert options.keys == "required", where


def test_the_model_on_the_cluster_is_configured_as_its_server_reads_it() -> None:
    """S-CLU-91: by the class of Ray Serve LLM, whose engine is not needed to look at it."""
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig, ModelLoadingConfig

    (described,) = _llm_configs()
    config = LLMConfig.model_validate(described)
    loading = ModelLoadingConfig.model_validate(described["model_loading_config"])
    assert config.accelerator_type
    assert loading.model_source != loading.model_id


def test_the_team_asks_the_model_for_no_more_than_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CLU-91: tokens of a call, and calls at a time, follow from one file to the next."""
    monkeypatch.setenv("MODEL_KEY", "unused")
    (served,) = _llm_configs()
    engine, deployed = served["engine_kwargs"], served["deployment_config"]
    described = yaml.safe_load((DEPLOY / "teams" / "local-model.yaml").read_text(encoding="utf-8"))
    team = load_runnable(str(DEPLOY / "teams" / "local-model.yaml"))
    (endpoint,) = [each for each in _applications("serve-llm.yaml") if each.import_path == OURS]
    limits = EndpointOptions.model_validate(endpoint.args).limits
    assert described["llm"]["model"] == served["model_loading_config"]["model_id"]
    assert described["context_budget"] + described["llm"]["max_tokens"] <= engine["max_model_len"]
    replicas = deployed["autoscaling_config"]["max_replicas"]
    assert team.max_parallel_tasks is not None
    assert limits.max_running * team.max_parallel_tasks <= replicas * engine["max_num_seqs"]
    assert engine["max_num_seqs"] <= deployed["max_ongoing_requests"]
    assert team.max_tokens == limits.max_tokens
    (llm,) = [each for each in _applications("serve-llm.yaml") if each.import_path != OURS]
    assert f"{llm.route_prefix}/v1" in described["llm"]["base_url"]


def _applications(where: str) -> list[Any]:
    return next(config for name, config in serve_configs() if name == where).applications


def _llm_configs() -> list[dict[str, Any]]:
    (llm,) = [each for each in _applications("serve-llm.yaml") if each.import_path != OURS]
    return list(llm.args["llm_configs"])


# Kubernetes.


def test_objects_of_kubernetes_are_valid() -> None:
    """S-CLU-92: by its own schemas, with no field that they do not know."""
    for each in documents("Ingress", "NetworkPolicy"):
        check_object(each)


@pytest.mark.parametrize("template", list(templates()))
def test_pods_are_valid_and_have_no_rights(template: dict[str, Any]) -> None:
    """S-CLU-92: no root, no capability, no token of the cluster's API, bounds of memory and processors."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", **template["metadata"]},
        "spec": template["spec"],
    }
    check_object(pod)
    assert template["spec"]["automountServiceAccountToken"] is False
    volumes = {each["name"] for each in template["spec"].get("volumes", ())}
    for container in template["spec"]["containers"]:
        assert container["image"] == f"ensemble-ray:{PROJECT['version']}"
        context = container["securityContext"]
        assert (context["runAsNonRoot"], context["allowPrivilegeEscalation"]) == (True, False)
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys() & container["resources"]["requests"].keys()
        assert {each["name"] for each in container.get("volumeMounts", ())} <= volumes
        assert all("value" not in each for each in container.get("env", ()))


def test_clusters_of_kuberay_ask_for_a_token_and_one_version_of_ray() -> None:
    """S-CLU-92."""
    found = list(clusters())
    assert len(found) == 2
    for cluster in found:
        assert cluster["authOptions"] == {"mode": "token"}
        assert RAY.specifier.contains(cluster["rayVersion"])
        for group in cluster["workerGroupSpecs"]:
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert {each["apiVersion"] for each in documents("RayService", "RayJob")} == {"ray.io/v1"}


def test_the_network_lets_nobody_in_but_whom_it_names() -> None:
    """S-CLU-92: every pod is chosen by a policy; only the endpoint's port is open to the ingress."""
    among, outside = documents("NetworkPolicy")
    for template in templates():
        assert among["spec"]["podSelector"]["matchExpressions"][0]["key"] in template["metadata"]["labels"]
    assert outside["spec"]["ingress"][0]["ports"] == [{"port": 8000}]
    (config,) = [each for where, each in serve_configs() if where == "RayService"]
    assert config.http_options.port == 8000
    for policy in (among, outside):
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        assert all(each["from"] for each in policy["spec"]["ingress"])


def test_the_ingress_has_all_routes_and_nothing_else() -> None:
    """S-CLU-92: those of the OpenAPI document, but for metrics and the drain, and that of MCP; a model on the same port is out of reach."""
    (ingress,) = documents("Ingress")
    (service,) = documents("RayService")
    (rule,) = ingress["spec"]["rules"]
    paths = [(each["pathType"], each["path"]) for each in rule["http"]["paths"]]
    routes = {*build_api(driven(summaries())).openapi()["paths"], "/openapi.json", MCP_PATH} - {
        "/metrics",
        "/drain",
        "/drain/end",
    }
    reached = {route for route in routes if any(_matches(kind, path, route) for kind, path in paths)}
    assert reached == routes
    assert all(any(_matches(kind, path, route) for route in routes) for kind, path in paths)
    assert not any(_matches(kind, path, "/llm/v1/chat/completions") for kind, path in paths)
    named = {each["backend"]["service"]["name"] for each in rule["http"]["paths"]}
    assert named == {f"{service['metadata']['name']}-serve-svc"}
    (host,) = ingress["spec"]["tls"][0]["hosts"]
    (config,) = [each for where, each in serve_configs() if where == "RayService"]
    assert {host, *named} <= set(EndpointOptions.model_validate(config.applications[0].args).allowed_hosts)


def _matches(kind: str, path: str, route: str) -> bool:
    return route == path or (kind == "Prefix" and route.startswith(f"{path}/"))


def test_a_job_runs_a_command_that_there_is() -> None:
    """S-CLU-92: the words of its entrypoint, as this command line takes them."""
    (job,) = documents("RayJob")
    words = shlex.split(job["spec"]["entrypoint"])
    check_command(words)
    mounted = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert words[2].startswith(mounted[0]["mountPath"])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_secrets_that_pods_need_are_made_by_commands_of_the_file(path: Path) -> None:
    """S-CLU-92: by name, and none has its content in a file."""
    text = path.read_text(encoding="utf-8")
    made = set(re.findall(r"create (?:secret generic|configmap) (\S+)", text))
    needed = set(re.findall(r"(?:secretRef|configMap): \{name: (\S+?)\}", text))
    assert needed == made


# Images, services, machines in a cloud.


def _steps() -> Iterator[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(each for each in text.splitlines() if not each.startswith("#")).replace("\\\n", " ")
    for line in filter(str.strip, lines.splitlines()):
        word, _, rest = line.strip().partition(" ")
        yield word, " ".join(rest.split())


def test_the_image_has_this_package_and_no_root() -> None:
    """S-CLU-93: built from the wheel, with extras that there are, of a Ray that fits; the last user is not root."""
    steps = list(_steps())
    assert {word for word, _ in steps} <= {"FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "USER", "CMD"}
    arguments = dict(rest.split("=", 1) for word, rest in steps if word == "ARG")
    assert set(arguments["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys()
    assert RAY.specifier.contains(arguments["RAY_VERSION"])
    wheel = f"dist/{PROJECT['name'].replace('-', '_')}-{PROJECT['version']}-py3-none-any.whl"
    copied = [rest.split()[0] for word, rest in steps if word == "COPY" and not rest.startswith("--from")]
    assert [fnmatch.fnmatch(wheel, each) for each in copied] == [True]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[-2:] == ["*", f"!{copied[0]}"]
    assert [rest for word, rest in steps if word == "USER"] == ["1000:1000"]
    assert [word for word, _ in steps][-2:] == ["USER", "CMD"]
    assert f"ensemble-ray:{PROJECT['version']}" in (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    version = Requirement(f"python{PROJECT['requires-python']}").specifier
    bases = [rest.split()[0] for word, rest in steps if word == "FROM"]
    assert all(version.contains(re.findall(r"python:([\d.]+)", each)[0]) for each in bases)


@pytest.mark.parametrize("step", [rest for word, rest in _steps() if word == "RUN"])
def test_the_image_is_built_by_commands_that_a_shell_can_read(step: str) -> None:
    """S-CLU-93."""
    done = subprocess.run(["bash", "-n", "-c", step], capture_output=True, text=True, check=False)  # noqa: S603, S607  only read, not carried out
    assert not done.stderr


def _unit() -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / "ensemble-ray.service").read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_service_starts_a_command_that_there_is_with_keys_and_without_rights() -> None:
    """S-CLU-94."""
    unit = _unit()
    (command,) = unit["ExecStart"]
    check_command(shlex.split(command))
    assert "--host 127.0.0.1" in command
    assert "--keys required" in command
    assert unit["NoNewPrivileges"] == ["yes"]
    assert unit["CapabilityBoundingSet"] == [""]
    assert unit["User"] == ["ensemble-ray"]
    (environment,) = unit["Environment"]
    assert f"ENSEMBLE_RAY_HOME=/var/lib/{unit['StateDirectory'][0]}" in environment


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd")
def test_the_service_is_valid(tmp_path: Path) -> None:
    """S-CLU-94: by systemd itself; the program is put where this machine has one."""
    text = (DEPLOY / "systemd" / "ensemble-ray.service").read_text(encoding="utf-8")
    program = shlex.split(_unit()["ExecStart"][0])[0]
    copy = tmp_path / "ensemble-ray.service"
    copy.write_text(text.replace(program, sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)  # noqa: S603, S607  it reads a file
    assert (done.returncode, done.stderr) == (0, "")


def test_nodes_in_a_cloud_are_encrypted_and_reached_by_ssh_alone() -> None:
    """S-CLU-95: Ray's ports are open among nodes alone, as the launcher makes the group; ssh is not open to all."""
    cluster = yaml.safe_load((DEPLOY / "cluster-aws.yaml").read_text(encoding="utf-8"))
    (opened,) = cluster["provider"]["security_group"]["IpPermissions"]
    assert (opened["FromPort"], opened["ToPort"]) == (22, 22)
    assert "0.0.0.0/0" not in str(opened["IpRanges"])
    for each in cluster["available_node_types"].values():
        (disk,) = each["node_config"]["BlockDeviceMappings"]
        assert disk["Ebs"]["Encrypted"] is True
        assert each["node_config"]["MetadataOptions"]["HttpTokens"] == "required"
    assert "InstanceMarketOptions" not in cluster["available_node_types"][cluster["head_node_type"]]["node_config"]
