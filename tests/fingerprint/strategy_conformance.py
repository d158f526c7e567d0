"""Conformance suites of strategies, of latency and of memory.

    class TestMine(LatencyStrategyConformance):
        @pytest.fixture
        def strategy(self): ...

``reached`` are configurations that it must answer for, ``refused`` ones that it must not; override them and the
workloads with what the strategy was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Pruning, WeightFormat, Workload, even_split
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import MemoryEstimate, Source
from fingerprint.estimators.l2 import Latency
from fingerprint.estimators.registry import Predicts, estimator_class
from tests.fingerprint.estimator_conformance import assert_interval

NEVER_RUN = (DeploymentConfig(weights=WeightFormat.INT4), DeploymentConfig(pruning=Pruning.WANDA))


class StrategyConformance:
    """Laws of any strategy; supply the fixture ``strategy``."""

    predicts: ClassVar[Predicts]
    reached: ClassVar[Sequence[DeploymentConfig]] = (DeploymentConfig(), DeploymentConfig(tp=2))
    refused: ClassVar[Sequence[DeploymentConfig]] = NEVER_RUN
    workloads: ClassVar[Sequence[Workload]] = (Workload(1, 128, 17), Workload(4, 512, 17))

    @pytest.fixture
    def strategy(self) -> Any:
        raise NotImplementedError

    def _answer(self, strategy: Any, config: DeploymentConfig, workload: Workload) -> Any:
        return getattr(strategy, "memory" if self.predicts is Predicts.MEMORY else "latency")(config, workload)

    def _all(self, strategy: Any) -> list[Any]:
        return [self._answer(strategy, config, at) for config in self.reached for at in self.workloads]

    def test_it_is_registered_under_its_name(self, strategy: Any) -> None:
        assert type(strategy) is estimator_class(strategy.name, self.predicts)

    def test_the_same_question_has_the_same_answer(self, strategy: Any) -> None:
        assert self._all(strategy) == self._all(strategy)

    def test_what_it_cannot_tell_is_refused(self, strategy: Any) -> None:
        for config in self.refused:
            for workload in self.workloads:
                with pytest.raises(NotMeasuredError):
                    self._answer(strategy, config, workload)


class LatencyStrategyConformance(StrategyConformance):
    """Laws of any latency strategy."""

    predicts = Predicts.LATENCY

    def test_times_hold_their_intervals_and_say_how_they_were_obtained(self, strategy: Any) -> None:
        for latency in self._all(strategy):
            for quantity in (latency.ttft_s, latency.tpot_s):
                assert_interval(quantity)
                assert quantity.source is not Source.ROOFLINE

    def test_answers_travel_as_json(self, strategy: Any) -> None:
        for latency in self._all(strategy):
            assert from_json(to_json(latency), Latency) == latency


class MemoryStrategyConformance(StrategyConformance):
    """Laws of any memory strategy."""

    predicts = Predicts.MEMORY

    def test_no_part_is_negative_and_all_are_counted(self, strategy: Any) -> None:
        for config in self.reached:
            for workload in self.workloads:
                memory = self._answer(strategy, config, workload)
                assert (memory.tp, memory.pp) == (config.tp, config.pp)
                assert memory.layer_weight_bytes > 0
                assert memory.layer_kv_bytes > 0
                assert 0 < memory.relative_error < 1
                for stage in memory.stages(even_split(memory.num_layers, memory.pp)):
                    assert min(stage.weights_bytes, stage.activation_bytes, stage.runtime_bytes) >= 0
                    assert stage.pp_buffer_bytes >= 0

    def test_answers_travel_as_json(self, strategy: Any) -> None:
        for memory in self._all(strategy):
            assert from_json(to_json(memory), MemoryEstimate) == memory
