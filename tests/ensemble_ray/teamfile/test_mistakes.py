"""What is wrong with a file is told with file, line and column, all of it at once, with the nearest known name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import ValidationError
from ensemble_ray.teamfile import load_ensemble
from tests.ensemble_ray.teamfile.conftest import Load, Refused

TASKS = "tasks: {t: {description: d}}\n"


def test_all_problems_are_named_when_there_are_several(refused: Refused) -> None:
    """Unknown keys, agents, tools, tasks, workflows: each with its place and the nearest known name."""
    lines = refused(
        """\
llm: local
workflow: paralel
agents:
  writer:
    role: Writer
    gaol: Write
    tools: [calculater]
tasks:
  draft:
    description: Write
    agent: writr
    context: [fact]
  facts: {description: Find, expectedoutput: x}
"""
    )
    assert lines[0] == "team.yaml has 6 problems:"
    assert [line.partition(" ")[0] for line in lines[1:]] == [
        *("team.yaml:2:11:", "team.yaml:6:5:", "team.yaml:7:13:", "team.yaml:11:12:", "team.yaml:12:15:"),
        "team.yaml:13:30:",
    ]
    nearest = ("parallel", "goal", "calculator", "writer", "facts", "expected_output")
    for line, name in zip(lines[1:], nearest, strict=True):
        assert f"Did you mean '{name}'?" in line


#: Texts of files that are refused, and what is said of them.
MISTAKES = [
    ("", "team.yaml:1:1: the file is empty"),
    ("- a\n", "team.yaml:1:1: a team file is a mapping"),
    ("llm: local\n", "team.yaml:1:1: a team needs the key 'tasks'"),
    ("tasks: {}\n", "team.yaml:1:1: tasks: there must be at least one task"),
    ("a: [1\nb: 2\n", "team.yaml:2:2: not valid YAML"),
    ("tasks:\n\tt: 1\n", "team.yaml:2:1: not valid YAML"),
    ("llm: local\nllm: local\n" + TASKS, "team.yaml:2:1: llm: duplicate key; the first one is in line 1"),
    ("llm: !!python/object:os.system x\n" + TASKS, "team.yaml:1:6: llm: the tag '!!python/object:os.system'"),
    ("llm: !mine x\n" + TASKS, "team.yaml:1:6: llm: the tag '!mine' is not allowed"),
    ("a: &a [*a]\n" + TASKS, "team.yaml:1:4: a[0]: the alias contains itself"),
    ("llm: local\n---\nllm: local\n", "team.yaml:2:1: not valid YAML"),
    ("llm: local\nverbose: maybe\n" + TASKS, "team.yaml:2:10: verbose: must be true or false"),
    ("llm: local\ntasks: {t: {description: 5}}\n", 'must be text: put it in quotes, "5"'),
    ("llm: local\nmax_parallel_tasks: 0\n" + TASKS, "team.yaml:2:21: max_parallel_tasks: Ensemble max_parallel"),
    ("llm: opnai:x\n" + TASKS, "team.yaml:1:6: llm: Unknown llm 'opnai:x'. Known: ["),
    ("llm: {model: m, temprature: 0}\n" + TASKS, "Did you mean 'temperature'?"),
    ("llm: {model: m, api_key: sk-1}\n" + TASKS, "a key does not belong in a file"),
    ("llm: {model: m, api_key_env: NOT_THERE}\n" + TASKS, "the environment variable 'NOT_THERE' is not set"),
    ("llm: {model: local, base_url: 'http://x'}\n" + TASKS, "models on this machine have no 'base_url'"),
    ("llm: {model: local, structured_outputs: true}\n" + TASKS, "this machine have no 'structured_outputs'"),
    ("llm: {model: m, slots: 2}\n" + TASKS, "models behind an endpoint have no 'slots'"),
    ("agents: {a: {goal: g}}\n" + TASKS, "team.yaml:1:10: agents.a: it has no llm"),
    ("llm: local\nagents: [{goal: g}]\n" + TASKS, "each agent of a list needs the key 'name'"),
    ("llm: local\ntasks: [{name: a, description: d}, {name: a, description: d}]\n", "two tasks are named 'a'"),
    ("llm: local\ntasks: {a: {description: d, context: [a]}}\n", "in a circle: a -> a"),
    ("llm: local\ntasks: {t: {description: d, max_iterations: 0}}\n", "Task max_iterations must be > 0 when set"),
    ("llm: local\ntasks: {t: {description: d, tools: [{file_read: {}}]}}\n", "needs the key 'base_dir'"),
    ("llm: local\ntasks: {t: {description: d, tools: [{file_read: {base_dir: x}}]}}\n", "must be an existing"),
    ("llm: local\ntasks: {t: {description: d, tools: [a, b, c: 1]}}\n", "unknown tool 'a'"),
    ("llm: local\ntasks: {t: {description: d, handler: nowhere:f}}\n", "There is no module 'nowhere'"),
    ("llm: local\ntasks: {t: {description: d, output_type: os:sep}}\n", "'os:sep' is a str, and not a type"),
    ("llm: local\nrate_limit: {requests: 0, period: 1}\n" + TASKS, "RateLimit requests must be > 0, got: 0"),
    ("llm: local\ninputs: {a: [1]}\n" + TASKS, "team.yaml:2:13: inputs.a: must be a text, a number"),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES)
def test_the_place_is_named_when_a_file_is_wrong(refused: Refused, text: str, expected: str) -> None:
    """Each kind of mistake ends in one clear line."""
    message = "\n".join(refused(text))
    assert expected in message
    assert message.startswith("team.yaml")


def test_a_circle_is_shown_when_tasks_wait_for_each_other(refused: Refused) -> None:
    """Names in order, the first one again at the end; tasks that only hang on it are not named."""
    lines = refused(
        "llm: local\ntasks:\n"
        "  a: {description: d, context: [c]}\n"
        "  b: {description: d, context: [a]}\n"
        "  c: {description: d, context: [b]}\n"
        "  d: {description: d, context: [a]}\n"
    )
    assert lines == ["team.yaml:3:33: tasks.a.context: the tasks wait for each other in a circle: a -> c -> b -> a"]


def test_values_that_only_aliases_make_large_are_refused(refused: Refused) -> None:
    """A few lines of aliases of aliases stand for billions of values; they are not built."""
    levels = "".join(f"x{n}: &x{n} [{', '.join(f'*x{n - 1}' for _ in range(10))}]\n" for n in range(1, 10))
    text = f"x0: &x0 [1]\n{levels}llm: {{model: m, extra_body: {{a: *x9}}}}\n{TASKS}"
    assert any("more than 10000 values" in line for line in refused(text))


@pytest.mark.parametrize("number", ["9" * 5000, "1:" + "59:" * 5000 + "1", "0x" + "f" * 5000])
def test_number_is_refused_when_it_is_very_long(refused: Refused, number: str) -> None:
    """S-SEC-23: one of many digits takes time in proportion to their square, and cannot be shown."""
    told = "".join(refused(f"llm: local\nparallel_tasks: {number}\n{TASKS}"))
    assert "parallel_tasks: a number has at most 400 characters" in told


def test_deep_nesting_is_refused(refused: Refused) -> None:
    """No recursion of ours or the parser's reaches the user."""
    assert refused("a: " + "[\n" * 5_000) == ["team.yaml:1:1: nested too deeply"]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("taem.yaml", "There is no file 'taem.yaml'. Did you mean 'team.yaml'?"),
        ("no/such/team.yaml", "There is no directory 'no/such' either"),
        ("team", "'team' is neither a YAML file (name.yaml) nor module:attribute. Did you mean 'team.yaml'?"),
        ("my_team.py", "Did you mean 'my_team:team'?"),
        ("latin.yaml", "latin.yaml:2:1: not UTF-8 text"),
        ("folder.yaml", "'folder.yaml' is a directory"),
    ],
)
def test_the_target_is_explained_when_it_names_nothing(load: Load, folder: Path, target: str, expected: str) -> None:
    """A file that is not there, not text, or named in another way."""
    load("llm: local\n" + TASKS)
    (folder / "latin.yaml").write_bytes(b"llm: local\nx: \xe9\n")
    (folder / "folder.yaml").mkdir()
    with pytest.raises(ValidationError) as caught:
        load_ensemble(target)
    assert expected in str(caught.value)
