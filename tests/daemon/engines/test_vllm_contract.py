"""The contract with vLLM's releases: recorded from their wheels, complete, and broken by whatever is missing."""

from __future__ import annotations

import ast
import json
import re
import re._parser as _parser  # type: ignore[import-not-found]
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.engine_options import EngineOptions
from daemon.engines.registry import get_engine
from daemon.engines.vllm import launch, metrics, release
from daemon.engines.vllm.contract import (
    CACHE_LABELS,
    FLAGS,
    METRICS,
    PROFILING_VALUES,
    PROFILING_VARIABLES,
    ROUTES,
    SOME_FLAGS,
    SOME_TEXTS,
    SOME_VALUES,
    SOME_VARIABLES,
    TEXTS,
    VALUES,
    VARIABLES,
    ClassFacts,
    Part,
    ReleaseFacts,
    breaches,
    read_release,
)
from daemon.engines.vllm.error_patterns import DULL, ERROR_PATTERNS, OTHERS_TEXTS
from daemon.engines.vllm.release import Standing, keeps_adapters_apart, standing_of
from fingerprint.config import KvFormat, SlotFormat, WeightFormat
from fingerprint.errors import EngineError
from fingerprint.model_use import ModelUse
from tests.daemon.engines.standin import make_vllm
from tests.daemon.engines.vllm_releases import published, recorded, recorded_registries
from tests.daemon.engines.vllm_sources import write_release
from tests.daemon.engines.vllm_worker_spec import DEVICES, LLAMA_8B, worker

RELEASES = recorded()
NEWEST = RELEASES["0.33.0"]
LORA_BODIES = "entrypoints/serve/lora/protocol.py"
MODEL_CARD = "entrypoints/serve/engine/protocol.py:ModelCard"
CACHE_CONFIG = "config/cache.py:CacheConfig"
PATTERNS = (*(sign.pattern for sign in ERROR_PATTERNS), DULL)
ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
WORKER = "v1/worker/gpu_worker.py:Worker"
MANAGER = "lora/model_manager.py:LoRAModelManager"
# Held by what a method returns, mixed from another class, or by the release's number.
BY_VALUE = {"config/vllm.py:VllmConfig", "entrypoints/llm.py:LLM", MANAGER}

OPTIONAL = {"VLLM_ALLREDUCE_USE_FLASHINFER"}  # releases without it have nothing that it turns off


def literals(pattern: re.Pattern[str]) -> list[str]:
    """Return the texts between what varies in a pattern, of all its alternatives."""
    found: list[str] = []

    def walk(tokens: Any) -> None:
        run = ""
        for kind, value in tokens:
            name = str(kind)
            if name == "LITERAL":
                run += chr(value)
                continue
            found.append(run)
            run = ""
            if name == "BRANCH":
                for alternative in value[1]:
                    walk(alternative)
            elif name in ("SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT"):
                walk(value[-1])
        found.append(run)

    walk(_parser.parse(pattern.pattern))
    return [run.strip(" '") for run in found]


def members_read(source: str, roots: set[str]) -> set[str]:
    """Return the attributes that the module's functions read of the named objects, without our own."""
    tree = ast.parse(source)
    ours = {
        node
        for n in tree.body
        if isinstance(n, ast.ClassDef) and n.name != "VllmProfilingEngine"
        for node in ast.walk(n)
    }
    chains = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in ours)
    found = set[str]()
    for chain in chains:
        root = next((one for one in roots if chain.startswith((f"{one}.", f"{one}["))), None)
        if root is not None:
            found.update(re.sub(r"\[.*?\]", "", chain[len(root) :]).strip(".").split("."))
    own = ("iserve_", "__", "forward")
    return {name for name in found if name and not name.startswith(own)}


