"""The page of models: what is planned, cut, profiled and deployed of each architecture that vLLM lists.

``docs/generate.py`` writes it from a record (``python -m tests.fingerprint.record_model_support``, which needs
torch and takes a minute) and from the recorded runs of ``tests/bench/results``.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["model_page"]

_TESTS = Path(__file__).parents[1] / "tests"
_RECORD_FILE = _TESTS / "fingerprint" / "recorded" / "model_support.json"
_RESULTS = _TESTS / "bench" / "results"
_FAMILIES = "families_h200.json.xz"
_RUNS = {  # folder: vLLM's release
    "h200": "0.24",
    "h200-vllm-0.26": "0.26",
    "h200-vllm-0.33": "0.33",
    "families-h200-vllm-0.33": "0.33",
    "degrees-h200-vllm-0.33": "0.33",
}
# By decisions/0025-vllm-releases.md and accuracy.md; a deployment leaves no recording of its own.
_DEPLOYED = {
    "Qwen3ForCausalLM": "0.24, 0.26, 0.33",
    "Qwen2_5_VLForConditionalGeneration": "0.33, with images",
    "LlavaForConditionalGeneration": "0.33, text alone",
}
_Record = Mapping[str, Any]
NO_CLASS = "no class in transformers"  # of a record

_HEAD = """\
# Models

