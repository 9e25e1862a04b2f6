"""The scripted model: one script is one script, here and from another process."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from ensemble_ray import (
    Audio,
    ChatMessage,
    ChatModel,
    ChatResponse,
    File,
    IllegalStateError,
    Image,
    ProviderFields,
    StreamingChatModel,
    TokenUsage,
    ToolCall,
    ToolSpec,
)
from ensemble_ray.llm.protocol.attachments import content_parts
from ensemble_ray.ports import Services, use_services
from ensemble_ray.testing import Reply, ScriptedCall, ScriptedModel, ServedRequest, assert_attached
from ensemble_ray.testing import scripted as scripted_module
from ensemble_ray.testing.scripted import ScriptedModelHandle, answer_scripted
from tests.media import PNG, WAV

HELLO = [ChatMessage("user", "hello")]


class LoopbackDriver:
    """Driver services that answer here, through JSON, as a wire would."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def ask(self, name: str, payload: Mapping[str, object]) -> object:
        self.names.append(name)
        reply = await answer_scripted(json.loads(json.dumps(payload)))
        return json.loads(json.dumps(reply))

    def notify(self, name: str, payload: Mapping[str, object]) -> None:
        raise AssertionError(name)


def services_with(driver: LoopbackDriver) -> Services:
    """Services of an actor whose driver this is."""
    return Services(limiter=None, cpu=None, driver=driver)  # type: ignore[arg-type]  # neither is asked here


async def test_entries_are_given_in_order_when_called() -> None:
    """S-CONV-20, S-CONV-21: a scripted model is a chat model and answers in the values of the port."""
    call = ToolCall("1", "search", "{}")
    model = ScriptedModel("text", call, [call, call], ChatResponse("whole", usage=TokenUsage(3, 4)))
    assert isinstance(model, ChatModel)
    assert [await model.chat(HELLO) for _ in range(4)] == [
        ChatResponse("text"),
        ChatResponse(None, (call,)),
        ChatResponse(None, (call, call)),
        ChatResponse("whole", (), TokenUsage(3, 4)),
    ]
    assert model.remaining == 0


async def test_calls_are_recorded_when_made() -> None:
    """S-CONV-25: what the model was sent can be looked at, tools beside the messages."""
    model = ScriptedModel(otherwise="ok")
    tool = ToolSpec("search", "finds", {"type": "object"})
    await model.chat(HELLO, [tool])
    assert model.calls == (ScriptedCall(number=0, messages=tuple(HELLO), tools=(tool,)),)
    assert model.calls[0].text == "hello"


async def test_an_exception_is_raised_when_the_script_holds_one() -> None:
    """S-ERR-31: the object of the script is the one the caller gets."""
    error = KeyError("boom")
    model = ScriptedModel(error, TimeoutError)
    with pytest.raises(KeyError) as caught:
        await model.chat(HELLO)
    assert caught.value is error
    with pytest.raises(TimeoutError):
        await model.chat(HELLO)


async def test_a_callable_answers_when_the_script_holds_one() -> None:
    """S-CONV-16: sync or async."""

    async def later(call: ScriptedCall) -> str:
        await asyncio.sleep(0)
        return f"async {call.text}"

    model = ScriptedModel(lambda call: f"sync {call.text}", later)
    assert (await model.chat(HELLO)).text == "sync hello"
    assert (await model.chat(HELLO)).text == "async hello"


async def test_the_call_fails_when_the_script_is_used_up() -> None:
    """A test that asks more often than it says is told so."""
    model = ScriptedModel("only")
    await model.chat(HELLO)
    with pytest.raises(IllegalStateError, match="script of 1 entries is used up; call 2 asks: 'hello'"):
        await model.chat(HELLO)


async def test_the_call_fails_when_the_entry_is_of_no_known_kind() -> None:
    """A script that cannot be answered from is an error, not an empty answer."""
    with pytest.raises(IllegalStateError, match="cannot answer with a int"):
        await ScriptedModel(lambda _: 3).chat(HELLO)


async def test_fragments_join_to_the_text_when_streamed() -> None:
    """S-CONV-23, S-STR-3: fragments in order, the closing response holds the whole."""
    model = ScriptedModel("one two three", Reply(text="abc", fragments=["a", "bc"], usage=TokenUsage(1, 2)))
    assert isinstance(model, StreamingChatModel)
    first = [part async for part in model.stream(HELLO)]
    assert first == ["one ", "two ", "three", ChatResponse("one two three")]
    assert [part async for part in model.stream(HELLO)] == ["a", "bc", ChatResponse("abc", (), TokenUsage(1, 2))]


async def test_a_copy_is_the_script_itself_when_it_comes_home() -> None:
    """S-SET-38: one script is one script; at home the pickled copy is the object itself."""
    model = ScriptedModel("a", "b")
    assert pickle.loads(pickle.dumps(model)) is model  # noqa: S301  our own bytes


@pytest.mark.parametrize("fields", [{"members": {"a": 1}}, {"is_ended": False}, {"cut_after": 1}])
async def test_the_call_fails_when_only_a_server_can_express_the_reply(fields: dict[str, Any]) -> None:
    """S-SET-38: a member that has no effect would make a test pass that tests nothing."""
    with pytest.raises(IllegalStateError, match="ModelServer"):
        await ScriptedModel(Reply(text="a", **fields)).chat(HELLO)


