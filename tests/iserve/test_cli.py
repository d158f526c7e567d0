"""The command line's contract where nothing needs to run: plan and estimate, exit codes, one line on stderr."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from iserve.api_types import PlanBody
from iserve.cli import main
from iserve.cli.live import folder_argument, model_argument
from iserve.cli.options import Wish
from iserve.settings import Settings, load_settings
from iserve.state.store import Store

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
_FALCON = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "parallel_attn": True,
    "alibi": False,
    "bias": False,
    "vocab_size": 65024,
    "torch_dtype": "bfloat16",
}


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return _LLAMA | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


MODELS: dict[str, dict[str, Any]] = {
    "Llama-2-7b": _llama(4096, 11008, 32, 32, 32),
    "Llama-2-13b": _llama(5120, 13824, 40, 40, 40),
    "Llama-2-70b": _llama(8192, 28672, 80, 64, 8),
    "falcon-7b": _FALCON
    | {
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "new_decoder_architecture": False,
    },
    "falcon-40b": _FALCON
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
    "gpt-j-6b": {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "n_embd": 4096,
        "n_inner": None,
        "n_layer": 28,
        "n_head": 16,
        "n_positions": 2048,
        "rotary_dim": 64,
        "activation_function": "gelu_new",
        "vocab_size": 50400,
        "tie_word_embeddings": False,
    },
}
INTENTS = {
    "min-latency": (),
    "min-cost": (),
    "min-memory": (),
    "min-gpu-hours": (),
    "max-throughput": (),
    "min-energy": (),
    "latency-slo": ("--slo", "ttft=5,tpot=0.5,e2e=60"),
    "cost-slo": ("--budget", "1e6"),
}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """Of a refusal: exit code 1, one line on stderr, nothing else."""
        assert (self.code, self.out) == (1, ""), (self.code, self.out, self.err)
        assert self.err.count("\n") == 1
        assert self.err.startswith("iserve: ")
        return self.err.strip()


@pytest.fixture
def iserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """The command, in this process, with a home where nothing has ever run and nothing can be started."""
    for name in os.environ:
        if name.startswith("ISERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def start(*_: object) -> None:
        raise AssertionError("a controller would be started")

    monkeypatch.setattr("iserve.client.spawn_detached", start)

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["iserve", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with only the config of one of ``MODELS``."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[name]))
        return folder

    return make


def test_the_plans_document_is_the_contracts(iserve: Callable[..., Done], model: Callable[[str], Path]) -> None:
    document = iserve("plan", model("Llama-2-70b"), "--gpus", "a6000:8", "--json").document
    assert {"model", "intent", "candidates", "chosen", "why_not"} <= document.keys()
    assert (document["model"], document["intent"]) == ("Llama-2-70b", "min-cost")
    assert len(document["candidates"]) == 180  # the paper's count for this model on 8 GPUs
    for candidate in document["candidates"]:
        assert {"config", "estimate", "objective", "feasible", "reason"} <= candidate.keys()
        assert candidate["config"].keys() == {"tp", "pp", "weights", "kv", "pruning", "engine"}
        assert candidate["feasible"] == (candidate["reason"] is None)
        estimate = candidate["estimate"]
        if estimate is None:
            assert not candidate["feasible"]
            continue
        assert estimate.keys() >= {
            "memory_bytes_per_gpu",
            "memory_bytes_total",
            "cost",
            "ttft_s",
            "tpot_s",
            "e2e_s",
        }
        assert estimate["memory_bytes_per_gpu"] <= estimate["memory_bytes_total"]
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            assert estimate[name].keys() == {"value", "low", "high", "source"}
            assert 0 < estimate[name]["low"] <= estimate[name]["value"] <= estimate[name]["high"]
            assert estimate[name]["source"] == "roofline"
    configs = [tuple(candidate["config"].values()) for candidate in document["candidates"]]
    assert len(set(configs)) == 180


@pytest.mark.parametrize("gpus", ["a6000:8", "h200:4"])
@pytest.mark.parametrize("intent", INTENTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_intent_gives_an_explained_answer(
    iserve: Callable[..., Done], model: Callable[[str], Path], name: str, intent: str, gpus: str
) -> None:
    document = iserve("plan", model(name), "--gpus", gpus, "--intent", intent, *INTENTS[intent], "--json").document
    candidates = document["candidates"]
    assert document["chosen"] == 0
    feasible = [candidate["feasible"] for candidate in candidates]
    assert feasible == sorted(feasible, reverse=True)  # best first within feasible, the refused behind
    objectives = [candidate["objective"] for candidate in candidates if candidate["feasible"]]
    assert objectives == sorted(objectives, reverse=intent == "max-throughput")
    assert all(candidate["reason"] for candidate in candidates if not candidate["feasible"])
    assert {c["config"]["weights"] for c in candidates if c["feasible"]} <= {"16bit", "int8", "fp8"}
    assert all(better["reason"] for better in document["why_not"]["better"])


def test_nothing_feasible_is_an_answer_with_the_nearest(
    iserve: Callable[..., Done], model: Callable[[str], Path]
) -> None:
    done = iserve("plan", model("Llama-2-70b"), "--gpus", "a6000:1", "--json")
    assert done.err == ""
    assert done.document["chosen"] is None
    assert not any(candidate["feasible"] for candidate in done.document["candidates"])
    slow = ("--intent", "latency-slo", "--slo", "ttft=1e-6,tpot=1e-9")
    document = iserve("plan", model("Llama-2-7b"), "--gpus", "a6000:8", *slow, "--json").document
    assert document["chosen"] is None
    assert document["why_not"]["nearest"]["text"]
    one_limit = ("--intent", "latency-slo", "--slo", "tpot=0.001")
    document = iserve("plan", model("Llama-2-70b"), "--gpus", "a6000:8", *one_limit, "--json").document
    (relax,) = document["why_not"]["relax"]
    assert (relax["limit"], relax["allowed"]) == ("tpot", 0.001)
    assert relax["needed"] > 0.001
    text = iserve("plan", model("Llama-2-7b"), "--gpus", "a6000:8", *slow)
    assert text.code == 0
    assert "nothing is feasible" in text.out


def test_the_plan_as_text_shows_the_ranking_and_the_refusals(
    iserve: Callable[..., Done], model: Callable[[str], Path]
) -> None:
    text = iserve("plan", model("Llama-2-7b"), "--gpus", "a6000:8").out
    assert "chosen" in text
    assert "refused" in text
    assert "quality not measured" in text


@pytest.mark.parametrize("name", ["a[bold]b", "a[", "[red]x[", "tada :tada: x"])
def test_a_folders_name_is_shown_as_it_is(
    iserve: Callable[..., Done], model: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """It may hold what the terminal library takes for markup."""
    shutil.copytree(model("Llama-2-7b"), tmp_path / name)
    assert iserve("plan", tmp_path / name, "--gpus", "a6000:2").out.startswith(f"{name} on 2 x a6000")
    assert iserve("estimate", tmp_path / name, "--gpu", "a6000").out.startswith(f"{name} on 1 x a6000")


def test_a_folder_whose_name_is_not_utf8_is_one_line(
    iserve: Callable[..., Done], model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / os.fsdecode(b"n\xff")
    shutil.copytree(model("Llama-2-7b"), folder)
    for arguments in (("plan", folder, "--gpus", "a6000:2", "--json"), ("plan", folder), ("deploy", folder)):
        assert "not UTF-8" in iserve(*arguments).line


def test_a_registered_name_comes_before_a_folder_everywhere(
    iserve: Callable[..., Done], model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing runs it is read from the state; what a running controller is sent is the name too."""
    store = Store.open(tmp_path / "home" / "state.db")
    store.put_model("known", str(model("Llama-2-13b")))
    store.close()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model("Llama-2-7b"), tmp_path / "known")
    for name, layers in (("known", 40), ("./known", 32)):
        assert iserve("estimate", name, "--gpu", "h200", "--json").document["memory"]["num_layers"] == layers
        assert iserve("report", name, "--gpus", "h200:1", "--json").document["spec"]["num_layers"] == layers
    assert iserve("report", "iserve-demo", "--gpus", "h200:1", "--json").document["spec"]["num_layers"] == 8
    settings = load_settings()
    assert model_argument("known", settings) == "known"
    assert model_argument("./known", settings) == str(tmp_path / "known")
    assert folder_argument("known") == str(tmp_path / "known")