def without_member(facts: ReleaseFacts, name: str) -> ReleaseFacts:
    """Return the facts of a release in which no class has the member."""

    def cut(theirs: ClassFacts) -> ClassFacts:
        return ClassFacts(
            fields=tuple(one for one in theirs.fields if one != name),
            attributes=tuple(one for one in theirs.attributes if one != name),
            methods={method: taken for method, taken in theirs.methods.items() if method != name},
        )

    return replace(facts, classes={key: cut(theirs) for key, theirs in facts.classes.items()})


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_that_is_read_keeps_the_contract(version):
    assert breaches(RELEASES[version]) == ()


@pytest.mark.parametrize("version", RELEASES)
def test_adapters_are_kept_apart_by_the_releases_that_remember_the_layout_of_slots(version):
    """The rows' slots are found anew where the layout changed, though the requests are those of the last step."""
    remembers = "_last_slot_layout" in RELEASES[version].classes[MANAGER].attributes
    assert keeps_adapters_apart(version) == remembers


def test_every_release_that_counts_as_read_was_read():
    minors = {tuple(map(int, version.split(".")[:2])) for version in RELEASES}
    assert minors == {(0, minor) for minor in range(24, 34)}
    assert {standing_of(version) for version in RELEASES} <= {Standing.RUN, Standing.READ}
    assert {standing_of(version) for version in ("0.23.2", "0.34.0", "1.0.0", "unknown", "")} == {Standing.UNKNOWN}


@pytest.mark.parametrize(
    ("version", "standing"),
    [
        ("0.33.0", Standing.RUN),
        ("0.33.0+cu130", Standing.RUN),
        ("0.33.0.post1", Standing.RUN),
        ("0.33.7", Standing.RUN),
        ("0.32", Standing.READ),
        ("0.33.0rc1", Standing.UNKNOWN),
        ("0.32.0rc2+cu130", Standing.UNKNOWN),
        ("0.33.1.dev5", Standing.UNKNOWN),
        ("0.33.1.dev5+g1a2b3c4.d20261101", Standing.UNKNOWN),
        ("0.33.0a1", Standing.UNKNOWN),
        ("0.33-beta", Standing.UNKNOWN),
        ("0.33.x", Standing.UNKNOWN),
    ],
)
def test_a_build_that_is_no_release_is_neither_run_nor_read(version, standing):
    assert standing_of(version) is standing


