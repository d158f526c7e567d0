"""Conformance suite of estimators.

    class TestMine(EstimatorConformance):
        @pytest.fixture
        def estimator(self): ...

``configs`` and ``workloads`` are class attributes: override them with what the estimator was built for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload, even_split
from fingerprint.estimates import Estimate, Estimator, Quantity
from fingerprint.estimators.registry import estimator_class


class EstimatorConformance:
    """Laws of any estimator; supply the fixture ``estimator``."""

    configs: ClassVar[Sequence[DeploymentConfig]] = (
        DeploymentConfig(),
        DeploymentConfig(tp=2),
        DeploymentConfig(pp=2),
        DeploymentConfig(weights=WeightFormat.INT8),
        DeploymentConfig(kv=KvFormat.INT8),
    )
    workloads: ClassVar[Sequence[Workload]] = (
        Workload(),
        Workload(batch=4, input_tokens=64, output_tokens=16),
        Workload(batch=1, input_tokens=128, output_tokens=1),
    )

    @pytest.fixture
    def estimator(self) -> Estimator:
        raise NotImplementedError

    def _all(self, estimator: Estimator) -> list[Estimate]:
        return [estimator.estimate(config, workload) for config in self.configs for workload in self.workloads]

    def test_it_is_registered_under_its_name(self, estimator: Estimator) -> None:
        assert isinstance(estimator, estimator_class(estimator.name))

    def test_an_estimate_says_what_it_is_of(self, estimator: Estimator) -> None:
        for config in self.configs:
            for workload in self.workloads:
                estimate = estimator.estimate(config, workload)
                assert (estimate.config, estimate.workload) == (config, workload)
                assert (estimate.memory.tp, estimate.memory.pp) == (config.tp, config.pp)

    def test_the_same_question_has_the_same_answer(self, estimator: Estimator) -> None:
        first = self._all(estimator)
        list(reversed(self._all(estimator)))
        assert self._all(estimator) == first

    def test_intervals_hold_their_value(self, estimator: Estimator) -> None:
        for estimate in self._all(estimator):
            for quantity in (estimate.ttft_s, estimate.tpot_s, estimate.e2e_s, estimate.power_w_per_gpu):
                if quantity is not None:
                    assert_interval(quantity)
            assert 0 <= estimate.memory.relative_error < 10

    def test_every_part_of_the_memory_is_counted_and_none_is_negative(self, estimator: Estimator) -> None:
        for estimate in self._all(estimator):
            memory = estimate.memory
            assert memory.layer_weight_bytes > 0
            assert memory.layer_kv_bytes > 0
            for part in (
                memory.first_stage_bytes,
                memory.last_stage_bytes,
                memory.activation_bytes,
                memory.pp_buffer_bytes,
                memory.runtime_bytes,
            ):
                assert part >= 0
            if memory.pp == 1:
                assert memory.pp_buffer_bytes == 0
            stages = memory.stages(even_split(memory.num_layers, memory.pp))
            assert memory.total_bytes(even_split(memory.num_layers, memory.pp)) == memory.tp * sum(
                stage.weights_bytes
                + stage.kv_bytes
                + stage.activation_bytes
                + stage.pp_buffer_bytes
                + stage.runtime_bytes
                for stage in stages
            )

    def test_a_larger_batch_never_needs_less(self, estimator: Estimator) -> None:
        for config in self.configs:
            for workload in self.workloads:
                small = estimator.estimate(config, workload)
                large = estimator.estimate(config, replace(workload, batch=2 * workload.batch))
                split = even_split(small.memory.num_layers, config.pp)
                assert large.memory.per_gpu_bytes(split) >= small.memory.per_gpu_bytes(split)
                assert large.memory.layer_kv_bytes >= 1.99 * small.memory.layer_kv_bytes

    def test_estimates_travel_as_json(self, estimator: Estimator) -> None:
        for estimate in self._all(estimator):
            assert from_json(to_json(estimate), Estimate) == estimate


def assert_interval(quantity: Quantity) -> None:
    assert 0 <= quantity.low <= quantity.value <= quantity.high < float("inf")
    assert quantity.value > 0
