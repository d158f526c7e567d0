"""Options given to the engine: what iServe sets is refused with what to use, the rest is handed on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from daemon.engine_options import EngineOptions, option_words, read_engine_args
from daemon.engines.registry import get_engine
from daemon.engines.vllm.launch import Model, arguments
from daemon.engines.vllm.own_options import OWN_OPTIONS, TAKEN_OPTIONS
from fingerprint.codec import from_json, to_json
from fingerprint.errors import ConfigError
from fingerprint.families import read_spec
from fingerprint.model_use import ModelUse
from tests.daemon.engines.vllm_releases import recorded
from tests.daemon.engines.vllm_worker_spec import DEVICES, LLAMA_8B, worker
from tests.golden_words import Golden

VLLM = get_engine("vllm")
# Short forms, an argument without a name, and an option of before 0.24: refused with what to use all the same.
IN_NO_RELEASE = {"tp", "pp", "dp", "model-tag", "swap-space"}


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("max-num-seqs", "--batch"),
        ("max_num_seqs", "--batch"),
        ("max-num-s", "--batch"),  # argparse takes abbreviations
        ("max-model-len", "--context"),
        ("served-model-name", "--name"),
        ("compilation-config.mode", "measured"),
        ("no-enable-auto-tool-choice", "--tool-call-parser"),
        ("gpu-memory-utilization", "promised"),
        ("port", "address"),
        ("device-memory-utilization", "promised"),
        ("device-memory-ut", "promised"),
        ("gpu_memory_util", "promised"),
        ("spec-model", "promised"),
        ("spec-method", "promised"),
        ("spec-tokens", "promised"),
        ("offload-group-size", "promised"),
        ("offload-params", "promised"),
        ("disable-hybrid-kv-cache-manager", "promised"),
        ("enable-hybrid-kv-cache-manager", "promised"),
        ("no-disable-hybrid-kv-cache-manager", "promised"),
        ("quantization-config", "--quality"),
        ("quantization-config.mode", "--quality"),
        ("disable-log-stats", "statistics"),
        ("enable-log-stats", "statistics"),
        ("no_disable_log_stats", "statistics"),
        ("enable-uvicorn-access-log", "sets it"),
        ("disable-auto-tool-choice", "--tool-call-parser"),
        ("disable-expert-parallel", "--quality"),
        ("no-trust-remote-code", "code"),
        ("model-class-overrides", "code"),
        ("model_class_overrides", "code"),
        ("log-config-file", "code"),
        ("logging-config", "code"),
        ("logging-config.log_config_file", "code"),
        ("help", "prints"),
        ("hel", "prints"),
        ("enable-lora", "adapters"),
        ("trust-remote-code", "code"),
        ("api-key", "iserve keys"),
    ],
)
def test_what_iserve_sets_is_refused_with_what_to_use(name: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        VLLM.check_options(EngineOptions(arguments=((name, "1"),)))


def test_every_option_of_every_known_release_is_refused_or_taken() -> None:
    """A new release's new options must be put into one of the tables before it counts as read."""
    assert not OWN_OPTIONS.keys() & TAKEN_OPTIONS
    known = {name for facts in recorded().values() for name in facts.flags}
    assert known == {f"--{name}" for name in (OWN_OPTIONS.keys() | TAKEN_OPTIONS) - IN_NO_RELEASE}
    documented = (Path(__file__).parents[2] / "docs/engines.md").read_text()
    assert f"Each of the {len(known)} options of vLLM 0.24 to 0.33 is refused or taken by name" in documented


@pytest.mark.parametrize("prefix", ["", "no-"])
@pytest.mark.parametrize("name", sorted(OWN_OPTIONS))
def test_no_spelling_of_a_refused_option_is_taken(name: str, prefix: str) -> None:
    """Spellings: with underscores, negated, by the pair, with a key of the value, and abbreviated."""
    swapped = {f"disable-{name[7:]}"} if name.startswith("enable-") else set()
    swapped |= {f"enable-{name[8:]}"} if name.startswith("disable-") else set()
    for one in {name, *swapped}:
        for written in (one, one.replace("-", "_"), f"{one}.key"):
            with pytest.raises(ConfigError, match="cannot be given: ") as refused:
                VLLM.check_options(EngineOptions(arguments=((prefix + written, "1"),)))
            assert OWN_OPTIONS[name] in str(refused.value)
    for short in {name[:length] for length in range(1, len(name))} - TAKEN_OPTIONS:
        with pytest.raises(ConfigError, match="cannot be given: "):
            VLLM.check_options(EngineOptions(arguments=((prefix + short, "1"),)))


@pytest.mark.parametrize(
    ("name", "meant"), [("max-log-length", "max-log-len"), ("max-log", "max-log-len"), ("sede", "seed")]
)
def test_a_slip_is_refused_with_what_was_meant(name: str, meant: str, golden: Golden) -> None:
    with golden.raises("engines", ConfigError):
        VLLM.check_options(EngineOptions(arguments=((name, "1"),)))


def test_an_option_that_iserve_does_not_know_is_refused(golden: Golden) -> None:
    """An option of 0.31 was the memory limit by another name: the promise to other deployments holds."""
    with golden.raises("engines", ConfigError):
        VLLM.check_options(EngineOptions(arguments=(("xyzzy", "1"),)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("max-log-len", "max_log_len"),
        ("enable-prefix-caching", "no-enable-prefix-caching"),
        ("enable-prefix-caching", "disable_prefix_caching"),
        ("kernel-config.moe_backend", "kernel_config.moe_backend"),
    ],
)
def test_one_option_in_two_spellings_is_refused(first: str, second: str, golden: Golden) -> None:
    with golden.raises("engines", ConfigError):
        VLLM.check_options(EngineOptions(arguments=((first, "1"), (second, "2"))))