class TestCompleteness:
    """The contract names what the adapter uses, so that a release is held against all of it."""

    def test_flags_are_those_of_the_command_line(self, tmp_path, monkeypatch):
        """The flags include formats, several GPUs, the parsers, the worker's key, and each use of a model."""
        monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / "env", "0.33.0")))
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
        flags = set[str]()
        for use in (ModelUse(text_only=True, trust_remote_code=True), ModelUse(images=2)):
            spec = replace(
                worker(tmp_path, layers=(20, 12), tp=2, weights=WeightFormat.FP8),
                dummy_weights=True,
                options=EngineOptions(tool_call_parser="hermes", reasoning_parser="qwen3", use=use),
            )
            words = get_engine("vllm").command(spec, tmp_path, DEVICES).argv
            ours = words[words.index("--") + 1 :]
            flags |= {word.partition("=")[0] for word in ours if word.startswith("--")}
        drafts = replace(worker(tmp_path, draft_tokens=4), dummy_weights=True)
        drafting = get_engine("vllm").command(drafts, tmp_path, DEVICES).argv
        flags |= {word.partition("=")[0] for word in drafting if word.startswith("--spec")}
        slots = replace(worker(tmp_path, adapter_slots=4, adapter_rank=16), dummy_weights=True)
        with_slots = get_engine("vllm").command(slots, tmp_path, DEVICES).argv
        flags |= {word.partition("=")[0] for word in with_slots if "lora" in word and word.startswith("--")}
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"dtype": "bfloat16"}))
        monkeypatch.setattr(release, "RUN_WITH_DELTAS", frozenset({(0, 33)}))
        deltas = replace(slots, config=replace(slots.config, delta_format=SlotFormat.INT2))
        with_deltas = get_engine("vllm").command(deltas, tmp_path, DEVICES).argv
        flags |= {word.partition("=")[0] for word in with_deltas if word.startswith("--additional")}
        experts = replace(worker(tmp_path, tp=2, expert_parallel=True), dummy_weights=True)
        divided = get_engine("vllm").command(experts, tmp_path, DEVICES).argv
        flags |= {word for word in divided if "expert" in word}
        assert flags == FLAGS | SOME_FLAGS

    def test_flags_of_every_launch_are_those_of_the_plainest_one(self, tmp_path, monkeypatch):
        """A single GPU, 16-bit weights, a tokenizer, no parser."""
        monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / "env", "0.33.0")))
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
        (tmp_path / "tokenizer.json").touch()
        spec = replace(worker(tmp_path), dummy_weights=True)
        words = get_engine("vllm").command(spec, tmp_path, DEVICES).argv
        ours = words[words.index("--") + 1 :]
        assert {word.partition("=")[0] for word in ours if word.startswith("--")} == FLAGS

    def test_values_are_those_that_launches_and_profiles_give(self, tmp_path, monkeypatch):
        """Options that take a word of a list."""
        monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / "env", "0.33.0")))
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
        (tmp_path / "model.safetensors").touch()
        launches = [worker(tmp_path, kv=kv) for kv in (KvFormat.BITS16, KvFormat.INT8, KvFormat.FP8)]
        launches += [replace(one, dummy_weights=True) for one in launches]
        launches.append(worker(tmp_path, layers=(20, 12), tp=2, weights=WeightFormat.FP8))
        words = {word for one in launches for word in get_engine("vllm").command(one, tmp_path, DEVICES).argv}
        given = {word for word in words if re.fullmatch(r"--[a-z-]+=\d*[a-z_][a-z_\d]*", word)}
        assert given - {"--served-model-name=chat"} == {*VALUES, *SOME_VALUES, *PROFILING_VALUES}

    @pytest.mark.parametrize(
        ("file", "roots"),
        [
            pytest.param(
                "daemon/profiling_worker/iserve_profiling/step_timer.py",
                {"self", "worker", "scheduler_output", "cached", "r", "config", "tensor", "group", "model"}
                | {"worker_class"},
                id="step-timer",
            ),
            pytest.param(
                "daemon/profiling_worker/iserve_profiling/vllm.py",
                {"self._llm", "llm", "one"},
                id="profiling-worker",
            ),
        ],
    )
    def test_members_are_those_that_profiling_reads_of_the_engines_objects(self, file, roots):
        read = members_read((ROOT / file).read_text(), roots)
        assert len(read) >= 6, "the objects have other names in that file"
        releases = RELEASES.values()
        unnoticed = {name for name in read if not any(breaches(without_member(facts, name)) for facts in releases)}
        assert unnoticed == set()

    @pytest.mark.parametrize(
        ("function", "owner"),
        [
            pytest.param("_arguments", "engine/arg_utils.py:EngineArgs", id="engine"),
            pytest.param("generate", "sampling_params.py:SamplingParams", id="sampling"),
        ],
    )
    def test_arguments_are_those_that_profiling_gives(self, function, owner):
        tree = ast.parse((ROOT / "daemon/profiling_worker/iserve_profiling/vllm.py").read_text())
        body = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
        if function == "_arguments":
            names = {
                key.value
                for node in ast.walk(body)
                if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
                for key in node.value.keys
            } | {"quantization", "language_model_only", "trust_remote_code"}
        else:
            (call,) = (
                n for n in ast.walk(body) if isinstance(n, ast.Call) and ast.unparse(n.func) == "SamplingParams"
            )
            names = {keyword.arg for keyword in call.keywords}
        assert len(names) >= 5
        for name in names:
            without = without_member(NEWEST, name).classes[owner]
            found = breaches(replace(NEWEST, classes=NEWEST.classes | {owner: without}))
            assert [(b.part, b.what) for b in found] == [(Part.PROFILING, f"{owner}.{name}")]

    @pytest.mark.parametrize(
        ("wish", "expected"),
        [
            pytest.param({}, VARIABLES, id="plain"),
            pytest.param(
                {"layers": (20, 12), "tp": 2, "adapter_slots": 4, "adapter_rank": 16},
                VARIABLES | SOME_VARIABLES | OPTIONAL,
                id="several-gpus-with-slots",
            ),
        ],
    )
    def test_variables_are_those_of_the_environment_and_the_key(self, wish, expected):
        environment = launch.environment(worker(Path("/"), **wish), DEVICES)
        assert {name for name, _ in environment if name.startswith("VLLM_")} | {"VLLM_API_KEY"} == expected

    def test_metrics_are_those_that_statistics_are_read_of(self):
        """Counters are exported with ``_total`` and histograms with ``_count`` behind their name."""
        read = {line.decode().rstrip("{") for line in metrics._LINES}
        assert {name.removesuffix("_count") for name in read} == {
            name if name in read or f"{name}_count" in read else f"{name}_total" for name in METRICS
        }

    def test_labels_of_the_cache_are_those_that_statistics_are_read_of(self):
        """Labels are the fields of the class whose ``metrics_info`` makes them."""
        counted = "".join(
            f'vllm:{name}{{engine="0"}} 0\n' for name in metrics._READ if name != "cache_config_info"
        )

        def read(*labels):
            told = ",".join(f'{name}="16"' for name in labels)
            return metrics.read_stats("chat", f"{counted}vllm:cache_config_info{{{told}}} 1\n".encode())

        assert read(*CACHE_LABELS).kv_block_tokens == 16
        for label in CACHE_LABELS:
            with pytest.raises(EngineError, match=label):
                read(*(set(CACHE_LABELS) - {label}))
        assert all(set(CACHE_LABELS) <= set(facts.classes[CACHE_CONFIG].fields) for facts in RELEASES.values())

    def test_texts_are_those_that_failures_are_told_by(self):
        """Each piece of a sign's text is vLLM's own, which releases are held against, or named as another's."""
        pieces = {piece.lower() for pattern in PATTERNS for piece in literals(pattern) if len(piece) >= 8}
        own = TEXTS.keys() | SOME_TEXTS.keys()
        known = own | OTHERS_TEXTS.keys()
        assert not own & OTHERS_TEXTS.keys()
        assert {piece for piece in pieces if not any(piece in text.lower() for text in known)} == set()
        assert {text for text in known if not any(piece in text.lower() for piece in pieces)} == set()


