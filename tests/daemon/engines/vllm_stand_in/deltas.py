"""Deltas in vLLM's server with our plug-in, by their texts: what a worker takes, and loads that it asks for again.

Standard library only; the plug-in's own settings are read, from where vLLM would find the plug-in.
"""

import importlib
import importlib.metadata
import json
from pathlib import Path

MANIFEST_FILE = "delta.json"
BEING_READ = "delta {} is still being read: ask for it again"
NO_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB"


class Reader:
    """Thread that reads one delta at a time and keeps the last one until it is taken, in terms of questions."""

    def __init__(self, asks):
        """Take ``asks`` questions, whatever they are for, until a delta is read."""
        self.asks, self.left, self.folder = asks, 0, None
        self.dropped = []  # folders that were read and not taken

    def is_ready(self, folder):
        if self.left:
            self.left -= 1
            return False
        if self.folder == folder:
            self.folder = None
            return True
        if self.folder is not None:
            self.dropped.append(self.folder)
        self.folder, self.left = folder, self.asks - 1
        return False


def settings_of(additional_config):
    """Return the plug-in's settings; None: there are none. vLLM itself ignores what it does not know."""
    if "iserve_deltas" not in additional_config:
        return None
    names = {entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "iserve_variants" not in names:
        raise ValueError("additional_config is for a plug-in that is not on the path")
    module = importlib.import_module("iserve_variants.settings")
    module.check_release(importlib.metadata.version("vllm"))
    return module.read_settings(additional_config)


def refusal(folder, settings):
    """Return why a delta has no place in the slots; None: it has."""
    for matrix in json.loads((Path(folder) / MANIFEST_FILE).read_text())["matrices"]:
        is_embedding = "embed_tokens" in matrix["name"]
        held, found = settings.embedding_format if is_embedding else settings.format, matrix["format"]
        if found != held:
            return f"tensor {matrix['name']} of this delta cannot be served on vLLM: its format is {found}"
    return None