def test_the_installations_policy_holds_for_plans_too(
    iserve: Callable[..., Done], model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISERVE_POLICY", "no-such")
    assert "no-such" in iserve("plan", model("Llama-2-7b"), "--gpus", "a6000:2").line
    monkeypatch.setenv("ISERVE_POLICY", "packing")
    assert iserve("plan", model("Llama-2-7b"), "--gpus", "a6000:2", "--policy", "hybrid").code == 0


def test_doctor_looks_and_makes_nothing(
    iserve: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"home {tmp_path / 'home'}: " in iserve("doctor").out
    assert not (tmp_path / "home").exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "file" / "home"))
    assert f"PROBLEM: home {tmp_path / 'file' / 'home'} cannot be used" in iserve("doctor").out


def test_the_command_line_and_the_rest_api_wish_alike() -> None:
    """The same fields with the same defaults, whatever is left out."""
    assert PlanBody().model_dump(exclude={"model", "gpus"}) == Wish().body()
    asked = Wish(slo="ttft=0.5,e2e=10", rate=2.0, percentile=99, policy="packing", engine="torch", batch=4)
    assert PlanBody.model_validate(asked.body()).options(
        default_policy="hybrid", load_threshold=0.25
    ) == asked.checked(Settings(load_threshold=0.25))


