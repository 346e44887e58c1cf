#!/bin/sh
# Ask a module the four questions with curl: forward, weights, gradients and complexity. Prints the replies as JSON.
# Needs a running service (`attention serve`, or ATTENTION_URL): sh examples/quickstart.sh
set -eu

ask() { # method, path, body
	echo "$1 $2" >&2
	curl --silent --show-error --fail-with-body --write-out '\n' \
		--request "$1" --header 'Content-Type: application/json' --data "$3" \
		"${ATTENTION_URL:-http://127.0.0.1:8000}$2"
}

tokens='[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]]' # three tokens of width 4

ask POST /v1/modules '{"name": "quickstart-sh", "config": {"d_model": 4, "num_heads": 2}, "seed": 0}'
ask POST /v1/modules/quickstart-sh/forward '{"query": '"$tokens"', "return": ["output", "weights"]}'
ask POST /v1/modules/quickstart-sh/weights '{"query": '"$tokens"', "top_k": 1, "return_weights": false}'
ask POST /v1/modules/quickstart-sh/gradients '{"query": '"$tokens"', "wrt": ["query", "q_proj.weight"]}'
ask POST /v1/modules/quickstart-sh/complexity '{"shape": {"queries": 512}}'
