"""Ask for attention by the client that openapi-python-client generated, and print the one number of the output."""

import sys

from generated import Client
from generated.api.raw_attention import raw_forward
from generated.models import RawForwardRequest

request = RawForwardRequest(query=[[1.0, 0.0]], key=[[0.0, 0.0], [0.0, 0.0]], value=[[1.0], [3.0]])
reply = raw_forward.sync(client=Client(base_url=sys.argv[1]), body=request)
print(f"{reply.output[0][0]:g}")
