"""Adapter and stand-in against the notes taken from the engine's sources: neither has a name of its own making."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from daemon.engines.tensorrt_llm.capabilities import TABLE
from daemon.engines.tensorrt_llm.error_patterns import ERROR_PATTERNS
from daemon.engines.tensorrt_llm.iterations import _Batch, _Iteration, _Kv
from daemon.engines.tensorrt_llm.options import llm_options
from daemon.engines.tensorrt_llm.proxy import openai_error
from fingerprint.families import read_spec
from tests.daemon.engines.tensorrt_environment import CONFIG, make_checkpoint, make_spec
from tests.daemon.engines.tensorrt_stand_in import flags, options, server
from tests.daemon.engines.tensorrt_stand_in.engine import Behaviour, Engine

pytestmark = pytest.mark.skipif(
    "ISERVE_REFERENCE_DATA" not in os.environ, reason="ISERVE_REFERENCE_DATA is not set"
)


@pytest.fixture(scope="module")
def sections() -> dict[int, str]:
    """The notes by section number."""
    text = (Path(os.environ["ISERVE_REFERENCE_DATA"]) / "reference" / "tensorrt-llm.md").read_text()
    parts = re.split(r"^## (\d+)\. ", text, flags=re.MULTILINE)
    return {int(number): body for number, body in zip(parts[1::2], parts[2::2], strict=True)}


def words(text: str) -> set[str]:
    """Every name in code marks."""
    return set(re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"`([^`]+)`", text))))


def test_the_stand_in_takes_exactly_the_documented_flags(sections: dict[int, str]) -> None:
    table = [line for line in sections[1].splitlines() if line.startswith("|")]
    documented = {flag for line in table if "[new]" not in line for flag in re.findall(r"--[a-z_]+", line)}
    later = {flag for line in table if "[new]" in line for flag in re.findall(r"--[a-z_]+", line)}
    taken = {name for flag in flags._FLAGS for name in (flag[0], *flag[1])} | set(flags._SWITCHES)
    assert taken == documented
    assert later
    assert not taken & later


def test_the_stand_in_takes_documented_options_only(sections: dict[int, str]) -> None:
    documented = words(sections[2].split("QuantAlgo (")[0])
    assert set(options._KEYS) <= documented
    for name, block in options._BLOCKS.items():
        # Named in its sources (``PeftCacheConfig``), where the notes have dots.
        assert set(block) - documented == ({"max_adapter_size"} if name == "peft_cache_config" else set())
    assert documented >= options._OLDER_FLOW
    assert "YAML overrides the command line" in sections[1]


def test_the_package_takes_documented_options_only(sections: dict[int, str]) -> None:
    """The arguments of ``LLM`` are the options of the file; of its own it has whether there is a tokenizer."""
    documented = words(sections[2].split("QuantAlgo (")[0])
    library = Path(options.__file__).parent / "library"
    found = dict(
        re.findall(r"^(_DEFAULTS) = (\{.*?^\})", (library / "llm.py").read_text(), re.MULTILINE | re.DOTALL)
    )
    assert set(ast.literal_eval(found["_DEFAULTS"])) - documented == {"skip_tokenizer_init"}
    blocks = re.findall(
        r"^    DEFAULTS: ClassVar\[dict\] = (\{.*?\})$", (library / "llmapi.py").read_text(), re.M | re.S
    )
    assert len(blocks) == 3
    for block in blocks:
        assert set(re.findall(r'"(\w+)":', block)) <= documented


def test_the_adapter_gives_documented_options_only(sections: dict[int, str]) -> None:
    given = llm_options(make_spec(Path("/m"), layers=(2, 4)), read_spec(CONFIG))
    names = set(given) | {key for block in given.values() if isinstance(block, dict) for key in block}
    assert names <= words(sections[2])
    assert "--extra_llm_api_options" in sections[1]


def test_every_documented_failure_has_its_meaning(sections: dict[int, str]) -> None:
    rows = [line.split("|")[2] for line in sections[8].splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 10
    for row in rows:
        if "warning" in row and "400" not in row:
            continue  # not a failure: the cache shrinks or the length is cut
        for double, single in re.findall(r"``(.+?)``(?!`)|`([^`]+)`", row):
            quoted = (double or single).strip()
            text = quoted.replace("…", "x").replace("HOST:PORT", "h:1").replace(" N ", " 1 ").replace(" M ", " 2 ")
            flat = json.dumps({"object": "error", "message": text}).encode()
            answer = openai_error(flat)
            known = answer is not None and json.loads(answer)["error"]["code"] is not None
            if text in ("xdoesn't match",):
                text = "KV cache quantization x doesn't match"  # the note leaves out what precedes
            assert known or any(sign.pattern.search(text) for sign in ERROR_PATTERNS), quoted
    for text in ("Unknown architecture for AutoModelForCausalLM: X", "Unsupported quantization_config"):
        assert text in sections[4] + sections[5]
        assert any(sign.pattern.search(text) for sign in ERROR_PATTERNS)


def test_statistics_are_read_and_written_by_their_documented_names(
    sections: dict[int, str], tmp_path: Path
) -> None:
    expanded = re.sub(
        r"(\w+)\{Static,TunerRecommended,Runtime\}", r"\1Static \1TunerRecommended \1Runtime", sections[3]
    )
    documented = set(re.findall(r"\w+", expanded))
    for record in (_Iteration, _Batch, _Kv):
        assert {field.encode_name for field in msgspec.structs.fields(record)} <= documented
    held = options.merged(flags.parse(["m"])[2], "enable_iter_perf_stats: true")
    engine = Engine(make_checkpoint(tmp_path / "m"), held, Behaviour())
    list(engine.generate(3, 2))
    for told in engine.drain_records():
        inner = {name for value in told.values() if isinstance(value, dict) for name in value}
        assert set(told) | inner <= documented


def test_architectures_are_on_the_side_of_the_flow_that_has_them(sections: dict[int, str]) -> None:
    pytorch, older = sections[4].split("Engine flow only")
    for name in TABLE.architectures.listed:
        assert name.removesuffix("ForCausalLM") in pytorch
    for name in TABLE.architectures.reasons:
        assert name.removesuffix("ForCausalLM") in older.replace("-", "")


def test_routes_are_documented(sections: dict[int, str]) -> None:
    assert all(
        route in sections[3] for route in (*server._FIELDS, "/v1/models", "/version", "/health", "/metrics")
    )
