"""A machine of a mixture of experts that is faster, or slower, with experts divided as wholes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fingerprint.families import read_spec
from fingerprint.model_spec import ModelSpec
from tests.fingerprint.step_timed_machine import StepTimedMachine, StepTimedSyntheticSession

CONFIG = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 1408,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def mixture(num_experts: int = 8) -> ModelSpec:
    """Return a mixture of so many experts."""
    return read_spec(CONFIG | {"num_local_experts": num_experts})


@dataclass
class MixtureMachine(StepTimedMachine):
    """Layers take ``experts_time`` times as long with expert parallelism."""

    spec: ModelSpec = field(default_factory=mixture)
    experts_time: float = 0.7

    def open(self, *, tp: int, pp: int, expert_parallel: bool = False) -> StepTimedSyntheticSession:
        """Launch a worker whose layers take as long as its experts are divided."""
        times = self.experts_time if expert_parallel else 1.0
        self.truth = replace(self.truth, layer_s=tuple(times * part for part in type(self.truth)().layer_s))
        return super().open(tp=tp, pp=pp, expert_parallel=expert_parallel)
