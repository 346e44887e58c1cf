"""The engine: plan, admit, execute; and what runs there. Knows no protocol."""

from attention_service.runtime.operations import sized_requests as _rehearsed  # noqa: F401  # the cost model runs them
