"""LoRA adapters of vLLM's server (0.24 to 0.33): its options, and the routes that load and unload, by their texts.

How many adapters take part in one step is not acted out.
"""

import json
import os
import sys
import threading
from pathlib import Path

from vllm import answers, deltas

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def add_options(serve):
    serve.add_argument("--enable-lora", action="store_true")
    serve.add_argument("--max-loras", type=int, default=1)
    serve.add_argument("--max-lora-rank", type=int, choices=RANKS, default=16)
    serve.add_argument("--max-cpu-loras", type=int)
    serve.add_argument("--additional-config", type=json.loads, default={})


class Adapters:
    """Names that are loaded, where they were loaded from, and KV that is kept by name."""

    def __init__(self, given, behaviour):
        loaded = given.max_loras if given.max_cpu_loras is None else given.max_cpu_loras
        if given.enable_lora and loaded < given.max_loras:
            raise ValueError(f"max_cpu_loras ({loaded}) must be >= max_loras ({given.max_loras}).")
        self.given, self.paths, self.lock = given, {}, threading.Lock()
        self.contents, self.kv = {}, {}
        self.settings = deltas.settings_of(given.additional_config)
        self.reader = deltas.Reader(behaviour.get("delta_asks", 2))
        self.most_deltas = behaviour.get("most_deltas", 10**9)  # that memory holds

    def has_route(self, path):
        open_ = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").strip().lower() in ("1", "true")
        return open_ and path in (LOAD, UNLOAD)

    def cards(self, card):
        """Return an entry of ``GET /v1/models`` for each, from that of the base."""
        return [card | {"id": name, "root": path, "parent": card["id"]} for name, path in self.paths.items()]

    def letters(self, name, prompt):
        """Return the letters of which the answer to ``prompt`` is, over and over."""
        with self.lock:
            if name not in self.paths:
                return answers.BASE
            content = self.contents[name]
            kept = self.kv if self.given.enable_prefix_caching else {}
            return answers.letters_of(name, content, kept.setdefault((name, json.dumps(prompt)), content))

    def answer(self, path, asked):
        """Return status and body: text where it is done, else an error."""
        with self.lock:
            status, said = (self._load if path == LOAD else self._unload)(asked)
        kinds = {400: "InvalidUserInput", 404: "NotFoundError", 500: "InternalServerError"}
        if status == 200:
            return status, said.encode()
        return status, {"error": {"message": said, "type": kinds[status], "param": None, "code": status}}

    def _load(self, asked):
        name, folder = asked.get("lora_name"), asked.get("lora_path")
        if not name or not folder:
            return 400, "Both 'lora_name' and 'lora_path' must be provided."
        if name in self.paths:
            return 400, (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True."
            )
        if not self.given.enable_lora:
            return 500, "LoRA is not enabled. Use --enable-lora to enable LoRA."
        if self.settings is not None and (Path(folder) / deltas.MANIFEST_FILE).is_file():
            return self._load_delta(name, folder)
        config = Path(folder) / "adapter_config.json"
        if not config.is_file():
            return 404, f"Loading lora {name} failed: No adapter found for {folder}"
        rank = json.loads(config.read_text())["r"]
        if rank > self.given.max_lora_rank:
            return 500, f"LoRA rank {rank} is greater than max_lora_rank {self.given.max_lora_rank}."
        if not (Path(folder) / "adapter_model.safetensors").is_file():
            return 500, f"{folder} doesn't contain tensors"
        return self._loaded(name, folder)

    def _load_delta(self, name, folder):
        failed = "Call to add_lora method failed: "
        if self.settings.background and not self.reader.is_ready(folder):
            if self.reader.dropped:
                print(f"stand-in: read and dropped {self.reader.dropped.pop()}", file=sys.stderr, flush=True)
            return 500, failed + deltas.BEING_READ.format(name)
        if (why := deltas.refusal(folder, self.settings)) is not None:
            return 500, failed + why
        if sum((Path(one) / deltas.MANIFEST_FILE).is_file() for one in self.paths.values()) >= self.most_deltas:
            return 500, failed + deltas.NO_MEMORY
        return self._loaded(name, folder)

    def _loaded(self, name, folder):
        self.paths[name], self.contents[name] = folder, answers.content_of(Path(folder))
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, asked):
        name = asked.get("lora_name")
        if not name:
            return 400, "'lora_name' needs to be provided to unload a LoRA adapter."
        if self.paths.pop(name, None) is None:
            return 404, f"The lora adapter '{name}' cannot be found."
        return 200, f"Success: LoRA adapter '{name}' removed successfully."
