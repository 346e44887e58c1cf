"""Answers and streams of ``/v1/responses``, read by the types that others made of the document of Open Responses.

``python response_types.py URL`` runs in the environment of the clients, which has nothing of this project.
"""

import json
import sys

import httpx
import openresponses_types
from pydantic import TypeAdapter, ValidationError

EVENTS = {
    name: TypeAdapter(kind) for name, kind in vars(openresponses_types).items() if name.endswith("StreamingEvent")
}
CONVERSATION = [
    {"type": "message", "role": "system", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Who sat on the mat?"}]},
]
REQUESTS = [
    {"input": "Who sat on the mat?"},
    {"input": CONVERSATION, "instructions": "Answer.", "temperature": 0, "top_p": 0.5},
    {"input": CONVERSATION, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"input": CONVERSATION, "attention": {"layers": [0], "top_k": 1}, "metadata": {"a": "b"}, "store": False},
]


def is_event(event):
    """True if it is one of the events of the document, with all that this needs."""
    for kind in EVENTS.values():
        try:
            kind.validate_python(event)
        except ValidationError:
            continue
        return True
    return False


def main(url):
    count = 0
    for given in REQUESTS:
        fields = {"model": "tiny", "max_output_tokens": 8, **given}
        whole = httpx.post(f"{url}/v1/responses", json=fields, timeout=120)
        assert whole.status_code == 200, whole.text
        openresponses_types.ResponseResource.model_validate(whole.json())
        streamed = httpx.post(f"{url}/v1/responses", json=fields | {"stream": True}, timeout=120).text
        *blocks, done, _ = streamed.split("\n\n")
        assert done == "data: [DONE]", done
        for number, block in enumerate(blocks):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert (name, number) == (f"event: {event['type']}", event["sequence_number"]), block
            assert is_event(event), block
            count += 1
    print(f"openresponses-types: {count} events")


if __name__ == "__main__":
    main(*sys.argv[1:])
