"""LoRA adapters on TensorRT-LLM: what the proxy makes of vLLM's requests for them, against the strict stand-in.

Not run on the real engine. The stand-in's answer names the content that it read, and what it read first with a
number stays: an answer of a wrong or an earlier adapter would be seen.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from daemon.adapter_requests import LOAD_PATH, UNLOAD_PATH
from daemon.engines.base import Inside
from daemon.engines.tensorrt_llm.adapter import TensorRtLlmEngine
from daemon.engines.tensorrt_llm.capabilities import TABLE
from daemon.engines.tensorrt_llm.lora import TARGETS, NamedAdapter, RenamedAnswer, checked_content
from daemon.engines.tensorrt_llm.options import as_yaml, llm_options
from daemon.engines.tensorrt_llm.proxy import OpenAIProxy
from fingerprint.config import DeploymentConfig
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from tests.daemon.engines.tensorrt_environment import CONFIG, config, devices, make_checkpoint, make_spec
from tests.daemon.engines.test_tensorrt_proxy import Pair, pair, play
from tests.fingerprint.small_adapters import values, write_adapter
from tests.golden_words import Golden

SLOTS = config(adapter_slots=1, adapter_rank=8)  # with four loaded
ASK = {"prompt": [1, 2], "max_tokens": 2}
Q, K, V = (f"model.layers.0.self_attn.{letter}_proj" for letter in "qkv")
UP, JOINED = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_up_proj"


def adapter(folder: Path, seed: int = 0, ranks: dict[str, int] | None = None, **fields: Any) -> Path:
    """Write an adapter of the tiny model; ``ranks`` by module."""
    ranks = ranks or {Q: 8, V: 8}
    tensors = {}
    for number, (name, rank) in enumerate(ranks.items()):
        tensors[f"base_model.model.{name}.lora_A.weight"] = values((rank, 64), seed + 2 * number)
        tensors[f"base_model.model.{name}.lora_B.weight"] = values((64, rank), seed + 2 * number + 1)
    targets = sorted({name.rpartition(".")[2] for name in ranks})
    pattern = {name: rank for name, rank in ranks.items() if rank != max(ranks.values())}
    given = {"r": max(ranks.values()), "lora_alpha": 16, "target_modules": targets, "rank_pattern": pattern}
    return write_adapter(folder, tensors, **(given | fields))


def text_of(folder: Path) -> str:
    """Return the answer of two tokens that is of this adapter alone."""
    return f"tok{sha256((folder / 'adapter_model.safetensors').read_bytes()).hexdigest()[:8]} " * 2


def served(folder: Path, configuration: DeploymentConfig = SLOTS, **behaviour: Any) -> Any:
    """Return a proxy and the stand-in, both as ``configuration`` is launched."""
    spec = make_spec(folder / "m", config=configuration)
    options = as_yaml(llm_options(spec, read_spec(CONFIG)))
    return pair(folder, options=options, config=configuration, **behaviour)


async def load(it: Pair, name: str, folder: Path) -> tuple[int, Any]:
    return await it.ask(LOAD_PATH, {"lora_name": name, "lora_path": str(folder)})


async def said(it: Pair, model: str, **more: Any) -> tuple[str, str]:
    """Return the text of an answer, and the model that it names."""
    status, answer = await it.ask("/v1/completions", {"model": model, **ASK, **more})
    assert status == 200, answer
    return answer["choices"][0]["text"], answer["model"]


def test_an_answer_is_of_the_adapter_that_its_request_names(tmp_path: Path) -> None:
    style, law = adapter(tmp_path / "style", 1), adapter(tmp_path / "law", 2)

    async def scene() -> None:
        async with served(tmp_path) as it:
            assert (await it.ask("/v1/completions", {"model": "style@1", **ASK}))[0] == 404
            assert (await load(it, "style@1", style))[0] == 200
            assert (await load(it, "law@2", law))[0] == 200
            for name, folder in (("style@1", style), ("law@2", law)):
                assert await said(it, name) == (text_of(folder), name)
            assert await said(it, "m") == ("tok tok ", "m")
            models = (await it.ask("/v1/models"))[1]["data"]
            assert [(one["id"], one.get("root"), one.get("parent")) for one in models] == [
                ("m", None, None),
                ("style@1", str(style), "m"),
                ("law@2", str(law), "m"),
            ]

    play(scene)


def test_chats_and_streams_are_of_the_adapter_and_under_its_name(tmp_path: Path) -> None:
    style = adapter(tmp_path / "style", 1)

    async def scene() -> None:
        async with served(tmp_path) as it:
            await load(it, "style@1", style)
            chat = {"model": "style@1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            answer = (await it.ask("/v1/chat/completions", chat))[1]
            assert (answer["choices"][0]["message"]["content"], answer["model"]) == (text_of(style), "style@1")
            body = json.dumps({"model": "style@1", **ASK, "stream": True}).encode()
            async with it.client.post(f"{it.url}/v1/completions", data=body) as reply:
                data = await reply.read()
            events = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
            assert events.pop() == b"[DONE]"
            chunks = [json.loads(event) for event in events]
            assert {chunk["model"] for chunk in chunks} == {"style@1"}
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(style)

    play(scene)


def test_a_number_is_of_one_content_under_any_name(tmp_path: Path) -> None:
    """Under a name that was unloaded other content is answered for, and the former content keeps its number."""
    folder, other = adapter(tmp_path / "one", 1), adapter(tmp_path / "other", 2)

    async def scene() -> None:
        async with served(tmp_path) as it:
            for content in (folder, other, folder):
                assert (await load(it, "style", content))[0] == 200
                assert (await said(it, "style"))[0] == text_of(content)
                assert (await it.ask(UNLOAD_PATH, {"lora_name": "style"}))[0] == 200
            assert len(it.engine.adapters.read) == 2
            shutil.rmtree(folder)
            adapter(folder, 3)
            await load(it, "style", folder)
            assert (await said(it, "style"))[0] == text_of(folder)
            assert sorted(it.engine.adapters.read) == [1, 2, 3]

    play(scene)


def test_an_unloaded_name_is_unknown(tmp_path: Path) -> None:
    style = adapter(tmp_path / "style", 1)

    async def scene() -> None:
        async with served(tmp_path) as it:
            await load(it, "style", style)
            assert [(await it.ask(UNLOAD_PATH, {"lora_name": "style"}))[0] for _ in range(2)] == [200, 404]
            assert (await it.ask("/v1/completions", {"model": "style", **ASK}))[0] == 404
            assert len((await it.ask("/v1/models"))[1]["data"]) == 1

    play(scene)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("ranks-differ", "lora_path"),
        ("keys-alone", "lora_path"),
        ("scales-differ", "lora_path"),
        ("other-matrix", "lora_path"),
        ("rank-too-large", "lora_path"),
        ("dora", "lora_path"),
        ("not-finite", "lora_path"),
        ("no-folder", "lora_path"),
        ("relative", "lora_path"),
        ("empty-folder", "lora_path"),
        ("base", "lora_name"),
        ("loaded", "lora_name"),
        ("too-many", "lora_name"),
        ("no-name", "lora_name"),
        ("no-path", None),
    ],
)
def test_what_would_end_the_engine_or_be_computed_otherwise_is_refused_at_its_load(
    tmp_path: Path, kind: str, field: str | None, golden: Golden
) -> None:
    good = [adapter(tmp_path / f"good-{number}", 10 * number) for number in range(5)]
    folder = {
        "ranks-differ": lambda: adapter(tmp_path / "bad", ranks={Q: 8, V: 4}),
        "keys-alone": lambda: adapter(tmp_path / "bad", ranks={K: 8, UP: 8}),
        "scales-differ": lambda: adapter(tmp_path / "bad", alpha_pattern={"q_proj": 64}),
        "other-matrix": lambda: adapter(tmp_path / "bad", ranks={JOINED: 8}),
        "rank-too-large": lambda: adapter(tmp_path / "bad", ranks={Q: 16}),
        "dora": lambda: adapter(tmp_path / "bad", use_dora=True),
        "not-finite": lambda: not_finite(tmp_path / "bad"),
        "no-folder": lambda: tmp_path / "none",
        "relative": lambda: Path("good-0"),
        "empty-folder": lambda: empty(tmp_path / "bad"),
    }.get(kind, lambda: good[4])()
    body = {"lora_name": {"base": "m", "loaded": "a0", "no-name": ""}.get(kind, "new"), "lora_path": str(folder)}
    if kind == "no-path":
        del body["lora_path"]

    async def scene() -> None:
        async with served(tmp_path) as it:
            for number in range(4 if kind == "too-many" else 1):
                assert (await load(it, f"a{number}", good[number]))[0] == 200
            status, answer = await it.ask(LOAD_PATH, body)
            assert (status, answer["error"]["param"]) == (400, field)
            golden("engines", answer["error"]["message"].replace(str(tmp_path), "/TMP"))
            assert await said(it, "a0") == (text_of(good[0]), "a0")

    play(scene)


def not_finite(folder: Path) -> Path:
    tensors = {
        f"base_model.model.{Q}.lora_{half}.weight": values(shape, 1) * (float("nan") if half == "A" else 1.0)
        for half, shape in (("A", (8, 64)), ("B", (64, 8)))
    }
    return write_adapter(folder, tensors, r=8, target_modules=["q_proj"])


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("key", [b'"lora_request"', b'"lora\\u005frequest"'], ids=["plain", "escaped"])
@pytest.mark.parametrize("value", [b'{"lora_name":"x","lora_int_id":1,"lora_path":"/etc"}', b"null", b"1"])
@pytest.mark.parametrize("model", ["m", "style"])
def test_no_client_names_a_folder_of_the_server(tmp_path: Path, key: bytes, value: bytes, model: str) -> None:
    """A null in a request of an adapter would take it away: the last field of a name counts."""
    style = adapter(tmp_path / "style", 1)

    async def scene() -> None:
        async with served(tmp_path) as it:
            await load(it, "style", style)
            body = b'{"model":"%b","prompt":[1],%b:%b}' % (model.encode(), key, value)
            status, answer = await it.ask("/v1/completions", body)
            assert (status, answer["error"]["param"]) == (400, "lora_request")
            status, answer = await it.ask("/v1/chat/completions", body)
            assert (status, answer["error"]["param"]) == (400, "lora_request")

    play(scene)


def test_a_worker_without_slots_has_no_loads(tmp_path: Path) -> None:
    style = adapter(tmp_path / "style", 1)

    async def scene() -> None:
        async with served(tmp_path, config()) as it:
            assert (await load(it, "style", style))[0] == 404
            assert (await it.ask(UNLOAD_PATH, {"lora_name": "style"}))[0] == 404

    play(scene)


@pytest.mark.parametrize("state", ["loading", "draining"])
def test_an_engine_that_serves_nothing_loads_nothing(tmp_path: Path, state: str) -> None:
    style = adapter(tmp_path / "style", 1)

    async def scene() -> None:
        async with served(tmp_path, listening=state == "draining") as it:
            it.proxy.draining = state == "draining"
            status, answer = await load(it, "style", style)
            assert (status, answer["error"]["code"]) == (503, state)
            assert len((await it.ask("/v1/models"))[1]["data"]) == 1

    play(scene)


def test_what_the_engine_says_of_an_adapter_is_the_answer_to_its_load(tmp_path: Path, golden: Golden) -> None:
    style = adapter(tmp_path / "style", 1)

    async def scene() -> None:
        async with served(tmp_path) as it:
            it.engine.adapters._max_rank = 4  # should a release count otherwise
            status, answer = await load(it, "style", style)
            assert (status, answer["error"]["code"]) == (500, "engine_error")
            golden("engines", answer["error"]["message"])
            assert (await it.ask("/v1/completions", {"model": "style", **ASK}))[0] == 404
            it.engine.adapters._max_rank = 8
            assert (await load(it, "style", style))[0] == 200  # by another number: a part was read by the first
            assert await said(it, "style") == (text_of(style), "style")

    play(scene)


def test_of_loads_at_once_each_content_has_its_number(tmp_path: Path) -> None:
    """Two of one name, of which one is refused, and two names of one content."""
    folders = [adapter(tmp_path / str(number), 10 * number) for number in range(3)]

    async def scene() -> None:
        async with served(tmp_path) as it:
            asked = (("a", folders[0]), ("a", folders[1]), ("b", folders[2]), ("c", folders[2]))
            answers = await asyncio.gather(*(load(it, *one) for one in asked))
            assert [status for status, _ in answers] == [200, 400, 200, 200]
            assert [await said(it, name) for name in "abc"] == [
                (text_of(folder), name)
                for name, folder in zip("abc", (folders[0], folders[2], folders[2]), strict=True)
            ]

    play(scene)


def test_files_that_are_gone_are_named_by_the_adapter_and_not_by_their_folder(tmp_path: Path) -> None:
    style = adapter(tmp_path / "style", 1)

    async def scene() -> None:
        async with served(tmp_path) as it:
            await load(it, "style", style)
            shutil.rmtree(style)
            status, answer = await it.ask("/v1/completions", {"model": "style", **ASK})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            assert str(tmp_path) not in json.dumps(answer)

    play(scene)


def test_content_that_is_replaced_while_the_engine_reads_it_is_not_served(
    tmp_path: Path, monkeypatch: Any
) -> None:
    style = adapter(tmp_path / "style", 1)
    read = OpenAIProxy._read_by_engine

    async def read_and_replace(self: OpenAIProxy, asked: NamedAdapter) -> Any:
        refusal = await read(self, asked)
        shutil.rmtree(style)
        adapter(style, 2)
        return refusal

    async def scene() -> None:
        async with served(tmp_path) as it:
            with monkeypatch.context() as patched:
                patched.setattr(OpenAIProxy, "_read_by_engine", read_and_replace)
                assert (await load(it, "style", style))[0] == 400
            assert (await load(it, "style", style))[0] == 200
            assert await said(it, "style") == (text_of(style), "style")

    play(scene)


def test_an_adapter_without_lora_config_would_be_left_out_without_a_word(tmp_path: Path) -> None:
    """Hence the options are those of the slots, and this stand-in can tell."""
    style = adapter(tmp_path / "style", 1)
    options = llm_options(make_spec(tmp_path / "m", config=SLOTS), read_spec(CONFIG))
    assert options.pop("lora_config")

    async def scene() -> None:
        async with pair(tmp_path, options=as_yaml(options), config=SLOTS) as it:
            assert (await load(it, "style", style))[0] == 200
            assert await said(it, "style") == ("tok tok ", "style")

    play(scene)


# --- without a process -----------------------------------------------------------------------------------------


def test_options_have_the_slots_and_ranks_of_the_configuration(tmp_path: Path) -> None:
    options = llm_options(make_spec(tmp_path, config=config(adapter_slots=3, adapter_rank=128)), read_spec(CONFIG))
    assert options["lora_config"] == {
        "lora_target_modules": list(TARGETS),
        "max_lora_rank": 128,
        "max_loras": 3,
        "max_cpu_loras": 12,
    }
    assert options["peft_cache_config"] == {"max_adapter_size": 128}
    assert options["cuda_graph_config"] is None
    assert not {"lora_config", "peft_cache_config"} & llm_options(make_spec(tmp_path), read_spec(CONFIG)).keys()


def test_content_is_values_and_configuration(tmp_path: Path) -> None:
    one, same = adapter(tmp_path / "one", 1), adapter(tmp_path / "same", 1)
    other, scaled = adapter(tmp_path / "other", 2), adapter(tmp_path / "scaled", 1, lora_alpha=4)
    hashes = [checked_content(folder, 8) for folder in (one, same, other, scaled)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("separator", ["", " "])
def test_a_stream_is_renamed_wherever_its_pieces_end(tmp_path: Path, size: int, separator: str) -> None:
    renamed = RenamedAnswer("m", NamedAdapter(name="style@1", folder=tmp_path, number=1, created=0))
    event = f'data: {{"model":{separator}"m","text":"\\"model\\":\\"m\\""}}\n\n'.encode()
    data = event * 3 + b"data: [DONE]"
    pieces = [data[begin : begin + size] for begin in range(0, len(data), size)]
    found = b"".join([*map(renamed.whole_lines, pieces), renamed.rest()])
    assert found == data.replace(f'"model":{separator}"m"'.encode(), f'"model":{separator}"style@1"'.encode())


def test_adapters_are_served_of_the_classes_that_hand_them_to_every_matrix() -> None:
    """Read in 1.3.0rc3, never run; the rest is refused with its reason, not left out silently."""
    listed = TABLE.architectures.listed
    served = {name.removesuffix("ForCausalLM") for name, one in listed.items() if one.no_lora is None}
    assert served == {"Gemma3", "Llama", "Qwen2", "Qwen3"}
    assert not TABLE.verified
    spec = read_spec(CONFIG)
    (note,) = (note for note in TABLE.notes if note.has_slots)
    assert note.text in TABLE.conditions(spec, SLOTS, gpu_spec("h200-sxm"))
    assert note.text not in TABLE.conditions(spec, config(), gpu_spec("h200-sxm"))


def test_a_container_is_written_with_the_adapters_options_and_without_the_proxy(
    tmp_path: Path, golden: Golden
) -> None:
    spec = make_spec(make_checkpoint(tmp_path / "m"), config=SLOTS)
    inside = Inside(model="/m", files="/files")
    found = TensorRtLlmEngine().container(spec, inside, devices())
    ((_, text),) = found.files
    assert json.loads(text)["lora_config"]["max_loras"] == 1
    golden("engines", found.notes[-1])
    plain = TensorRtLlmEngine().container(replace(spec, config=config()), inside, devices())
    assert plain.notes == found.notes[:-1]
