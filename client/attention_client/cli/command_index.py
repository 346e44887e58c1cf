"""The commands of ``attention`` by panel of the help, each with the place of its code and its line in the help.

``--help`` prints this list, and a command imports the code of its own place. The other way, each command would import
every schema, the client and numpy: two seconds of a processor.
"""

from typing import Final, NamedTuple

CODE: Final = "attention_client.cli."
"""The package of the places."""
REQUEST: Final = "commands.command_table"
"""The place of a command that sends one request: its row in ``COMMANDS``."""
EXTENSION: Final = "extensions"
"""The place of a command that the server's package contributes."""


class Entry(NamedTuple):
    """A command in the list."""

    place: str
    """Its module, and behind a colon its function or, of a group, its app."""
    summary: str
    """The first paragraph of its help."""


PANELS: Final = {
    "Ask a whole model": {
        "look": Entry(
            REQUEST, "Show what each head of a whole model looks at in a text: statistics and largest weights."
        ),
        "lens": Entry(
            REQUEST,
            "Show what the states inside a whole model would predict: the likeliest token of each layer and token.",
        ),
        "heads": Entry(
            "commands.survey_commands:heads",
            "Find heads by their statistics over many texts, and show the strongest passages of a head.",
        ),
        "generate": Entry(
            "commands.generation_commands:generate",
            "Continue a text, and show what the heads looked at for each new token.",
        ),
        "chat": Entry(
            "commands.generation_commands:chat",
            "Chat with a model, and show what the heads looked at for each token. One line is one message.",
        ),
        "context": Entry(
            "commands.context_commands:context",
            "Show which parts of a prompt made each sentence of an answer, given or generated.",
        ),
        "transcribe": Entry(
            "commands.transcription_commands:transcribe",
            "Write down what is said in a sound, with the seconds at which each word begins and ends.",
        ),
        "record": Entry(
            "commands.recording_commands:record",
            "Record what a model computes for a text. Its attention runs on the server.",
        ),
        "show": Entry(
            "commands.recording_commands:show",
            "Show a recording: a head as a picture and the entropy of every head, or each token's most attended keys.",
        ),
    },
    "Ask a module, or of raw q, k and v": {
        "forward": Entry(REQUEST, "The output of a module, and any taps."),
        "weights": Entry(REQUEST, "Show statistics of each head's weights; with -o or --json also the weights."),
        "gradients": Entry(REQUEST, "Exact gradients with respect to inputs, taps and parameters."),
        "complexity": Entry(REQUEST, "The cost of a module for one shape or a sweep of shapes."),
        "attribution": Entry(
            REQUEST, "The share of each weight and each head of a module in a number that depends on its output."
        ),
        "effects": Entry(
            REQUEST,
            "Show the change of the output by each edit of a sweep; by default each head is knocked out in turn.",
        ),
        "circuits": Entry(
            REQUEST, "QK and OV circuits of a module's heads, composition scores, and spectra of its parameters."
        ),
        "explain": Entry(
            "explain.explain_commands:explain_command",
            "Explain the attention of one query step by step, forward and backward, with its numbers.",
        ),
        "compare": Entry(
            "compare.compare_commands:compare_command",
            "Compare two attentions on the same inputs: where they differ, and by how much.",
        ),
    },
    "Compute from files": {
        "rollout": Entry(REQUEST, "Trace each token back to the inputs, over the layers of weights in a file."),
        "similarity": Entry(REQUEST, "Find the most similar heads, by weights or features in files."),
        "hopfield": Entry(REQUEST, "Modern Hopfield retrieval: update states until they reach stored patterns."),
    },
    "Keep": {
        "models": Entry(
            "commands.model_commands:app", "List, fetch, load, use and unload the whole models of a server."
        ),
        "modules": Entry("commands.module_commands:app", "List, make, describe, change and remove resident modules."),
        "checkpoints": Entry(
            "commands.module_commands:checkpoints",
            "Show the checkpoints of the server's model repository, or the attention layers of one; nothing is loaded.",
        ),
        "import": Entry(
            "commands.module_commands:import_module",
            "Make a module from one attention layer of a checkpoint, or from each of them.",
        ),
        "fetch": Entry(
            EXTENSION, "Download a checkpoint from the Hugging Face hub into the model repository of this machine."
        ),
        "sessions": Entry("commands.session_commands:app", "List, open, show and end the decode sessions of a server."),
        "recordings": Entry("commands.recording_commands:app", "List, store, fetch and remove recordings of a server."),
    },
    "Run and measure a server": {
        "serve": Entry(EXTENSION, "Start the server (its own options: attention serve --help)."),
        "open": Entry("commands.server_commands:open_page", "Open the page of the server in a browser."),
        "stop": Entry("commands.server_commands:stop", "End the server that a command has started in the background."),
        "keys": Entry(EXTENSION, "Create, list and revoke the API keys of the server on this machine."),
        "info": Entry(REQUEST, "Version, device, dtypes and limits."),
        "variants": Entry(REQUEST, "Every registered score, mask, position, normalizer, method and kernel."),
        "hardware": Entry(REQUEST, "Devices for which costs can be predicted from datasheets."),
        "accuracy": Entry(REQUEST, "Errors of predicted times, by kernel and purpose."),
        "bench": Entry(
            "compare.bench_commands:bench",
            "Measure a running server: latency and throughput of one request, sent many times.",
        ),
    },
}
"""The commands by panel and name; others' commands come last."""
OTHERS: Final = "Others"
"""The panel of the commands that other packages contribute."""
