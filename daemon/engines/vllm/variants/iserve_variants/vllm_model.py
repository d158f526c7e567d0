"""Modules of one vLLM model that take deltas: made around its own, and listed by the tensors that they take."""

from __future__ import annotations

import torch
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer

from iserve_variants.formats import FORMATS
from iserve_variants.placement import Kind, Place, Places
from iserve_variants.runtime import Runtime
from iserve_variants.slots import EmbeddingSlots
from iserve_variants.vllm_layers import LinearWithDeltas
from iserve_variants.vllm_modules import EmbeddingWithDeltas, NormWithDeltas, OutputWithDeltas, add_to_logits

__all__ = ["ModelParts"]

_HEAD = "lm_head"  # of every class of vLLM that deltas are served by, where it has one


class ModelParts:
    """Makes the modules that vLLM's LoRA path has none for, and lists the places of all.

    Modules that are made are in :attr:`made`, by the names under which the manager has to register them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        modules: dict[str, torch.nn.Module],
        packed: dict[str, list[str]],
        runtime: Runtime,
    ) -> None:
        """Put modules around those of ``model`` that take changes.

        Args:
            model: after the manager has put its LoRA modules in.
            modules: of the manager, by name.
            packed: names of the matrices that a module joins, by its name.
            runtime: shared by all.
        """
        self._model, self._runtime = model, runtime
        self.made: dict[str, torch.nn.Module] = {}
        self._taken: dict[str, Place] = {}
        self._refused: dict[str, str] = {}
        self._elsewhere: list[str] = []
        for name, module in modules.items():
            self._add_linear(name, module, packed.get(name, [name]))
        found = dict(model.named_modules(remove_duplicate=False))
        embedding: tuple[str, EmbeddingWithDeltas] | None = None
        for name, module in found.items():
            if isinstance(module, PPMissingLayer):
                self._elsewhere.append(name)
            elif type(module).__name__.endswith("RMSNorm"):
                self._add_norm(name, module)
            elif _is_embedding(module) and not name.endswith(".base_layer"):
                embedding = self._add_embedding(name, module) or embedding
        self._add_output(found, embedding)
        self.places = Places(taken=self._taken, refused=self._refused, elsewhere=tuple(self._elsewhere))

    def _add_linear(self, name: str, module: torch.nn.Module, joined: list[str]) -> None:
        if not isinstance(module, LinearWithDeltas):
            for one in joined:
                self._refused[one] = f"its module {type(module).__name__} takes adapters alone"
            return
        if module.deltas is None:
            for one in joined:
                self._refused[one] = module.refusal
            return
        shapes = module.whole_shapes()
        if len(shapes) == 1 and len(joined) == 1:
            sizes = getattr(module.base_layer, "output_sizes", None)  # joined in the checkpoint too
            shapes = [(sum(sizes), shapes[0][1])] if sizes else shapes
        for one, shape in zip(joined, shapes, strict=True):
            self._taken[one] = Place(
                kind=Kind.LINEAR, module=one, shape=shape, format=self._runtime.settings.format
            )

    def _add_norm(self, name: str, module: torch.nn.Module) -> None:
        if not self._runtime.settings.norms:
            self._refused[name] = "slots were made without norms"
        elif type(module) is not RMSNorm or not module.has_weight or module.variance_size_override is not None:
            self._refused[name] = f"a norm of class {type(module).__name__} is not offered with several weights"
        else:
            self._put(name, NormWithDeltas(module, self._runtime))
            self._taken[name] = Place(kind=Kind.NORM, module=name, shape=tuple(module.weight.shape))

    def _add_embedding(self, name: str, module: torch.nn.Module) -> tuple[str, EmbeddingWithDeltas] | None:
        format_name = self._runtime.settings.embedding_format
        if format_name is None:
            self._refused[name] = "slots were made without embeddings"
            return None
        deltas = self._vocabulary_slots(module, format_name)
        made = EmbeddingWithDeltas(module, name, deltas, self._runtime)
        self._put(name, made)
        self._take_vocabulary(name, name, Kind.EMBEDDING, format_name, deltas)
        return name, made

    def _add_output(
        self, found: dict[str, torch.nn.Module], embedding: tuple[str, EmbeddingWithDeltas] | None
    ) -> None:
        head = next(((name, one) for name, one in found.items() if isinstance(one, ParallelLMHead)), None)
        processor = next((one for one in found.values() if _is_processor(one)), None)
        is_tied = bool(getattr(self._model.config, "tie_word_embeddings", False))
        if head is None and is_tied and embedding is not None and _HEAD not in found:
            head = _HEAD, embedding[1]  # as of Gemma 2, whose logits are of the embedding itself
        if head is None:  # another stage of the pipeline has it
            return
        name, module = head
        settings = self._runtime.settings
        format_name = settings.embedding_format if is_tied else settings.output_format
        if format_name is None or processor is None:
            self._refused[name] = "slots were made without the output layer"
        elif is_tied and embedding is not None:
            self._elsewhere.append(name)
            add_to_logits(self._model, processor, embedding[1].deltas, self._runtime)  # one matrix, one copy
        else:
            deltas = self._vocabulary_slots(module, format_name)
            inner = processor if hasattr(processor, "lora_a_stacked") else None
            self.made[name] = OutputWithDeltas(inner, deltas, self._runtime)
            tensor = name
            for stage in self._elsewhere if is_tied else ():  # the first stage has the embedding itself
                if stage.endswith("embed_tokens"):
                    tensor = stage
                    self._elsewhere[self._elsewhere.index(stage)] = name
                    break
            self._take_vocabulary(tensor, name, Kind.OUTPUT, format_name, deltas)
            add_to_logits(self._model, processor, deltas, self._runtime)

    def _vocabulary_slots(self, module: torch.nn.Module, format_name: str) -> EmbeddingSlots:
        """Return slots for the whole vocabulary, which every rank has."""
        shape = module.org_vocab_size, module.embedding_dim
        return EmbeddingSlots(
            slots=self._runtime.places.count,
            shape=shape,
            format_=FORMATS[format_name],
            device=module.weight.device,
        )

    def _take_vocabulary(
        self, tensor: str, module: str, kind: Kind, format_name: str, deltas: EmbeddingSlots
    ) -> None:
        self._taken[tensor] = Place(kind=kind, module=module, shape=deltas.shape, format=format_name)

    def _put(self, name: str, made: torch.nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self._model.get_submodule(parent), leaf, made)
        self.made[name] = made


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, (VocabParallelEmbedding, VocabParallelEmbeddingWithLoRA)) and not isinstance(
        module, ParallelLMHead
    )


def _is_processor(module: torch.nn.Module) -> bool:
    inner = getattr(module, "base_layer", module)
    return isinstance(inner, LogitsProcessor) and (inner is module or hasattr(module, "lora_a_stacked"))
