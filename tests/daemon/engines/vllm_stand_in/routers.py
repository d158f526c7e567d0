"""``vllm.model_executor.layers.fused_moe.router``: routers of mixtures, and the tensors they need."""

import os
import random


class Tensor:
    """Whole numbers in one dimension, by the names that PyTorch has for what is done with them."""

    def __init__(self, values):
        self.values = list(values)

    @property
    def shape(self):
        return (len(self.values),)

    def flatten(self):
        return Tensor(self.values)

    def long(self):
        return Tensor(self.values)

    def new_zeros(self, count):
        return Tensor([0] * count)

    def new_ones(self, shape):
        return Tensor([1] * shape[0])

    def scatter_add_(self, dim, index, source):
        assert dim == 0
        for at, value in zip(index.values, source.values, strict=True):
            self.values[at] += value
        return self

    def tolist(self):
        return self.values


class BaseRouter:
    def __init__(self, top_k, global_num_experts):
        self.top_k, self.global_num_experts, self.capture_fn = top_k, global_num_experts, None
        self.random = random.Random(0)

    def set_capture_fn(self, capture_fn):
        self.capture_fn = capture_fn

    def select_experts(self, tokens):
        if self.capture_fn is not None:
            self.capture_fn(Tensor(expert for _ in range(tokens) for expert in self.choose()))


class RoutingSimulatorRouter(BaseRouter):
    def choose(self):
        return self.random.sample(range(self.global_num_experts), self.top_k)


class FusedTopKRouter(BaseRouter):
    """Random weights, by which every token goes to the same experts."""

    def choose(self):
        return range(self.top_k)


def make_router(experts, top_k):
    simulated = os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY")
    return (RoutingSimulatorRouter if simulated else FusedTopKRouter)(top_k, experts)
