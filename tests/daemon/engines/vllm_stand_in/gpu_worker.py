"""``vllm.v1.worker.gpu_worker``: a worker and both model runners, their work a number of seconds on paper.

Llama shapes take the newer runner, as in vLLM: a decode step of a captured size is one replay outside the model's
forward. The older one calls the forward for every step; within it each layer's linear part is a graph of its own.
Newer releases (``release.IS_NEWER``) run every architecture on it, capture once more to estimate, and count memory
otherwise.
"""

from types import SimpleNamespace

import torch
from vllm import costs
from vllm.release import IS_NEWER
from vllm.routers import make_router

NEWER_RUNNER = {"LlamaForCausalLM", "Qwen3ForCausalLM"}
CAPTURED = (1, 2, 4, 8, 16, 32)


class Model:
    """Called as a module is: through ``forward``, looked up on the instance."""

    def __init__(self, windows, slots, experts=(0, 0)):
        self.windows, self.slots, self.calls = windows, slots, 0
        self.layers = [SimpleNamespace(router=make_router(*experts)) for _ in windows] if experts[0] else []

    def modules(self):
        return iter(self.layers)

    def __call__(self, *arguments):
        return self.forward(*arguments)

    def forward(self, tokens, pairs, adapters=0):
        self.calls += 1
        for layer in self.layers:
            layer.router.select_experts(tokens)
        torch.kernel(costs.OTHER_S + costs.LORA_ONCE_S * bool(adapters))
        for window in self.windows:
            self.run_layer(tokens, pairs[window])
            torch.kernel(costs.lora_s(tokens, adapters, self.slots))
        return "hidden states"

    def run_layer(self, tokens, pairs):
        torch.kernel(costs.layer_s(tokens, pairs))


class PiecewiseModel(Model):
    """Attention between graphs."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.pieces = {}

    def run_layer(self, tokens, pairs):
        piece = self.pieces.get(tokens)
        if piece is None or torch.cuda.is_current_stream_capturing():
            torch.kernel(costs.layer_s(tokens, 0))
        else:
            piece.replay()
        torch.kernel(costs.PAIR_S * pairs)

    def capture(self, tokens):
        piece = torch.cuda.CUDAGraph()
        with torch.cuda.graph(piece):
            torch.kernel(costs.layer_s(tokens, 0))
        self.pieces[tokens] = piece


class ModelRunner:
    """``vllm.v1.worker.gpu.model_runner``."""

    def __init__(self, settings):
        self.settings, self.graphs, self.unsampled = settings, {}, 0

    def load_model(self):
        self.model = Model(*self.of_model())
        self.model_memory_usage = costs.OTHER_BYTES + costs.LAYER_BYTES * len(self.settings["windows"])

    def of_model(self):
        return self.settings["windows"], self.settings.get("slots", 0), self.settings.get("experts", (0, 0))

    def get_model(self):
        return self.model

    def capture_model(self, *, profile_only=False):
        assert IS_NEWER or not profile_only
        for size in CAPTURED[:1] if profile_only else CAPTURED:
            for adapters in range(
                self.settings.get("slots", 0) + 1
            ):  # a graph's kernels take their time by adapters
                self.graphs[size, adapters] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[size, adapters]):
                    self.model(size, dict.fromkeys(self.settings["windows"], size), adapters)
        return costs.GRAPH_ESTIMATE_BYTES if profile_only else costs.GRAPH_BYTES

    def execute_model(self, scheduler_output):
        if not scheduler_output.total_num_scheduled_tokens:
            return "nothing to do"
        assert not self.unsampled, "the last step was not sampled"
        torch.kernel(costs.LEAD_S + costs.SLOTS_LEAD_S * bool(self.settings.get("slots", 0)))
        torch.kernel(costs.LORA_LEAD_S * bool(scheduler_output.adapters))
        self.forward(scheduler_output)
        self.unsampled = len(scheduler_output.num_scheduled_tokens)
        return None

    def forward(self, scheduler_output):
        tokens, adapters = scheduler_output.total_num_scheduled_tokens, scheduler_output.adapters
        if scheduler_output.decodes_only and (tokens, adapters) in self.graphs:
            self.graphs[tokens, adapters].replay()
        else:
            self.model(tokens, scheduler_output.pairs, adapters)

    def sample_tokens(self, _grammar_output):
        if self.unsampled:
            torch.kernel(costs.TAIL_S)
        sampled, self.unsampled = self.unsampled, 0
        return sampled


class GPUModelRunner(ModelRunner):
    """``vllm.v1.worker.gpu_model_runner``."""

    def load_model(self):
        super().load_model()
        self.model = PiecewiseModel(*self.of_model())

    def capture_model(self):
        for size in CAPTURED:
            self.model.capture(size)
        return costs.GRAPH_BYTES

    def forward(self, scheduler_output):
        pairs, adapters = scheduler_output.pairs, scheduler_output.adapters
        self.model(scheduler_output.total_num_scheduled_tokens, pairs, adapters)


class Worker:
    """Worker of one rank. Attributes are those that vLLM's own has after its start."""

    def __init__(self, settings, rank):
        self.settings, self.rank = settings, rank
        newer = IS_NEWER or settings["architecture"] in NEWER_RUNNER
        self.model_runner = (ModelRunner if newer else GPUModelRunner)(settings)
        self.cache_config, self.model_config = settings["cache_config"], settings["model_config"]
        self.requested_memory = int(settings["total_bytes"] * settings["gpu_memory_utilization"])

    def load_model(self, *, load_dummy_weights=False):
        assert not load_dummy_weights  # load_format says it
        self.model_runner.load_model()

    def determine_available_memory(self):
        weights = self.model_runner.model_memory_usage
        if IS_NEWER:
            self.cudagraph_memory_estimate = self.model_runner.capture_model(profile_only=True)
            self.total_consumed = weights + costs.CONTEXT_BYTES
            self.peak_activation_memory = costs.ACTIVATION_BYTES + self.cudagraph_memory_estimate
        else:
            self.peak_activation_memory, self.non_torch_memory = costs.ACTIVATION_BYTES, costs.CONTEXT_BYTES
            self.cudagraph_memory_estimate = 0
        held = weights + costs.ACTIVATION_BYTES + costs.CONTEXT_BYTES + self.cudagraph_memory_estimate
        self.available_kv_cache_memory_bytes = self.requested_memory - held
        return self.available_kv_cache_memory_bytes

    def initialize_from_config(self, kv_cache_config):
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks

    def compile_or_warm_up_model(self):
        if not self.model_config.enforce_eager:
            self.model_runner.capture_model()

    def execute_model(self, scheduler_output):
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output):
        return self.model_runner.sample_tokens(grammar_output)
