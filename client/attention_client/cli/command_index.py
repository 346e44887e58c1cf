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


class CommandEntry(NamedTuple):
    """A command in the list."""

    place: str
    """Its module, and behind a colon its function or, of a group, its app."""
    summary: str
    """The first paragraph of its help."""


PANELS: Final = {
    "Ask a whole model": {
        "look": CommandEntry(
            REQUEST, "Show what each head of a whole model looks at in a text: statistics and largest weights."
        ),
        "lens": CommandEntry(
            REQUEST,
            "Show what the states inside a whole model would predict: the likeliest token of each layer and token.",
        ),
        "heads": CommandEntry(
            "commands.survey_commands:heads",
            "Find heads by their statistics over many texts, and show the strongest passages of a head.",
        ),
        "generate": CommandEntry(
            "commands.generation_commands:generate",
            "Continue a text, and show what the heads looked at for each new token.",
        ),
        "chat": CommandEntry(
            "commands.generation_commands:chat",
            "Chat with a model, and show what the heads looked at for each token. One line is one message.",
        ),
        "context": CommandEntry(
            "commands.context_commands:context",
            "Show which parts of a prompt made each sentence of an answer, given or generated.",
        ),
        "transcribe": CommandEntry(
            "commands.transcription_commands:transcribe",
            "Write down what is said in a sound, with the seconds at which each word begins and ends.",
        ),
        "parity": CommandEntry(
            "compare.parity_commands:parity",
            "Compare a model on two servers: attention by layer, likelihoods, and where they first depart.",
        ),
        "record": CommandEntry(
            "commands.recording_commands:record",
            "Record what a model computes for a text. Its attention runs on the server.",
        ),
        "show": CommandEntry(
            "commands.recording_commands:show",
            "Show a recording: a head as a picture and the entropy of every head, or each token's most attended keys.",
        ),
    },
    "Ask a module, or of raw q, k and v": {
        "forward": CommandEntry(REQUEST, "The output of a module, and any taps."),
        "weights": CommandEntry(REQUEST, "Show statistics of each head's weights; with -o or --json also the weights."),
        "gradients": CommandEntry(REQUEST, "Exact gradients with respect to inputs, taps and parameters."),
        "complexity": CommandEntry(REQUEST, "The cost of a module for one shape or a sweep of shapes."),
        "attribution": CommandEntry(
            REQUEST, "The share of each weight and each head of a module in a number that depends on its output."
        ),
        "effects": CommandEntry(
            REQUEST,
            "Show the change of the output by each edit of a sweep; by default each head is knocked out in turn.",
        ),
        "circuits": CommandEntry(
            REQUEST, "QK and OV circuits of a module's heads, composition scores, and spectra of its parameters."
        ),
        "explain": CommandEntry(
            "explain.explain_commands:explain_command",
            "Explain the attention of one query step by step, forward and backward, with its numbers.",
        ),
        "compare": CommandEntry(
            "compare.compare_commands:compare_command",
            "Compare two attentions on the same inputs: where they differ, and by how much.",
        ),
    },
    "Compute from files": {
        "rollout": CommandEntry(REQUEST, "Trace each token back to the inputs, over the layers of weights in a file."),
        "similarity": CommandEntry(REQUEST, "Find the most similar heads, by weights or features in files."),
        "hopfield": CommandEntry(REQUEST, "Modern Hopfield retrieval: update states until they reach stored patterns."),
    },
    "Keep": {
        "models": CommandEntry(
            "commands.model_commands:app", "List, fetch, load, use and unload the whole models of a server."
        ),
        "modules": CommandEntry(
            "commands.module_commands:app", "List, make, describe, change and remove resident modules."
        ),
        "checkpoints": CommandEntry(
            "commands.module_commands:checkpoints",
            "Show the checkpoints of the server's model repository, or the attention layers of one; nothing is loaded.",
        ),
        "import": CommandEntry(
            "commands.module_commands:import_module",
            "Make a module from one attention layer of a checkpoint, or from each of them.",
        ),
        "fetch": CommandEntry(
            EXTENSION, "Download a checkpoint from the Hugging Face hub into the model repository of this machine."
        ),
        "convert": CommandEntry(
            "commands.convert_commands:convert",
            "Write a checkpoint of pickled tensors, own classes or a list of tokens as a folder that the server opens.",
        ),
        "vectors": CommandEntry(
            "commands.vector_commands:app", "Fit, list, show, export and remove steering vectors of whole models."
        ),
        "sessions": CommandEntry(
            "commands.session_commands:app", "List, open, show and end the decode sessions of a server."
        ),
        "recordings": CommandEntry(
            "commands.recording_commands:app", "List, store, fetch and remove recordings of a server."
        ),
    },
    "Run and measure a server": {
        "serve": CommandEntry(EXTENSION, "Start the server (its own options: attention serve --help)."),
        "open": CommandEntry("commands.server_commands:open_page", "Open the page of the server in a browser."),
        "stop": CommandEntry(
            "commands.server_commands:stop", "End the server that a command has started in the background."
        ),
        "keys": CommandEntry(EXTENSION, "Create, list and revoke the API keys of the server on this machine."),
        "info": CommandEntry(REQUEST, "Version, device, dtypes and limits."),
        "variants": CommandEntry(REQUEST, "Every registered score, mask, position, normalizer, method and kernel."),
        "hardware": CommandEntry(REQUEST, "Devices for which costs can be predicted from datasheets."),
        "accuracy": CommandEntry(REQUEST, "Errors of predicted times, by kernel and purpose."),
        "bench": CommandEntry(
            "compare.bench_commands:bench",
            "Measure a running server: latency and throughput of one request, sent many times.",
        ),
    },
}
"""The commands by panel and name; others' commands come last."""
OTHERS: Final = "Others"
"""The panel of the commands that other packages contribute."""
