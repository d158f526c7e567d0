"""Kept results of ``iserve quality``: identities, the file next to a checkpoint, and what a name means now."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.errors import BadInputError, CheckpointError, ConfigError, ConflictError, NotFoundError
from iserve.cli.quality import quality_words
from iserve.controller.quality import QualityResults
from iserve.quality.checks import check_result
from iserve.quality.document import ComparisonDocument, Interval, ModelFacts, QualityDocument, TextFacts
from iserve.quality.facts import weights_stamp
from iserve.quality.identity import identity_of
from iserve.quality.kept_file import KEPT_FILE, keep_next_to, kept_next_to
from iserve.state.rows import VariantRow
from iserve.state.store import Store
from tests.golden_words import Golden

MEAN = Interval(value=0.5, low=0.4, high=0.6)
MODEL = ModelFacts(
    name="style",
    checkpoint="/models/base",
    sha256="a" * 64,
    variant_hash="b" * 64,
    weights_stamp="c" * 64,
    config=DeploymentConfig(engine="torch"),
    engine_version="1.0",
)
TEXT = TextFacts(file="/texts/q.jsonl", sha256="d" * 64, num_texts=3, num_tokens=9, num_cut=0, num_left_out=0)
RESULT = QualityDocument(
    model=MODEL,
    against=replace(MODEL, name="base", variant_hash=None),
    url="http://127.0.0.1:1",
    started_at="2026-11-27T00:00:00+00:00",
    iserve_version="0.1",
    text=TEXT,
    nll=MEAN,
    exact_match=MEAN,
    comparison=ComparisonDocument(
        nll=MEAN, nll_difference=MEAN, exact_match=MEAN, kl=MEAN, shared_mass=0.9, top1_agreement=MEAN
    ),
    top=20,
    seed=0,
    notes=(),
)


def of_model(**changes: Any) -> QualityDocument:
    return replace(RESULT, model=replace(MODEL, **changes))


def of_text(sha256: str) -> QualityDocument:
    return replace(RESULT, text=replace(TEXT, sha256=sha256))


@pytest.mark.parametrize(
    "other",
    [
        of_model(sha256="e" * 64),
        of_model(variant_hash=None),
        of_model(engine_version="1.1"),
        of_model(config=DeploymentConfig(engine="vllm")),
        replace(RESULT, against=None),
        replace(RESULT, against=replace(MODEL, sha256="f" * 64)),
        replace(RESULT, against=ModelFacts(name="base")),
        of_text("e" * 64),
    ],
)
def test_other_contents_texts_or_engines_are_other_results(other: QualityDocument) -> None:
    assert identity_of(other) != identity_of(RESULT)


@pytest.mark.parametrize(
    "same",
    [
        of_model(name="alias"),
        replace(RESULT, started_at="2027-01-01", nll=replace(MEAN, value=1.0)),
    ],
)
def test_the_same_measured_again_is_the_same_result(same: QualityDocument) -> None:
    assert identity_of(same) == identity_of(RESULT)


def test_references_of_which_only_the_name_is_known_are_two() -> None:
    one, other = (replace(RESULT, against=ModelFacts(name=name)) for name in ("one", "other"))
    assert identity_of(one) != identity_of(other)


def test_a_result_is_said_in_one_line(golden: Golden) -> None:
    golden("quality", quality_words(RESULT))
    plain = replace(MEAN, low=None, high=None)
    unknown = ModelFacts(name="m")
    golden(
        "quality",
        quality_words(replace(RESULT, model=unknown, against=None, nll=plain, exact_match=None, comparison=None)),
    )


def test_a_result_that_was_measured_is_believed() -> None:
    check_result(RESULT)
    check_result(replace(RESULT, against=None, comparison=None, exact_match=None))
    check_result(of_interval(nll=Interval(value=1.0, low=None, high=None)))
    check_result(of_comparison(nll_difference=Interval(value=-0.5, low=-1.0, high=0.0)))


def of_interval(**intervals: Interval) -> QualityDocument:
    return replace(RESULT, **intervals)


def of_comparison(**changes: Any) -> QualityDocument:
    assert RESULT.comparison is not None
    return replace(RESULT, comparison=replace(RESULT.comparison, **changes))


def around(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)


@pytest.mark.parametrize(
    ("impossible", "field"),
    [
        (of_interval(nll=around(math.inf)), "nll.value"),
        (of_interval(nll=around(math.nan)), "nll.value"),
        (of_interval(nll=around(-1.0)), "nll"),
        (of_interval(nll=Interval(value=0.5, low=9.0, high=1.0)), "nll"),
        (of_interval(nll=Interval(value=0.5, low=0.6, high=0.7)), "nll"),
        (of_interval(nll=Interval(value=0.5, low=0.4, high=None)), "nll"),
        (of_interval(exact_match=around(7.0)), "exact_match"),
        (of_comparison(kl=around(-0.1)), "comparison.kl"),
        (of_comparison(shared_mass=1.1), "comparison.shared_mass"),
        (of_comparison(top1_agreement=around(1.5)), "comparison.top1_agreement"),
        (of_comparison(nll=around(-1.0)), "comparison.nll"),
        (of_comparison(exact_match=around(-1.0)), "comparison.exact_match"),
        (of_comparison(nll_difference=Interval(value=0.0, low=1.0, high=2.0)), "comparison.nll_difference"),
        (replace(RESULT, comparison=None), "comparison"),
        (replace(RESULT, against=None), "comparison"),
        (replace(RESULT, text=replace(TEXT, num_tokens=-5)), "text.num_tokens"),
        (replace(RESULT, text=replace(TEXT, num_tokens=2)), "text"),
        (replace(RESULT, text=replace(TEXT, num_tokens=10**400)), "text.num_tokens"),
        (replace(RESULT, text=replace(TEXT, file=os.fsdecode(b"\xff.txt"))), "text.file"),
        (of_text("not a hash"), "text.sha256"),
        (of_text(""), "text.sha256"),
        (of_model(sha256="A" * 64), "model.sha256"),
        (of_model(variant_hash="1"), "model.variant_hash"),
        (replace(RESULT, against=replace(MODEL, weights_stamp="")), "against.weights_stamp"),
        (replace(RESULT, started_at="<script>"), "started_at"),
        (replace(RESULT, notes=("a", "b\x1b[31mred")), "notes"),
    ],
)
def test_a_result_that_no_measurement_has_is_refused_by_its_field(impossible: QualityDocument, field: str) -> None:
    with pytest.raises(BadInputError) as refused:
        check_result(impossible)
    assert f"result: {field}: " in str(refused.value)
    assert str(refused.value).isprintable()


class TestFile:
    def test_results_are_kept_next_to_the_checkpoint_one_of_each(self, tmp_path: Path) -> None:
        assert kept_next_to(tmp_path) == ()
        other, newer = of_text("e" * 64), replace(RESULT, started_at="2027-01-01T00:00:00+00:00")
        for result in (RESULT, other, newer):
            assert keep_next_to(tmp_path, result) == tmp_path.resolve() / KEPT_FILE
        assert kept_next_to(tmp_path) == (other, newer)
        assert [path.name for path in tmp_path.iterdir()] == [KEPT_FILE]

    def test_it_keeps_the_newest_32(self, tmp_path: Path) -> None:
        results = [of_text(f"{number:064}") for number in range(40)]
        for result in results:
            keep_next_to(tmp_path, result)
        assert kept_next_to(tmp_path) == tuple(results[8:])

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"results": 1}', "x" * ((4 << 20) + 1)])
    def test_a_file_that_is_something_else_stays_as_it_is(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / KEPT_FILE
        file.write_text(text)
        with pytest.raises(ConfigError, match="move it away"):
            keep_next_to(tmp_path, RESULT)
        assert file.read_text() == text

    def test_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="not there"):
            keep_next_to(tmp_path / "missing", RESULT)


class TestStamp:
    def test_it_follows_weights_and_configuration_and_nothing_else(self, tmp_path: Path) -> None:
        weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
        weights.write_bytes(b"1")
        config.write_text("{}")
        first = weights_stamp(tmp_path)
        (tmp_path / "README.md").write_text("x")
        keep_next_to(tmp_path, RESULT)
        assert weights_stamp(tmp_path) == first
        os.utime(weights, ns=(1, 1))
        second = weights_stamp(tmp_path)
        config.write_text("{ }")
        third = weights_stamp(tmp_path)
        (tmp_path / "more.safetensors").write_bytes(b"")
        assert len({first, second, third, weights_stamp(tmp_path)}) == 4

    def test_a_folder_that_has_gone_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="missing"):
            weights_stamp(tmp_path / "missing")


class TestStore:
    @pytest.fixture
    def base(self, tmp_path: Path) -> Path:
        folder = tmp_path / "base"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        return folder

    @pytest.fixture
    def store(self, tmp_path: Path, base: Path) -> Any:
        store = Store.open(tmp_path / "state.db")
        store.variants.put(self.row(base))
        store.put_model("base", str(base))
        yield store
        store.close()

    @staticmethod
    def row(base: Path, content_hash: str = "b" * 64) -> VariantRow:
        return VariantRow(
            name="style",
            base="base",
            base_directory=str(base),
            content_hash=content_hash,
            max_rank=8,
            num_modules=1,
            num_bytes=1,
            disk_bytes=1,
            trained_on=None,
            pinned=False,
            created_at=1.0,
        )

    @pytest.fixture
    def results(self, store: Store, base: Path) -> QualityResults:
        def resolve(name: str, **_: object) -> Any:
            if name != "base":
                raise NotFoundError(f"there is no {name}")
            return SimpleNamespace(directory=base)

        return QualityResults(store, resolve)

    def test_a_result_is_given_for_the_contents_that_it_is_of(
        self, results: QualityResults, store: Store, base: Path
    ) -> None:
        """Neither another adapter of the same name nor other weights of the base have it; it stays listed."""
        kept = of_model(weights_stamp=weights_stamp(base))
        own = of_model(name="base", variant_hash=None, weights_stamp=weights_stamp(base))
        assert results.keep(kept) == kept
        assert results.keep(own) == own
        assert results.of("style") == (kept,)
        assert results.of("base") == (own,)
        store.variants.put(self.row(base, "9" * 64), replace=True)
        assert results.of("style") == ()
        store.variants.put(self.row(base), replace=True)
        assert results.of("style") == (kept,)
        os.utime(base / "model.safetensors", ns=(1, 1))
        assert results.of("style") == results.of("base") == ()
        assert results.all() == (own, kept)

    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            pytest.param({"weights_stamp": "0" * 64}, ConflictError, id="other-weights"),
            pytest.param({"variant_hash": "0" * 64}, ConflictError, id="other-adapter"),
            pytest.param({"variant_hash": None}, ConflictError, id="no-adapter"),
            pytest.param({"sha256": None}, BadInputError, id="no-hash"),
            pytest.param({"weights_stamp": None}, BadInputError, id="no-stamp"),
            pytest.param({"name": "nothing", "variant_hash": None}, NotFoundError, id="no-model"),
            pytest.param({"engine_version": "x" * 70_000}, BadInputError, id="too-large"),
        ],
    )
    def test_what_is_not_of_these_contents_is_not_kept(
        self, results: QualityResults, base: Path, changes: dict[str, Any], error: type[Exception], golden: Golden
    ) -> None:
        with golden.raises("quality", error):
            results.keep(of_model(**{"weights_stamp": weights_stamp(base)} | changes))
        assert results.all() == ()

    def test_a_result_of_another_configuration_or_release_than_serves_it_is_not_kept(
        self, results: QualityResults, store: Store, base: Path, golden: Golden
    ) -> None:
        served = DeploymentConfig(adapter_slots=2, adapter_rank=8)
        deployed = store.add_deployment("chat", b"{}")
        worker = WorkerSpec(
            worker_id="chat-1",
            served_model="chat",
            checkpoint=str(base),
            config=served,
            stages=(StageAssignment(device_ids=("cpu:0",), num_layers=2),),
            limits=WorkerLimits(
                max_batch=1, max_batched_tokens=8, max_context_tokens=8, kv_tokens=8, memory_bytes_per_device=1
            ),
        )
        store.update_deployment(deployed.id, phase="ready", workers=to_json((worker,)))
        stamp = weights_stamp(base)
        for name, variant_hash in (("chat", None), ("style", "b" * 64)):
            true = of_model(name=name, variant_hash=variant_hash, weights_stamp=stamp, config=served)
            assert results.keep(true) == true
            other = replace(true.model, config=replace(served, engine="vllm", weights=WeightFormat.INT8))
            with golden.raises("quality", ConflictError, name):
                results.keep(replace(true, model=other))
            with pytest.raises(ConflictError):
                results.keep(replace(true, model=replace(true.model, config=None)))
        knows = QualityResults(store, lambda name, **_: None, lambda engine: {"1.0", "1.1"})
        assert knows.keep(true) == true
        with golden.raises("quality", ConflictError, "release"):
            knows.keep(replace(true, model=replace(true.model, engine_version="9.9")))
        assert len(results.all()) == 2

    def test_a_result_of_another_version_is_left_out(
        self, results: QualityResults, store: Store, base: Path
    ) -> None:
        kept = of_model(weights_stamp=weights_stamp(base))
        results.keep(kept)
        (row,) = store.quality.all(1)
        store.quality.put(replace(row, identity="0" * 64, body='{"other": 1}'))
        assert results.of("style") == (kept,)

    def test_a_base_that_has_gone_is_named(self, results: QualityResults, base: Path) -> None:
        (base / "model.safetensors").unlink()
        base.rmdir()
        with pytest.raises(CheckpointError, match="base"):
            results.of("style")

    def test_names_that_any_caller_may_ask_for_are_those_of_this_home(self, results: QualityResults) -> None:
        assert [results.is_named(name) for name in ("style", "base", "/models/base")] == [True, True, False]