def test_two_keys_of_one_option_are_two() -> None:
    given = (("kernel-config.moe_backend", "triton"), ("kernel-config.linear_backend", "auto"))
    VLLM.check_options(EngineOptions(arguments=given))


@pytest.mark.parametrize(
    "name",
    ["max-log-len", "seed", "enable-prefix-caching", "no-enable-prefix-caching", "disable-prefix-caching"],
)
def test_the_rest_is_taken(name: str) -> None:
    VLLM.check_options(EngineOptions(arguments=((name, None),)))


def test_every_option_that_a_launch_sets_is_refused(tmp_path: Path) -> None:
    model = Model(spec=read_spec(LLAMA_8B), quantized_by="", has_tokenizer=False)
    parsers = EngineOptions(tool_call_parser="hermes", reasoning_parser="qwen3")
    words = arguments(replace(worker(tmp_path), options=parsers), model, DEVICES)
    assert words[-3:] == ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--reasoning-parser=qwen3")
    own = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
    assert own <= OWN_OPTIONS.keys()


@pytest.mark.parametrize("engine", ["torch", "tensorrt-llm"])
@pytest.mark.parametrize(
    "options", [EngineOptions(tool_call_parser="hermes"), EngineOptions(arguments=(("seed", "1"),))]
)
def test_other_engines_refuse_in_one_line(engine: str, options: EngineOptions, golden: Golden) -> None:
    with golden.raises("engines", ConfigError) as refused:
        get_engine(engine).check_options(options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "--seed", "a b", "A", "x" * 65, "a;b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="without dashes"):
        EngineOptions(arguments=((name, "1"),))


@pytest.mark.parametrize("value", ["a\nb", "\0", "x" * 4097])
def test_values_that_are_no_line(value: str) -> None:
    with pytest.raises(ConfigError, match="one line"):
        EngineOptions(arguments=(("seed", value),))


def test_words_are_read_and_written() -> None:
    read = read_engine_args(["a=1=2", "--flag", "empty="])
    assert read == {"a": "1=2", "flag": None, "empty": ""}
    assert option_words(EngineOptions(arguments=tuple(read.items()))) == ("--a=1=2", "--flag", "--empty=")
    with pytest.raises(ConfigError, match="twice"):
        read_engine_args(["a=1", "--a=2"])


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (ModelUse(), ()),
        (ModelUse(text_only=True), ("--language-model-only",)),
        (ModelUse(images=2), ('--limit-mm-per-prompt={"image": 2}',)),
        (ModelUse(images=2, image_tokens=64), ('--limit-mm-per-prompt={"image": 2}',)),
        (ModelUse(trust_remote_code=True), ("--trust-remote-code",)),
        (ModelUse(text_only=True, trust_remote_code=True), ("--language-model-only", "--trust-remote-code")),
    ],
)
def test_the_use_of_a_model_is_on_the_command_line(tmp_path: Path, use: ModelUse, words: tuple[str, ...]) -> None:
    model = Model(spec=read_spec(LLAMA_8B), quantized_by="", has_tokenizer=True)
    plain = arguments(worker(tmp_path), model, DEVICES)
    assert arguments(replace(worker(tmp_path), options=EngineOptions(use=use)), model, DEVICES) == (*plain, *words)


@pytest.mark.parametrize("name", ["language-model-only", "limit_mm_per_prompt", "limit-mm-per-prompt.image"])
@pytest.mark.parametrize("use", [ModelUse(text_only=True), ModelUse(images=1)])
def test_what_a_use_sets_is_not_set_beside_it(name: str, use: ModelUse, golden: Golden) -> None:
    VLLM.check_options(EngineOptions(arguments=((name, "0"),)))
    with golden.raises("engines", ConfigError):
        VLLM.check_options(EngineOptions(arguments=((name, "0"),), use=use))


def test_own_code_is_permitted_by_iserves_own_option(golden: Golden) -> None:
    with golden.raises("engines", ConfigError):
        VLLM.check_options(EngineOptions(arguments=(("trust_remote_code", None),)))


@pytest.mark.parametrize("engine", ["torch", "tensorrt-llm"])
@pytest.mark.parametrize(
    "use",
    [
        ModelUse(trust_remote_code=True),
        ModelUse(text_only=True),
        ModelUse(images=1),
    ],
)
def test_other_engines_refuse_such_a_use(engine: str, use: ModelUse, golden: Golden) -> None:
    with golden.raises("engines", ConfigError) as refused:
        get_engine(engine).check_options(EngineOptions(use=use))
    assert "\n" not in str(refused.value)


def test_options_that_were_stored_before_there_were_uses_are_read() -> None:
    stored = b'{"arguments": [], "tool_call_parser": "hermes", "reasoning_parser": null}'
    assert from_json(stored, EngineOptions) == EngineOptions(tool_call_parser="hermes")
    kept = EngineOptions(use=ModelUse(images=2, image_tokens=64, trust_remote_code=True))
    assert from_json(to_json(kept), EngineOptions) == kept
