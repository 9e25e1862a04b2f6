"""`/v1/chat/completions` and `/v1/models`, asked by the real `openai` client over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from ensemble_ray import (
    Agent,
    ChatResponse,
    Ensemble,
    GuardrailResult,
    MapReduceEnsemble,
    Review,
    Task,
    TokenUsage,
    ToolCall,
    ValidationError,
    tool,
)
from ensemble_ray.serve.catalog import served_team
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.testing import ScriptedModel
from tests.serve.gates import Gate
from tests.serve.http_server import served_teams
from tests.serve.teams import mapped, pair


def echo(model: Any, text: str = "Answer {question}", **fields: Any) -> Ensemble:
    """One task, which asks the model one question."""
    return Ensemble(tasks=[Task(name="answer", description=text, expected_output="A line")], llm=model, **fields)


def client(url: str) -> OpenAI:
    """A client that asks as users' clients do."""
    return OpenAI(base_url=url, api_key="any")


def ask(url: str, *messages: tuple[str, str], model: str = "team", **fields: Any) -> Any:
    """Ask a team, and return its completion."""
    said: Any = [{"role": role, "content": content} for role, content in messages]
    with client(url) as asking:
        found = asking.chat.completions.create(model=model, messages=said, **fields)
        return list(found) if fields.get("stream") else found


def content(chunks: Any) -> list[str]:
    """The pieces of text of a streamed answer."""
    pieces = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    return [each for each in pieces if each]


def refusal(url: str, **fields: Any) -> APIStatusError:
    """The error that a request is answered with."""
    with pytest.raises(APIStatusError) as found:
        ask(url, ("user", "Hi"), **fields)
    return found.value


def test_a_team_answers_the_users_message() -> None:
    """S-SRV-100, S-SRV-101, S-SRV-106: the id is the run's, usage is that of all tasks, the header has the id."""
    model = ScriptedModel(ChatResponse(text="42", usage=TokenUsage(7, 3)))
    with served_teams(echo(model)) as url, client(url) as asking:
        raw = asking.chat.completions.with_raw_response.create(
            model="team",
            messages=[{"role": "user", "content": "What is {it}?"}],
            temperature=0.3,
            metadata={"for": "x"},
        )
        found = raw.parse()
        run_id = raw.headers["x-run-id"]
        listed = [each.id for each in asking.models.list()]
        named = asking.models.retrieve("team")
        run = asking.responses.retrieve(run_id)
    assert (found.id, found.object, found.model) == (run_id, "chat.completion", "team")
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "42", "stop")
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (7, 3, 10)
    assert "Answer What is {it}?" in model.calls[0].text
    assert (listed, named.id) == (["team"], "team")
    assert (run.output_text, run.metadata) == ("42", {"for": "x"})