def test_what_cannot_be_written_is_one_line(model: Callable[[str], Path], tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("iserve")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ISERVE_")}
    for more in ([], ["--json"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [command, "plan", model("Llama-2-7b"), "--gpus", "a6000:2", *more],
                env=environment | {"ISERVE_HOME": str(tmp_path / "home")},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                check=False,
            )
        assert (done.returncode, done.stderr) == (1, "iserve: No space left on device\n")


def test_help_loads_nothing_heavy() -> None:
    """So that it comes at once: no numbers, no engine, no server, no database."""
    code = "import sys, iserve.cli.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"numpy", "torch", "transformers", "pydantic", "fastapi", "sqlalchemy", "aiohttp", "sklearn"}
    assert heavy.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("intent", ["min-cost", "max-throughput", "min-latency"])
def test_a_narrow_terminal_shows_no_figure_cut_short(
    iserve: Callable[..., Done],
    model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    intent: str,
    width: int,
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    arguments: tuple[object, ...] = ("plan", model("Llama-2-7b"), "--gpus", "a6000:8", "--intent", intent)
    if width != 80:  # with the pruned ones a row has more than 80 characters
        arguments += ("--quality", "any")
    document = iserve(*arguments, "--json").document
    lines = re.sub(r"\x1b\[[0-9;]*m", "", iserve(*arguments).out).splitlines()
    assert "…" not in "".join(lines)
    (start,) = [index for index, line in enumerate(lines) if line.startswith("#")]
    for number, candidate in enumerate(document["candidates"][:12]):
        row = lines[start + 1 + number].split()
        assert row[:3] == [str(number + 1), str(candidate["config"]["tp"]), str(candidate["config"]["pp"])]
        assert f"{candidate['objective']:.4g}" in row
        assert row[-1] == "r"
        assert f"{candidate['estimate']['tpot_s']['value'] * 1e3:.3g}" in row
    if width >= 80:
        assert all(len(line) <= width for line in lines)


def test_an_estimate_is_the_plans(iserve: Callable[..., Done], model: Callable[[str], Path]) -> None:
    folder, work = model("Llama-2-13b"), ("--batch", "8", "--input-tokens", "256", "--output-tokens", "64")
    config = "tp=2,pp=1,weights=16bit,kv=16bit,pruning=none"
    one = iserve("estimate", folder, "--gpu", "h200", "--config", config, *work, "--json").document
    assert one["runnable"] is True
    assert one["reason"] is None
    plan = iserve("plan", folder, "--gpus", "h200:2", *work, "--json").document
    (same,) = [
        c
        for c in plan["candidates"]
        if (c["config"]["tp"], c["config"]["pp"], c["config"]["weights"], c["config"]["kv"])
        == (2, 1, "16bit", "16bit")
        and c["config"]["pruning"] == "none"
    ]
    assert one["estimate"] == same["estimate"]
    assert "TPOT" in iserve("estimate", folder, "--gpu", "h200", "--config", config).out


def test_an_estimate_takes_the_checkpoint_s_own_weights(iserve: Callable[..., Done], tmp_path: Path) -> None:
    """Those of a quantized one too; who names others is told why not."""
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    folder = tmp_path / "quantized"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Llama-2-7b"] | {"quantization_config": quantization}))
    for config in ("tp=1", "kv=fp8", "tp=2,weights=stored"):
        found = iserve("estimate", folder, "--gpu", "h200", "--config", config, "--json").document
        assert (found["config"]["weights"], found["runnable"], found["reason"]) == ("stored", True, None)
    told = iserve("estimate", folder, "--gpu", "h200", "--config", "weights=16bit", "--json").document
    assert not told["runnable"]
    assert "gptq" in told["reason"]
    assert told["memory"]["layer_weight_bytes"] > 3 * found["memory"]["layer_weight_bytes"]


def test_an_estimate_that_does_not_fit_says_so(iserve: Callable[..., Done], model: Callable[[str], Path]) -> None:
    document = iserve("estimate", model("Llama-2-70b"), "--gpu", "a6000", "--config", "tp=1", "--json").document
    assert document["runnable"] is False
    assert "GiB" in document["reason"]


_PLAN = ("plan", "{}", "--gpus", "a6000:8")
_ESTIMATE = ("estimate", "{}", "--gpu", "h200", "--config")


@pytest.mark.parametrize(
    "arguments",
    [
        (*_PLAN, "--intent", "cheapest"),
        (*_PLAN, "--cost", "euros"),
        (*_PLAN, "--quality", "best"),
        (*_PLAN, "--policy", "best"),
        (*_PLAN, "--slo", "ttft"),
        (*_PLAN, "--slo", "ttft=fast"),
        (*_PLAN, "--slo", "ttft=0"),
        (*_PLAN, "--slo", "ttft=nan"),
        (*_PLAN, "--slo", "ttft=-1"),
        (*_PLAN, "--slo", "ttft=1,ttft=2"),
        (*_PLAN, "--slo", "p99=1"),
        (*_PLAN, "--slo", ""),
        (*_PLAN, "--percentile", "0"),
        (*_PLAN, "--percentile", "100"),
        (*_PLAN, "--percentile", "nan"),
        (*_PLAN, "--batch", "0"),
        (*_PLAN, "--batch", "-1"),
        (*_PLAN, "--batch", "1.5"),
        (*_PLAN, "--input-tokens", "0"),
        (*_PLAN, "--output-tokens", "0"),
        (*_PLAN, "--rate", "0"),
        (*_PLAN, "--rate", "nan"),
        (*_PLAN, "--rate", "inf"),
        (*_PLAN, "--budget", "-1"),
        (*_PLAN, "--budget", "nan"),
        (*_PLAN, "--intent", "latency-slo"),
        (*_PLAN, "--intent", "cost-slo"),
        (*_PLAN, "--engine", "no-such"),
        (*_PLAN, "--no-such-option"),
        ("plan", "{}", "--gpus", "a6000:0"),
        ("plan", "{}", "--gpus", "a6000:-1"),
        ("plan", "{}", "--gpus", "a6000:1000000000"),
        ("plan", "{}", "--gpus", "no-such:1"),
        ("plan", "{}", "--gpus", ""),
        ("plan",),
        (*_ESTIMATE, "tp=0"),
        (*_ESTIMATE, "tp=x"),
        (*_ESTIMATE, "tp"),
        (*_ESTIMATE, "tp=1,tp=2"),
        (*_ESTIMATE, "weights=3bit"),
        (*_ESTIMATE, "tp=1", "--engine", "no-such"),
        ("estimate", "{}", "--gpu", "no-such"),
        ("estimate", "{}"),
        ("plan", "", "--gpus", "a6000:8"),
        ("estimate", " ", "--gpu", "h200"),
        ("report", ""),
        ("profile", ""),
        ("deploy", ""),
        ("deploy", "--name", ""),
        ("deploy", "--name", "a b"),
        ("deploy", "--name", "x" * 64),
        ("deploy", "--slo", "p99=1"),
        ("deploy", "--intent", "cost-slo"),
        ("deploy", "--batch", "0"),
        ("deploy", "--engine", "no-such"),
        ("deploy", "--policy", "best"),
        ("deploy", "--policy", "look-ahead"),  # nobody tells it the load
        ("deploy", "--scale-to-zero", "0"),
        ("deploy", "--scale-to-zero", "nan"),
        ("profile", "--max-seconds", "0"),
        ("profile", "--max-seconds", "nan"),
        ("profile", "--engine", "no-such"),
        ("logs", "a", "--lines", "0"),
        ("chat", "a", "b", "--temperature", "-1"),
        ("keys", "create", "--scope", "root"),
        ("keys", "create", "--label", ""),
        ("keys", "create", "--label", "x" * 5000),
        ("no-such-command",),
    ],
    ids=" ".join,
)
def test_a_bad_option_value_is_a_usage_error(
    iserve: Callable[..., Done], model: Callable[[str], Path], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = iserve(*(a.format(model("Llama-2-7b")) for a in arguments))
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err
    assert not (tmp_path / "home").exists()  # nothing was started to find that out


def test_a_workload_beyond_the_models_context_is_refused(
    iserve: Callable[..., Done], model: Callable[[str], Path]
) -> None:
    work = ("--input-tokens", "4000", "--output-tokens", "97")
    assert "4097" in iserve("plan", model("Llama-2-7b"), "--gpus", "a6000:8", *work).line
    assert "4097" in iserve("estimate", model("Llama-2-7b"), "--gpu", "h200", *work).line


def test_a_model_that_cannot_be_cut_so_is_refused(
    iserve: Callable[..., Done], model: Callable[[str], Path]
) -> None:
    """71 heads divide by no tensor parallel degree but 1; 33 stages are more than the layers."""
    for name, config in (("falcon-7b", "tp=2"), ("Llama-2-7b", "pp=33")):
        done = iserve("estimate", model(name), "--gpu", "h200", "--config", config, "--json")
        if done.code:
            assert done.line
        else:
            assert done.document["runnable"] is False
            assert done.document["reason"]


BAD_CONFIGS: dict[str, Any] = {
    "no-json": b"{",
    "not-utf8": b"\xff\xfe\x00",
    "a-list": b"[]",
    "deep": b"[" * 100_000,
    "huge": b" " * (64 << 20),
    "empty": b"",
    "no-model-type": {},
    "unknown-model": {"model_type": "no-such-model"},
    "encoder-decoder": {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "architectures": ["T5ForConditionalGeneration"],
    },
    "encoder": {"model_type": "bert", "architectures": ["BertModel"]},
    "vision": {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_config": {}},
    "negative": MODELS["Llama-2-7b"] | {"hidden_size": -4096},
    "zero": MODELS["Llama-2-7b"] | {"num_hidden_layers": 0},
    "absurd": MODELS["Llama-2-7b"] | {"num_hidden_layers": 10**12},
    "absurd-vocab": MODELS["Llama-2-7b"] | {"vocab_size": 10**30},
    "a-text": MODELS["Llama-2-7b"] | {"hidden_size": "4096"},
    "a-fraction": MODELS["Llama-2-7b"] | {"num_attention_heads": 31.5},
    "not-divisible": MODELS["Llama-2-7b"] | {"num_key_value_heads": 7},
    "true": MODELS["Llama-2-7b"] | {"num_hidden_layers": True},
    "code": {"model_type": "custom", "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}},
}


@pytest.mark.parametrize("fault", BAD_CONFIGS)
def test_a_config_that_cannot_be_used_is_one_line(iserve: Callable[..., Done], tmp_path: Path, fault: str) -> None:
    content = BAD_CONFIGS[fault]
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    lines = {
        iserve("plan", folder, "--gpus", "a6000:8", "--json").line,
        iserve("estimate", folder, "--gpu", "h200").line,
    }
    assert len(lines) == 1
    assert len(lines.pop()) < 1000
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("name", ["no/such/folder", "no-such-model", "a\x00b", "x" * 5000, "~no-such-user/x", "-"])
def test_a_model_that_is_not_there_is_one_line(
    running_home: Any, iserve: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert len(iserve("plan", "--gpus", "a6000:8", "--", name).line) < 1000
    assert len(iserve("report", "--gpus", "a6000:8", "--", name).line) < 1000
    for variable, value in running_home.environment.items():
        monkeypatch.setenv(variable, value)
    for command in ("plan", "deploy", "profile", "report"):
        assert len(iserve(command, "--", name).line) < 1000
    assert iserve("ps", "--json").document == []


def test_an_empty_folder_and_a_file_are_one_line(iserve: Callable[..., Done], tmp_path: Path) -> None:
    assert "config.json" in iserve("plan", tmp_path, "--gpus", "a6000:8").line
    file = tmp_path / "weights.bin"
    file.write_bytes(b"\x80\x04")
    assert "file" in iserve("plan", file, "--gpus", "a6000:8").line


def _header(tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


_ONE_TENSOR = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
BAD_WEIGHTS: dict[str, dict[str, bytes]] = {
    "none": {},
    "pickle": {"pytorch_model.bin": b"\x80\x04."},
    "truncated": {"model.safetensors": _header(_ONE_TENSOR) + b"\0" * 15},
    "header-cut": {"model.safetensors": _header(_ONE_TENSOR)[:20]},
    "empty": {"model.safetensors": b""},
    "absurd-header": {"model.safetensors": struct.pack("<Q", 2**62)},
    "lfs": {"model.safetensors": b"version https://git-lfs.github.com/spec/v1\n"},
    "index-names-missing": {"model.safetensors.index.json": b'{"weight_map": {"a": "model-00001.safetensors"}}'},
    "index-leads-out": {"model.safetensors.index.json": b'{"weight_map": {"a": "../../etc/passwd"}}'},
    "not-this-models": {"model.safetensors": _header(_ONE_TENSOR) + b"\0" * 16},
}


@pytest.mark.parametrize("fault", BAD_WEIGHTS)
def test_weights_that_cannot_be_served_are_one_line_and_leave_nothing(
    running_home: Any, iserve: Callable[..., Done], tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a running installation: refused on deploy, and on register where there is something to refuse."""
    for name, value in running_home.environment.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Llama-2-7b"]))
    for name, content in BAD_WEIGHTS[fault].items():
        (folder / name).write_bytes(content)
    if fault == "not-this-models":  # only cutting a fingerprint finds out, which reads the tensors that it needs
        assert iserve("profile", folder, "--json").line
    elif fault != "none":
        assert iserve("register", "bad", folder, "--json").line
    refused = iserve("deploy", folder, "--json", "--name", "bad").line
    assert {"none": "no weights", "pickle": "only pickle", "truncated": "truncated"}.get(fault, "") in refused
    assert iserve("ps", "--json").document == []
    assert [m["name"] for m in running_home.get("/api/v1/models")] == ["iserve-demo"]
    assert running_home.worker_pids() == {}
    assert not list(running_home.home.glob("fingerprints/*"))


@pytest.fixture(scope="module")
def running_home(shared_home: Any) -> Any:
    shared_home.run("up")
    return shared_home


@pytest.mark.parametrize(
    ("words", "offered"), [("iserve dep", "deploy"), ("iserve plan --int", "--intent"), ("iserve trace s", "show")]
)
def test_a_shell_completes_commands_and_options(words: str, offered: str, tmp_path: Path) -> None:
    asked = {"_ISERVE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    kept = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = Path(sys.executable).with_name("iserve")
    done = subprocess.run([command], env=kept | asked, capture_output=True, text=True, timeout=60, check=True)
    assert offered in done.stdout.split()
    assert not list(tmp_path.iterdir())