async def test_members_of_the_provider_are_the_same_here_and_from_a_handle() -> None:
    """S-LLM-9, S-SET-38: of answers, and of messages in `calls`."""
    fields = ProviderFields(origin="here", message='{"a":1}', tool_calls=('{"signature":"s"}',))
    answer = ChatResponse(
        "x", (ToolCall("1", "t"),), TokenUsage(1, 2, 1), "tool_calls", reasoning="r", provider_fields=fields
    )
    model = ScriptedModel(*[answer] * 4)
    handle = ScriptedModelHandle(_id_of(model))
    messages = [ChatMessage("assistant", "x", (ToolCall("1", "t"),), provider_fields=fields)]
    with use_services(services_with(LoopbackDriver())):
        for each in (model, handle):
            assert await each.chat(messages) == answer
            assert [part async for part in each.stream(messages)] == ["r", "x", answer]
    assert [call.messages for call in model.calls] == [tuple(messages)] * 4


@pytest.fixture
def abroad(monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    """A scripted model whose process looks like another one to whoever unpickles it."""
    tool = ToolCall("1", "search", '{"q": 1}')
    model = ScriptedModel("one", tool, Reply(text="x y", fragments=["x ", "y"], usage=TokenUsage(1, 2)), KeyError("k"))
    monkeypatch.setattr(scripted_module, "_double_or_handle", ScriptedModelHandle)
    return model


async def test_a_handle_draws_from_the_one_script_when_it_is_in_another_process(abroad: ScriptedModel) -> None:
    """S-SET-38: copies travel as handles; calls go home through the driver's services, as data."""
    first, second = ScriptedModelHandle(_id_of(abroad)), ScriptedModelHandle(_id_of(abroad))
    driver = LoopbackDriver()
    messages = [ChatMessage("user", "hi"), ChatMessage("assistant", None, (ToolCall("0", "t", "{}"),))]
    with use_services(services_with(driver)):
        assert (await first.chat(messages, [ToolSpec("t", "d", {"type": "object"})])).text == "one"
        assert (await second.chat(messages)).tool_calls == (ToolCall("1", "search", '{"q": 1}'),)
        streamed = [part async for part in first.stream(messages)]
        with pytest.raises(KeyError, match="k"):
            await second.chat(messages)
    assert streamed == ["x ", "y", ChatResponse("x y", (), TokenUsage(1, 2))]
    assert [call.messages for call in abroad.calls] == [tuple(messages)] * 4
    assert abroad.calls[0].tools == (ToolSpec("t", "d", {"type": "object"}),)
    assert set(driver.names) == {"scripted_model.chat"}


def _id_of(model: ScriptedModel) -> str:
    return str(model.__reduce__()[1][0])


async def test_a_handle_says_so_when_there_is_no_way_home(abroad: ScriptedModel) -> None:
    """S-SET-38: outside its run a handle fails in words."""
    with pytest.raises(IllegalStateError, match="outside the run"):
        await ScriptedModelHandle(_id_of(abroad)).chat(HELLO)


@pytest.mark.heavy
async def test_a_handle_says_so_when_its_owner_is_gone() -> None:
    """S-SET-38: the script ends with its owner."""
    model = ScriptedModel("a")
    handle = ScriptedModelHandle(_id_of(model))
    del model
    gc.collect(1)  # what is young; to look through all that a session has loaded takes seconds
    with use_services(services_with(LoopbackDriver())), pytest.raises(IllegalStateError, match="let go of it"):
        await handle.chat(HELLO)


class LocalError(Exception):
    """An error of this file that does not survive pickling."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


async def test_class_name_and_text_arrive_when_the_error_cannot_travel() -> None:
    """S-ERR-31: an equivalent with the same class name and text."""
    model = ScriptedModel(LocalError(code=7))
    with use_services(services_with(LoopbackDriver())), pytest.raises(Exception, match="code 7") as caught:
        await ScriptedModelHandle(_id_of(model)).chat(HELLO)
    assert type(caught.value).__name__ == "LocalError"


async def test_attachments_are_the_same_here_and_from_a_handle(abroad: ScriptedModel) -> None:
    """S-ATT-90: a call shows the contents of all messages, and a test compares them with files, bytes and attachments."""
    image, sound = Image(PNG, name="dot.png"), Audio(WAV, name="call.wav")
    messages = [
        ChatMessage("user", "look", attachments=(image, sound)),
        ChatMessage("user", "again", attachments=(image,)),
    ]
    with use_services(services_with(LoopbackDriver())):
        await ScriptedModelHandle(_id_of(abroad)).chat(messages)
    await abroad.chat(messages)
    for asked in abroad.calls:
        assert asked.attachments == (image, sound, image)
        assert [each.data for each in asked.attachments] == [PNG, WAV, PNG]
        assert_attached(asked, PNG, sound, image.as_reference())
        with pytest.raises(AssertionError, match=r"attachments of the call: Image\('dot.png'.*; expected: none"):
            assert_attached(asked)


def test_attachments_of_a_request_are_read_from_its_parts() -> None:
    """S-ATT-90: of pictures, audio and files as the protocol sends them; text files are text."""
    parts = (Image(PNG), Audio(WAV), File(b"%PDF-1.7 x", name="a.pdf"), File(b"seen", name="a.md"))
    content = content_parts(ChatMessage("user", "look", attachments=parts))
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content}]}
    request = ServedRequest("/v1/chat/completions", {}, json.dumps(body).encode())
    assert_attached(request, *parts[:3])
    assert [type(each) for each in request.attachments] == [Image, Audio, File]
    assert request.attachments[2].name == "a.pdf"
    assert request.text == "look\n## File: a.md\nseen"