def test_a_class_without_slots_is_refused_before_its_weights_are_loaded_from_0_33_on():
    (later,) = SOME_TEXTS
    assert [version for version, facts in RELEASES.items() if later in facts.texts] == ["0.33.0"]


def test_reasoning_is_answered_in_the_field_that_is_documented():
    """``reasoning`` in each release; ``reasoning_content`` is what requests alone may still say."""
    for version, facts in RELEASES.items():
        answers = [c for name, c in facts.classes.items() if name.endswith((":ChatMessage", ":DeltaMessage"))]
        assert len(answers) == 2, version
        assert all("reasoning" in one.fields and "reasoning_content" not in one.fields for one in answers), version
    documented = (DOCS / "engines.md").read_text()
    assert "answers have `reasoning` (" in documented


def test_the_decision_cites_the_errors_of_profiles_as_they_were_measured():
    """L2 by the wall's clock, which the profile of an unknown release is, in place of L3."""
    row = re.compile(r"^\| (L2 by the wall's clock \(paper\)|L3) \| (TPOT|TTFT) \| \d+ \| ([\d.]+%)", re.MULTILINE)
    measured = (DOCS / "accuracy.md").read_text().partition("## vLLM on an H200")[2]
    (wall_tpot, wall_ttft), (tpot, ttft) = (
        [median for found, _, median in row.findall(measured) if found.startswith(method)]
        for method in ("L2 by", "L3")
    )
    decision = (DOCS / "decisions/0025-vllm-releases.md").read_text()
    assert (
        f"{wall_tpot} of TPOT and {wall_ttft} of TTFT, against {tpot} and {ttft} with the step timer" in decision
    )