async def test_the_async_client_is_answered_and_streamed_to() -> None:
    """S-SRV-100, S-SRV-120: the same by the async client."""
    gate = Gate("one two three")
    with served_teams(echo(ScriptedModel("done", gate), stream=True)) as url:
        async with AsyncOpenAI(base_url=url, api_key="any") as asking:
            whole = await asking.chat.completions.create(model="team", messages=[{"role": "user", "content": "Hi"}])
            pieces = await asking.chat.completions.create(
                model="team", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            said = ""
            async for each in pieces:
                gate.open()
                said += each.choices[0].delta.content or ""
    assert (whole.choices[0].message.content, said) == ("done", "one two three")


def test_what_was_said_before_is_the_history() -> None:
    """S-SRV-103: all other messages, in their order; parts of texts are one text."""
    model = ScriptedModel(otherwise="fine")
    parts: Any = [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]
    with served_teams(echo(model, "Said: <{history}>. Answer {question}")) as url:
        ask(url, ("system", "Be brief"), ("user", "Hi"), ("assistant", "Hello"), ("user", parts))
        ask(url, ("user", "First"))
    assert "Said: <system: Be brief\n\nuser: Hi\n\nassistant: Hello>. Answer And now?" in model.calls[0].text
    assert "Said: <>. Answer First" in model.calls[1].text


def test_a_team_without_history_gets_the_message_alone() -> None:
    """S-SRV-103."""
    model = ScriptedModel(otherwise="fine")
    with served_teams(echo(model)) as url:
        ask(url, ("user", "SECRET"), ("assistant", "Hello"), ("user", "Now"))
    assert "SECRET" not in model.calls[0].text


def test_chat_input_says_which_variable_takes_the_message() -> None:
    """S-SRV-102: also one that has a value; without it and with several, the error names them."""
    model = ScriptedModel(otherwise="fine")
    chosen = pair(model).replace(chat_input="topic", inputs={"reader": "all", "topic": "none"})
    teams = {
        "chosen": chosen,
        "several": pair(model),
        "half": pair(model).replace(chat_input="topic"),
        "none": mapped(model),
    }
    with served_teams(teams) as url:
        assert ask(url, ("user", "Ray"), model="chosen").choices[0].message.content == "fine"
        errors = [refusal(url, model=name) for name in ("several", "half", "none")]
    assert "Write about Ray" in model.calls[0].text
    assert [(each.status_code, each.code, each.type) for each in errors] == [
        (400, "inputs_missing", "invalid_request_error")
    ] * 3
    assert "needs [topic, reader]" in errors[0].message
    assert "chat_input" in errors[0].message
    assert "needs [reader]" in errors[1].message
    assert "no variable" in errors[2].message


def test_a_chat_input_that_is_no_variable_is_refused_where_the_team_is_loaded() -> None:
    """S-SRV-102."""
    with pytest.raises(
        ValidationError, match=r"chat_input 'tpic' is no variable of its texts. There are: \[topic, reader\]"
    ):
        served_team("team", pair(ScriptedModel()).replace(chat_input="tpic"))


def test_a_team_that_maps_is_asked_by_its_variable() -> None:
    """S-SRV-102: `chat_input` of a map-reduce."""
    model = ScriptedModel(otherwise="fine")
    team = MapReduceEnsemble(
        items=["salt", "kelp"],
        map_task=lambda item: Task(description=f"Read {item} for {{question}}", expected_output="A text"),
        reduce_task=lambda group: Task(description="Join", expected_output="A text", context=group),
        llm=model,
        chat_input="question",
    )
    with served_teams(team) as url:
        assert ask(url, ("user", "Why?")).choices[0].message.content == "fine"
    assert any("Read salt for Why?" in each.text for each in model.calls)


def test_a_failed_team_is_an_error_and_asked_once() -> None:
    """S-SRV-110, S-SRV-111: never an empty answer; the client does not pay twice."""
    model = ScriptedModel(otherwise=ValueError("boom"))
    with served_teams(echo(model)) as url:
        error = refusal(url)
    assert (error.status_code, error.type, error.code) == (502, "server_error", "task_execution_error")
    assert "boom" in error.message
    assert error.response.headers["x-run-id"]
    assert len(model.calls) == 1


def test_a_run_that_waits_for_a_person_is_an_error_that_names_its_gate() -> None:
    """S-SRV-112: and the run goes on waiting."""
    task = Task(description="Answer {question}", expected_output="A line", review=Review.required())
    team = Ensemble(tasks=[task], llm=ScriptedModel(otherwise="a line"), review_wait="detach")
    with served_teams(team) as url, client(url) as asking:
        error = refusal(url)
        run_id = error.response.headers["x-run-id"]
        run = httpx.get(f"{url.removesuffix('/v1')}/runs/{run_id}").json()
        standing = asking.responses.retrieve(run_id)
    assert (error.status_code, error.code) == (409, "run_waiting")
    (gate,) = run["reviews"]
    assert f"at [{gate['gate_id']}]" in error.message
    assert (run["status"], standing.status) == ("waiting", "in_progress")


def test_what_a_team_cannot_do_is_refused_by_its_name() -> None:
    """S-SRV-107, S-SRV-105, S-SRV-216: `n`, tools, logprobs, forms of answers, images; settings of models are passed over."""
    refused: list[tuple[str, Any]] = [
        ("n", 2),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("logprobs", True),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("stop", ["x"]),
        ("stream_options", {"include_usage": True}),
    ]
    model = ScriptedModel(otherwise="fine")
    with served_teams(echo(model)) as url:
        for name, value in refused:
            error = refusal(url, **{name: value})
            assert (error.status_code, error.param, error.code) == (400, name, "unsupported_parameter"), name
            assert name in error.message
        assert not model.calls
        image: Any = [{"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}]
        with pytest.raises(BadRequestError, match=r"messages\[0\].content\[0\]: 'image_url' cannot be passed"):
            ask(url, ("user", image))
        with pytest.raises(BadRequestError, match="'tool'"):
            ask(url, ("user", "Hi"), ("tool", "22"))
        with pytest.raises(BadRequestError, match="no message of the user"):
            ask(url, ("system", "Hi"))
        for messages in ([{"role": "user"}], [{"role": "user", "content": None}], [{"role": "user", "content": []}]):
            found = httpx.post(f"{url}/chat/completions", json={"model": "team", "messages": messages})
            assert (found.status_code, found.json()["error"]["param"]) == (400, "messages[0].content")
        assert not model.calls
        ask(url, ("user", "Hi"), n=1, logprobs=False, response_format={"type": "text"}, max_tokens=5, seed=1, user="me")


def test_an_unknown_model_is_named_beside_those_that_there_are() -> None:
    """S-SRV-100: 404 in the form of this API."""
    with served_teams(echo(ScriptedModel())) as url:
        with pytest.raises(NotFoundError, match=r"no model 'gpt'. There are: \[team\]") as found:
            ask(url, ("user", "Hi"), model="gpt")
        with client(url) as asking, pytest.raises(NotFoundError):
            asking.models.retrieve("gpt")
    assert found.value.code == "model_not_found"


def test_tokens_of_the_last_task_are_streamed() -> None:
    """S-SRV-120, S-SRV-121: those of others and their tools are no content; usage comes last where it is asked for."""
    model = ScriptedModel(
        ChatResponse(text="a long draft", usage=TokenUsage(1, 1)),
        ChatResponse(text="one fine line", usage=TokenUsage(1, 1)),
    )
    team = pair(model).replace(stream=True, chat_input="topic", inputs={"reader": "all"})
    with served_teams(team) as url:
        chunks = ask(url, ("user", "Ray"), stream=True, stream_options={"include_usage": True})
    first, *_, end, usage = chunks
    assert (first.choices[0].delta.role, first.object) == ("assistant", "chat.completion.chunk")
    assert "".join(content(chunks)) == "one fine line"
    assert [each.choices[0].finish_reason for each in chunks[:-1] if each.choices[0].finish_reason] == ["stop"]
    assert end.choices[0].finish_reason == "stop"
    assert (usage.choices, usage.usage.total_tokens) == ([], 4)
    assert all(each.usage is None for each in chunks[:-1])
    assert len({each.id for each in chunks}) == 1


def test_an_answer_that_is_known_at_the_end_comes_in_pieces() -> None:
    """S-SRV-122: where the team does not stream, or its answer is checked before anybody sees it."""
    text = "word " * 100

    def checked(_output: Any) -> GuardrailResult:
        return GuardrailResult.success()

    plain = echo(ScriptedModel(otherwise=text))
    task = Task(description="Answer {question}", expected_output="A line", output_guardrails=[checked])
    guarded = Ensemble(tasks=[task], llm=ScriptedModel(otherwise=text), stream=True)
    assert served_team("guarded", guarded).info.chat.streamed_task is None
    with served_teams({"plain": plain, "guarded": guarded}) as url:
        for name in ("plain", "guarded"):
            pieces = content(ask(url, ("user", "Hi"), model=name, stream=True))
            assert "".join(pieces) == text
            assert 1 < len(pieces) < 10


@tool
def weather(place: str) -> str:
    """Say the weather."""
    return f"rain in {place}"


def test_words_before_a_tool_call_come_before_the_answer() -> None:
    """S-SRV-121: what the tool did is no content."""
    call = ChatResponse(
        text="Let me look.", tool_calls=(ToolCall(id="1", name="weather", arguments='{"place": "Bergen"}'),)
    )
    model = ScriptedModel(call, "It rains.")
    agent = Agent(role="Guide", goal="Help", llm=model, tools=[weather])
    task = Task(description="Answer {question}", expected_output="A line", agent=agent)
    with served_teams(Ensemble(tasks=[task], stream=True)) as url:
        said = content(ask(url, ("user", "Hi"), stream=True))
    assert "".join(said) == "Let me look.\n\nIt rains."


_THINKING = ChatResponse(text="<think>\nPerhaps 41?\n</think>\n\n42", usage=TokenUsage(7, 5, 3))


@pytest.mark.parametrize("streams", [True, False])
def test_reasoning_is_apart_from_the_answer(streams: bool) -> None:  # noqa: FBT001  a case
    """S-LLM-3, S-LLM-6: `reasoning_content` of deltas and messages, streamed or known at the end; its tokens in usage."""
    members = ChatResponse(text="42", reasoning="Perhaps 41?")
    team = echo(ScriptedModel(_THINKING, _THINKING, members, otherwise=_THINKING), stream=streams)
    with served_teams(team) as url:
        whole = ask(url, ("user", "Hi"))
        chunks = ask(url, ("user", "Hi"), stream=True)
        others = ask(url, ("user", "Hi"), stream=True)
        with client(url) as asking:
            response = asking.responses.create(model="team", input="Hi")
            events = list(asking.responses.create(model="team", input="Hi", stream=True))
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == ("42", "Perhaps 41?")
    assert whole.usage.completion_tokens_details.reasoning_tokens == 3
    for each in (chunks, others):
        thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in each]
        assert "".join(thoughts).strip() == "Perhaps 41?"
        assert "".join(content(each)) == "42"
    assert (response.output_text, response.usage.output_tokens_details.reasoning_tokens) == ("42", 3)
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "42"


def test_cached_tokens_are_part_of_the_usage() -> None:
    """S-PRC-3: of completions and responses."""
    cached = ChatResponse(text="42", usage=TokenUsage(7, 5, -1, 4))
    with served_teams(echo(ScriptedModel(cached, cached, ChatResponse(text="42", usage=TokenUsage(7, 5))))) as url:
        assert ask(url, ("user", "Hi")).usage.prompt_tokens_details.cached_tokens == 4
        with client(url) as asking:
            response = asking.responses.create(model="team", input="Hi")
        assert ask(url, ("user", "Hi")).usage.prompt_tokens_details is None
    assert response.usage.input_tokens_details.cached_tokens == 4


def test_an_answer_whose_reasoning_had_no_opening_tag_is_streamed_all_the_same() -> None:
    """S-LLM-2: what was sent before the closing tag cannot be taken back; the answer is not refused for it."""
    text = "Perhaps 41?\n</think>\n\n42"
    with served_teams(echo(ScriptedModel(text, otherwise=text), stream=True)) as url:
        assert "".join(content(ask(url, ("user", "Hi"), stream=True))).endswith("42")
        assert ask(url, ("user", "Hi")).choices[0].message.content == "42"


@pytest.mark.parametrize("streams", [True, False])
def test_a_failure_while_an_answer_is_streamed_is_an_error_in_the_stream(streams: bool) -> None:  # noqa: FBT001  a case
    """S-SRV-113: after what was said."""
    model = ScriptedModel(otherwise=ValueError("boom"))
    with served_teams(echo(model, stream=streams)) as url, pytest.raises(APIError, match="boom") as found:
        ask(url, ("user", "Hi"), stream=True)
    assert (found.value.code, found.value.type) == ("task_execution_error", "server_error")


def test_a_full_queue_is_said_in_the_form_of_this_api() -> None:
    """S-SRV-50, S-SRV-113: 429 with `Retry-After`, which the client heeds."""
    limits = EndpointLimits(max_running=1, max_queued=0)
    calls: list[str] = []

    def slow(_call: Any) -> str:
        calls.append("asked")
        with OpenAI(base_url=url, api_key="any", max_retries=0) as inner, pytest.raises(APIStatusError) as found:
            inner.chat.completions.create(model="team", messages=[{"role": "user", "content": "Hi"}])
        errors.append(found.value)
        return "done"

    errors: list[APIStatusError] = []
    with served_teams(echo(ScriptedModel(otherwise=slow)), limits=limits) as url:
        assert ask(url, ("user", "Hi")).choices[0].message.content == "done"
    (error,) = errors
    assert (error.status_code, error.code, error.type) == (429, "queue_full", "rate_limit_error")
    assert error.response.headers["retry-after"]
    assert calls == ["asked"]
