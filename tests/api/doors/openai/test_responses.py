"""The Responses API by the ``openai`` package, unmodified: whole answers, streams, attention, and what is refused."""

import httpx
import pytest

from attention_client import Client, InvalidRequest
from tests.api.doors.openai.test_openai_package import CHAT, LOOK, WRITTEN, own

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns, if another test of this process imported it
ITEMS = [{"type": "message", **message} for message in CHAT]
FIELDS = {"model": "talker", "temperature": 0, "max_output_tokens": 9}


@pytest.fixture(scope="module")
def client(door):
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key=door.key, max_retries=0) as made:
        yield made


@pytest.mark.parametrize(
    "given",
    [
        {"input": ITEMS},
        {"input": CHAT},
        {"input": "Hello", "instructions": "Be brief."},
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
            "instructions": "Be brief.",
        },
    ],
)
def test_a_conversation_is_answered_in_every_form(client, given):
    reply = client.responses.create(**given, **FIELDS)
    assert reply.output_text == own(WRITTEN, 9)[0]
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.completed_at is None
    usage = reply.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (len(WRITTEN), 9, len(WRITTEN) + 9)
    assert (reply.store, reply.temperature, reply.instructions) == (False, 0, given.get("instructions"))


def test_an_answer_may_be_sent_back_as_a_part_of_the_conversation(client):
    reply = client.responses.create(input=ITEMS, **FIELDS)
    items = [*ITEMS, *[each.model_dump() for each in reply.output], {"role": "user", "content": "And?"}]
    again = client.responses.create(input=items, **FIELDS)
    assert again.output_text == own(f"{WRITTEN}{reply.output_text}<user>And?<assistant>", 9)[0]


def test_an_answer_that_ends_is_completed(client):
    text = own(WRITTEN, 9)[0]
    reply = client.responses.create(input=ITEMS, extra_body={"stop": [text[3:5]]}, **FIELDS)
    assert reply.output_text == text[: text.index(text[3:5])]
    assert (reply.status, reply.incomplete_details, reply.output[0].status) == ("completed", None, "completed")
    assert reply.completed_at >= reply.created_at


def test_events_come_in_order_and_hold_the_whole_answer(client):
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "extra_body": LOOK}
    whole = client.responses.create(input=ITEMS, **more, **FIELDS)
    events = [*client.responses.create(input=ITEMS, stream=True, **more, **FIELDS)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 9, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    last = events[-1].response
    assert "".join(event.delta for event in deltas) == last.output_text == whole.output_text
    assert {event.item_id for event in deltas} == {last.output[0].id}
    assert events[0].response.id == last.id
    assert events[0].response.status == "in_progress"
    assert [each for event in deltas for each in event.model_dump()["logprobs"]] == [
        each.model_dump() for each in last.output[0].content[0].logprobs
    ]
    assert last.usage == whole.usage
    part = whole.output[0].content[0]
    looked = part.model_extra["attention"]
    assert looked == last.output[0].content[0].model_extra["attention"]
    assert [entry for event in deltas for entry in event.model_extra["attention"]] == looked
    assert [entry["position"] for entry in looked] == [len(WRITTEN) + at for at in range(9)]
    assert [each.token for each in part.logprobs] == list(whole.output_text)
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)


def test_each_line_of_a_stream_is_named_by_its_type(door):
    headers = {"authorization": f"Bearer {door.key}"}
    fields = {"model": "talker", "input": "Hello", "stream": True, "max_output_tokens": 2}
    text = httpx.post(f"{door.url}/v1/responses", json=fields, headers=headers, timeout=60).text
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        name, data = event.split("\n")
        assert data.startswith(f'data: {{"type":"{name.removeprefix("event: ")}","sequence_number":')


async def test_the_awaited_package_streams_too(door):
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key) as client:
        text = ""
        async with client.responses.stream(model="talker", input=ITEMS, temperature=0, max_output_tokens=9) as stream:
            async for event in stream:
                text += event.delta if event.type == "response.output_text.delta" else ""
        assert text == own(WRITTEN, 9)[0]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": None}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include.0"),
        ({"extra_body": {"surprise": 1}}, "surprise"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": ""}]}, "input.0.type"),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "http://x.test/a.png"}]},
                ]
            },
            "input.0.content.0.image_url",
        ),
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}],
                    }
                ]
            },
            "input",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_supported_is_refused_by_name(client, options, param, stream):
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(**{"model": "talker", "input": "Hello", "stream": stream} | options)
    assert refusal.value.param.startswith(param), refusal.value.body


@pytest.mark.parametrize(
    "neutral",
    [
        {"store": False, "background": False, "truncation": "disabled", "tools": [], "tool_choice": "auto"},
        {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "none"}, "previous_response_id": None},
        {"metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "me", "parallel_tool_calls": False},
    ],
)
def test_fields_that_change_nothing_are_accepted(client, neutral):
    reply = client.responses.create(input=ITEMS, **neutral, **FIELDS)
    assert reply.output_text == own(WRITTEN, 9)[0]
    assert reply.metadata == neutral.get("metadata", {})
    assert reply.safety_identifier == neutral.get("safety_identifier")


def test_the_client_answers_and_streams(door):
    with Client(door.url, api_key=door.key) as client:
        fields = {"instructions": "Be brief.", "temperature": 0, "max_output_tokens": 9}
        whole = client.models.respond("talker", "Hello", **fields)
        events = [*client.models.stream_response("talker", "Hello", attention={"keep": True}, **fields)]
        assert "".join(event.delta or "" for event in events) == whole.output_text == own(WRITTEN, 9)[0]
        assert client.recordings.get(events[-1].recording).id == events[-1].recording
        with pytest.raises(InvalidRequest):
            [*client.models.stream_response("talker", "Hello", max_output_tokens=10**6)]