class TestBreaches:
    """Whatever is taken away is named, in the part of iServe that it breaks."""

    @pytest.mark.parametrize("flag", sorted(FLAGS | SOME_FLAGS))
    def test_a_flag(self, flag):
        facts = replace(NEWEST, flags=tuple(name for name in NEWEST.flags if name != flag))
        part = Part.SERVING if flag in FLAGS else Part.SOME
        assert [(b.part, b.what) for b in breaches(facts)] == [(part, f"flag {flag}")]

    @pytest.mark.parametrize("value", [*VALUES, *SOME_VALUES, *PROFILING_VALUES])
    def test_a_value_of_a_flag(self, value):
        facts = replace(NEWEST, values=tuple(one for one in NEWEST.values if one != value))
        part = Part.SERVING if value in VALUES else Part.SOME if value in SOME_VALUES else Part.PROFILING
        assert [(b.part, b.what) for b in breaches(facts)] == [(part, f"value {value}")]

    @pytest.mark.parametrize("name", sorted(VARIABLES | SOME_VARIABLES | PROFILING_VARIABLES | METRICS))
    def test_a_variable_or_a_metric(self, name):
        facts = replace(
            NEWEST,
            variables=tuple(one for one in NEWEST.variables if one != name),
            metrics=tuple(one for one in NEWEST.metrics if one != name),
        )
        assert [b.what.partition(" ")[2] for b in breaches(facts)] == [name]

    @pytest.mark.parametrize("route", sorted(ROUTES))
    def test_a_route(self, route):
        found = breaches(replace(NEWEST, routes=tuple(one for one in NEWEST.routes if one != route)))
        assert [(b.part, b.what) for b in found] == [(Part.SOME, f"route {route}")]

    @pytest.mark.parametrize("text", TEXTS)
    def test_a_text(self, text):
        facts = replace(NEWEST, texts=tuple(one for one in NEWEST.texts if one != text))
        assert [b.part for b in breaches(facts)] == [Part.FAILURES]

    @pytest.mark.parametrize("name", sorted(set(NEWEST.classes) - BY_VALUE))
    def test_a_class_without_anything(self, name):
        assert breaches(replace(NEWEST, classes=NEWEST.classes | {name: ClassFacts()}))

    @pytest.mark.parametrize(
        ("name", "member", "part"),
        [
            pytest.param(CACHE_CONFIG, "block_size", Part.SERVING, id="label-block-size"),
            pytest.param(CACHE_CONFIG, "num_gpu_blocks", Part.SERVING, id="label-blocks"),
            pytest.param(CACHE_CONFIG, "metrics_info", Part.SERVING, id="labels"),
            pytest.param(f"{LORA_BODIES}:LoadLoRAAdapterRequest", "lora_name", Part.SOME, id="load-name"),
            pytest.param(f"{LORA_BODIES}:LoadLoRAAdapterRequest", "lora_path", Part.SOME, id="load-path"),
            pytest.param(f"{LORA_BODIES}:UnloadLoRAAdapterRequest", "lora_name", Part.SOME, id="unload-name"),
            pytest.param(MODEL_CARD, "root", Part.SOME, id="card-root"),
            pytest.param(MODEL_CARD, "parent", Part.SOME, id="card-parent"),
            pytest.param("entrypoints/llm.py:LLM", "llm_engine", Part.PROFILING, id="llm-engine"),
            pytest.param("v1/engine/llm_engine.py:LLMEngine", "engine_core", Part.PROFILING, id="engine-core"),
            pytest.param("v1/engine/llm_engine.py:LLMEngine", "model_config", Part.PROFILING, id="model-config"),
            pytest.param("v1/engine/core_client.py:EngineCoreClient", "shutdown", Part.PROFILING, id="shutdown"),
            pytest.param("config/model.py:ModelConfig", "get_vocab_size", Part.PROFILING, id="vocabulary"),
            pytest.param("outputs.py:RequestOutput", "outputs", Part.PROFILING, id="outputs"),
            pytest.param("outputs.py:CompletionOutput", "token_ids", Part.PROFILING, id="token-ids"),
            pytest.param("v1/worker/worker_base.py:WorkerBase", "cache_config", Part.PROFILING, id="cache-config"),
        ],
    )
    def test_a_member_of_a_class(self, name, member, part):
        theirs = NEWEST.classes[name]
        without = replace(
            theirs,
            fields=tuple(one for one in theirs.fields if one != member),
            attributes=tuple(one for one in theirs.attributes if one != member),
            methods={method: taken for method, taken in theirs.methods.items() if method != member},
        )
        assert without != theirs
        found = breaches(replace(NEWEST, classes=NEWEST.classes | {name: without}))
        assert [(b.part, b.what.rpartition(".")[2]) for b in found] == [(part, member)]

    def test_a_release_that_does_not_tell_of_broken_graphs(self):
        found = breaches(replace(NEWEST, functions=()))
        assert [(b.part, b.what.rpartition(":")[2]) for b in found] == [
            (Part.TIMING, "is_breakable_cudagraph_enabled")
        ]

    @pytest.mark.parametrize(
        "changes",
        [
            {"batches_in_flight": ("2 * pp_size",)},
            {"batches_in_flight": ()},
            {"tokens_in_flight": ("9 * self.scheduler_config.max_num_batched_tokens",)},
            {"tokens_in_flight": ()},
        ],
    )
    def test_more_steps_in_flight_than_blocks_are_kept_for(self, changes):
        assert [b.part for b in breaches(replace(NEWEST, **changes))] == [Part.SOME]

    def test_memory_counted_in_neither_way(self):
        theirs = NEWEST.classes[WORKER]
        attributes = tuple(name for name in theirs.attributes if name != "total_consumed")
        found = breaches(
            replace(NEWEST, classes=NEWEST.classes | {WORKER: replace(theirs, attributes=attributes)})
        )
        assert [(b.part, "neither" in b.what) for b in found] == [(Part.PROFILING, True)]

    @pytest.mark.parametrize(
        ("parameters", "breaks"),
        [
            pytest.param(("scheduler_output",), False, id="as-it-is"),
            pytest.param(("scheduler_output", "more="), False, id="one-more-with-a-default"),
            pytest.param(("scheduler_output", "more"), True, id="one-more-that-is-needed"),
            pytest.param(("output",), True, id="renamed"),
        ],
    )
    def test_a_method_that_takes_something_else(self, parameters, breaks):
        theirs = NEWEST.classes[WORKER]
        changed = replace(theirs, methods={**theirs.methods, "execute_model": parameters})
        found = breaches(replace(NEWEST, classes=NEWEST.classes | {WORKER: changed}))
        assert [b.part for b in found] == ([Part.TIMING] if breaks else [])


class TestReading:
    @pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
    def test_what_is_written_as_python_is_read_as_it_was(self, tmp_path, version):
        write_release(RELEASES[version], tmp_path / "vllm")
        assert read_release(tmp_path / "vllm") == RELEASES[version]

    def test_a_folder_without_its_command_line_is_an_error(self, tmp_path):
        with pytest.raises(EngineError, match=r"has no engine/arg_utils\.py"):
            read_release(tmp_path)

    def test_files_that_are_no_python_are_as_none(self, tmp_path):
        write_release(NEWEST, tmp_path / "vllm")
        (tmp_path / "vllm/v1/metrics/loggers.py").write_bytes(b"\x00def")
        facts = read_release(tmp_path / "vllm")
        assert facts == replace(NEWEST, metrics=())


@pytest.mark.long
@pytest.mark.parametrize("version", RELEASES)
def test_the_published_wheel_is_as_recorded(version):
    try:
        found = published(version)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the wheel of {version} cannot be downloaded: {error.stderr.decode()[-200:]}")
    assert found == (RELEASES[version], recorded_registries()[version])