**Any model that your vLLM runs**: give `iserve plan` or `deploy` its folder or Hugging Face id; there is no list
of families. A plan reads `config.json` and the names and shapes of the tensors: from the safetensors headers of a
folder or of the hub (no weights, no PyTorch), or of a `config.json` alone from transformers' class.
Refused as what they are: encoder-decoders, several stacks of layers, a `config.json` alone without such a class.
Of [images and sound](#images-and-text-alone) the towers' memory is counted, their work is not. Code that a
checkpoint brings runs in vLLM with `--trust-remote-code` alone: [own code](#code-that-a-model-brings).
**Planned is not run**: fingerprints of {profiled} architectures ran on an H200, {measured} of them were measured
whole, {deployed} were deployed.

| {groups} |
|---|{columns}
{counts}

*   **planned alone**: of a `config.json` alone. Of the config that transformers' class has by default,
    `iserve plan --gpus h200:8 --engine vllm` chooses a configuration, or lacks memory alone, and counts exactly
    the parameters of the class. It needs `pip install 'iserve[torch]'`, but where *no torch* stands: these have a
    row in `fingerprint/families`.
*   **cut**: the model of its first layers alone, at both depths that a profile runs (in layers), has those layers
    as the whole has them: matrices, windows, what they keep of a sequence. Published models may have other depths.
*   **profiled**: fingerprints ran on an H200 with this release of vLLM, with random weights, and came to an
    estimate of the whole. Of {cached} architectures vLLM's own cache of each layer was recorded, of four more its
    log: the plan counts the same ([decision 27](decisions/0027-described-models.md)). **Measured**: the whole
    model too, to compare ([accuracy](accuracy.md#vllm-on-an-h200)). **Deployed**: served there by iServe
    ([decision 25](decisions/0025-vllm-releases.md), of images
    [27](decisions/0027-described-models.md#deployed-with-images)).

Made by `docs/generate.py` from the recordings in `tests/bench/results` and from what
`python -m tests.fingerprint.record_model_support` recorded on {recorded} with transformers {transformers}. How a
model is described, and what is not known of it: [decision 27](decisions/0027-described-models.md). What vLLM does
with each (TP, PP, LoRA): [engine tables](engine-tables.md#vllm).
"""
_GROUPS = (
    "vLLM {vllm} lists",
    "all",
    "with a class in transformers",
    "that builds by its defaults",
    "planned alone",
    "cut",
    "profiled",
    "measured",
    "deployed",
)
_COLUMNS = ("architecture", "model_type", "planned alone", "cut")
_IMAGES = """\
## Images and sound

Planned and profiled for text. *Towers*: parameters beside the text model's layers,
embedding and head, of the whole class, parts that speak included. A plan counts them as weights in memory; what an
image or a sound takes to work on it does not count.
"""
_USES = """\
## Images and text alone

| option of `plan`, `estimate`, `deploy`, `update` | REST | what it does |
|---|---|---|
| `--text-only` (also `report`) | `text_only` | the towers for images, video and sound are not loaded, \
and count in no figure. vLLM: `--language-model-only`, in every release from 0.24 to 0.33 |
| `--images N` | `images` | N images are added to `--input-tokens` of each planned prompt; requests may have \
that many. vLLM: `--limit-mm-per-prompt={{"image": N}}`; the context holds the prompt with them |
| `--image-tokens T` | `image_tokens` | tokens of each image, where `config.json` does not tell |

A plan says the addition apart, `512 + 2 x 576 image input`, and its JSON has `workload.images` and
`workload.tokens_per_image`; `workload.input_tokens` is the whole prompt. A profile is of the model's text alone; a
plan adds the weights of the towers unless they are left out. The time and memory that a tower takes to read an
image are in no figure. On an H200 a Qwen2.5-VL answered with `--images 1`, a LLaVA 1.5 with `--text-only`
([decision 27](decisions/0027-described-models.md#deployed-with-images)).

| kind of config | tokens of an image |
|---|---|
| `image_seq_length`, `mm_tokens_per_image` (Gemma 3), `vision_soft_tokens_per_image` (Gemma 3n), \
`num_image_tokens` (PaliGemma), `num_query_tokens` (BLIP-2) | that number |
| LLaVA 1.5, VipLLaVA | (`image_size` / `patch_size`)^2, and 1 where `vision_feature_select_strategy` is `full` |
| InternVL with `dynamic_image_size` false | (`image_size` / `patch_size` x `downsample_ratio`)^2 |
| tiles by the image's shape: LLaVA-NeXT, InternVL, Idefics 3, Llama 4 | unknown; those of a tile are said |
| patches of the image's own size: Qwen-VL, GLM-V, Pixtral, Mistral 3 | unknown: about pixels / \
(`patch_size` x `spatial_merge_size`)^2, 1369 for 1024 x 1024 pixels of Qwen2.5-VL |

Markers around an image are not counted. Refused in one line: a model without towers, the embedded engine and
TensorRT-LLM, which serve text alone, and text alone of a class whose towers vLLM always loads
(`FunASRForConditionalGeneration`; classes of transformers' that vLLM takes by its Transformers backend).

## Code that a model brings

A `config.json` with `auto_map` names Python code of the model's repository. Where vLLM's transformers knows the
`model_type`, that code is not needed and not run. Of every other such model:

| step | what becomes of the code |
|---|---|
| `plan`, `estimate` | never run, on any machine: sizes are of `config.json` and safetensors headers. A note \
says so |
| `profile`, `verify`, `deploy`, `plan --as`, `deploy --export` | refused without `--trust-remote-code` \
(`trust_remote_code: true`) |
| with it | one line says so before anything starts; vLLM gets `--trust-remote-code` and **runs the code as the \
daemon's user**. Read it first |
| files of it that are not here | named by a plan's note; with permission fetched from the hub, for a folder \
refused: the code runs complete, with what its files import from each other, or not at all |
| restart, scale to zero, `update` | the permission is kept, until `update --model` names another model |
| embedded engine, TensorRT-LLM | never run: refused, whatever is given |

Python files are fetched from the hub only with the permission, of the commit that the weights are of; code of
another repository (`owner/name--module`) is refused. A tokenizer that needs code where the model does not shows
when vLLM starts: it ends, and the line says to give the permission. A class that vLLM does not list is tried by
its Transformers backend, without tensor parallelism: not run by us.
"""
_WITHOUT = (
    "{count} more, of which transformers has no class, so that `config.json` alone does not do. Each is described "
    "by the headers of its safetensors files; no such files were at hand to try:"
)


def model_page() -> str:
    """The page."""
    record = json.loads(_RECORD_FILE.read_text(encoding="utf-8"))
    runs = _Runs()
    text, images = _of(record, multimodal=False), _of(record, multimodal=True)
    groups = {
        "text, by a class of its own": {n: one for n, one in text.items() if not one["by_transformers"]},
        "text, by transformers' class": {n: one for n, one in text.items() if one["by_transformers"]},
        "images or sound too": images,
    }
    head = _HEAD.format(
        groups=" | ".join(_GROUPS).format(vllm=record["vllm"]),
        columns="--:|" * (len(_GROUPS) - 1),
        transformers=record["transformers"],
        recorded=record["recorded"],
        counts="\n".join(_row(title, *_counts(group, runs)) for title, group in groups.items()),
        profiled=len(runs.profiled),
        measured=len(runs.measured),
        cached=runs.num_cached,
        deployed=", ".join(f"`{name}`" for name in _DEPLOYED),
    )
    return "\n".join([head, _USES.format(), _text_section(text, runs), _images_section(images, runs)])


def _of(record: _Record, *, multimodal: bool) -> _Record:
    return {n: one for n, one in record["architectures"].items() if one["multimodal"] is multimodal}


class _Runs:
    """Releases of vLLM on which fingerprints, and on which a whole model too, ran on an H200, by architecture."""

    def __init__(self) -> None:
        measured: dict[str, list[str]] = {}
        for folder, release in _RUNS.items():
            for file in sorted((_RESULTS / folder).glob("*.json.xz")):
                run = json.loads(lzma.decompress(file.read_bytes()))
                if run["profile"]["timing"] and run["whole"]:
                    measured.setdefault(run["profile"]["spec"]["architecture"], []).append(release)
        profiled = {name: list(releases) for name, releases in measured.items()}
        cached: set[str] = set()
        for run in json.loads(lzma.decompress((_RESULTS / _FAMILIES).read_bytes())):
            if run["profile"] is None:  # cut short after the engine's start
                continue
            release = dict(run["profile"]["machine"]["versions"])["engine"].removeprefix("vllm ")
            (architecture,) = json.loads(run["config"])["architectures"]
            profiled.setdefault(architecture, []).append(release.rpartition(".")[0])
            cached.add(architecture)
        self.measured, self.profiled, self.num_cached = _joined(measured), _joined(profiled), len(cached)

    def cells(self, name: str) -> tuple[str, str]:
        """Return the cells of one architecture."""
        return self.profiled.get(name, ""), self.measured.get(name, "")


def _joined(found: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: ", ".join(dict.fromkeys(releases)) for name, releases in found.items()}


def _counts(group: _Record, runs: _Runs) -> list[str]:
    rows = list(group.values())
    counted = (
        len(rows),
        sum(one["plan"] != NO_CLASS for one in rows),
        sum("parameters" in one for one in rows),
        sum(one["plan"] is None for one in rows),
        sum(one["plan"] is None and one["cut"] is None for one in rows),
        len(group.keys() & runs.profiled.keys()),
        len(group.keys() & runs.measured.keys()),
        len(group.keys() & _DEPLOYED.keys()),
    )
    return [str(count) for count in counted]


def _text_section(text: _Record, runs: _Runs) -> str:
    rows = [
        _row(*_support(name, one), *runs.cells(name), _DEPLOYED.get(name, ""))
        for name, one in _with_a_class(text).items()
    ]
    heads = (
        "architecture",
        "model_type",
        "planned from config.json alone",
        "cut",
        "profiled",
        "measured",
        "deployed",
    )
    return "\n".join(["## Text\n", _row(*heads), _row(*["---"] * len(heads)), *rows, _without_a_class(text)])


def _images_section(images: _Record, runs: _Runs) -> str:
    rows = [
        _row(*_support(name, one), runs.cells(name)[0], _DEPLOYED.get(name, ""), _towers(one))
        for name, one in _with_a_class(images).items()
    ]
    heads = (*_COLUMNS, "profiled", "deployed", "towers")
    return "\n".join([_IMAGES, _row(*heads), _row(*["---"] * 6, "--:"), *rows, _without_a_class(images)])


def _with_a_class(found: _Record) -> _Record:
    return {name: one for name, one in sorted(found.items()) if one["plan"] != NO_CLASS}


def _without_a_class(found: _Record) -> str:
    names = sorted(name for name, one in found.items() if one["plan"] == NO_CLASS)
    return f"\n{_WITHOUT.format(count=len(names))} {', '.join(f'`{name}`' for name in names)}.\n"


def _support(name: str, one: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if one["plan"] is not None:
        return f"`{name}`", f"`{one['model_type']}`", _no(one["plan"]), ""
    depths = " and ".join(map(str, sorted(one["depths"])))
    cut = f"yes: {depths}" if one["cut"] is None else _no(one["cut"])
    return f"`{name}`", f"`{one['model_type']}`", "yes" if one["needs_torch"] else "yes, no torch", cut


def _no(reason: str) -> str:
    """Return a reason without the names and the advice that follow in an error's message."""
    return "no: " + re.sub(r" \(.*|; .*", "", reason)


def _towers(one: Mapping[str, Any]) -> str:
    return f"{one['beside_parameters'] / 1e9:.2f} B" if one["plan"] is None else ""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
