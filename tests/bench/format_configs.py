"""Writes config.json files of one model in every quantized format that vLLM runs without conversion.

    python -m tests.bench.format_configs OUT MODEL [FORMAT ...]

MODEL is a folder with the config.json of a model in 16 bits, or a name of
``tests/fingerprint/recorded/public_models.json``; OUT/NAME-FORMAT/config.json is the same model stored in FORMAT.
Each ``quantization_config`` is what the writers of such checkpoints leave (AutoAWQ, GPTQModel, llm-compressor,
OpenAI's GPT-OSS) and vLLM 0.33 reads. There are no weights: vLLM makes some by itself with ``--load-format
dummy``. Kernels are those of vLLM 0.33's sources on a GPU of compute capability 9.0; the log of a run says which
were taken.

Whether dummy weights take the time of a checkpoint's: no kernel here branches on a weight, and with ``desc_act``
false no index is read, so the work is the same. But a GPU at its power limit is faster on constants than on random
bits. vLLM draws 16-bit weights and all scales within 0.001, 8-bit floats within 1, int8 weights and packed 4-bit
floats as random bytes, and gives every exponent of MXFP4 one legal value. Words of several integers (int32:
``qweight``, ``weight_packed``, ``qzeros``) it leaves as the memory was, mostly zeros: any word is legal, and the
profiling worker fills them with random ones (``iserve_profiling.random_words``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fingerprint.config import WeightFormat
from fingerprint.config_json import read_config
from fingerprint.errors import ConfigError

__all__ = ["FORMATS", "Format", "formats_of", "model_folder", "write_format"]

_PUBLIC = Path(__file__).parents[1] / "fingerprint/recorded/public_models.json"

_GROUP = 128
_EXPERTS_ALONE = "gpt_oss"  # whose class vLLM runs in 16 bits and with MXFP4 experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Storage of a model's linear matrices, and the kernel that multiplies by them."""

    weights: WeightFormat  # that a worker is asked for
    quantization: Mapping[str, object] | None  # ``quantization_config``; None: the checkpoint is in 16 bits
    kernel: str


def _compressed(form: str, weights: Mapping[str, object], inputs: Mapping[str, object] | None) -> Format:
    """Return a format of llm-compressor: ``weights`` and ``inputs`` are its arguments of the two."""
    shared = {"actorder": None, "block_structure": None, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**shared, "dynamic": False, "observer": "minmax", **weights},
        "input_activations": None if inputs is None else {**shared, "dynamic": True, "observer": None, **inputs},
        "output_activations": None,
    }
    kernels = {"pack-quantized": "Machete", "int-quantized": "CutlassInt8ScaledMM"}
    return Format(
        weights=WeightFormat.STORED,
        quantization={
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": form,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        },
        kernel=kernels.get(form, "CutlassFP8ScaledMM"),
    )


def _stored(kernel: str, method: str, **settings: object) -> Format:
    return Format(weights=WeightFormat.STORED, quantization={"quant_method": method, **settings}, kernel=kernel)


_BYTES = {"num_bits": 8, "strategy": "channel"}
_INPUTS = {"num_bits": 8, "strategy": "token"}
_NOT_EXPERTS = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")

FORMATS: Mapping[str, Format] = {
    "16bit": Format(weights=WeightFormat.BITS16, quantization=None, kernel="torch"),
    "fp8": Format(weights=WeightFormat.FP8, quantization=None, kernel="CutlassFP8ScaledMM"),  # while loading
    "fp8-dynamic": _compressed("float-quantized", {**_BYTES, "type": "float"}, {**_INPUTS, "type": "float"}),
    "w8a8": _compressed("int-quantized", {**_BYTES, "type": "int"}, {**_INPUTS, "type": "int"}),
    "w4a16": _compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}, None
    ),
    "gptq": _stored("Machete", "gptq", bits=4, group_size=_GROUP, desc_act=False, sym=True, lm_head=False),
    "awq": _stored("Machete", "awq", bits=4, group_size=_GROUP, zero_point=True, version="gemm"),
    "mxfp4": _stored("OAITritonMxfp4ExpertsMonolithic", "mxfp4", modules_to_not_convert=list(_NOT_EXPERTS)),
}


def formats_of(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the formats in which vLLM runs this model.

    Raises:
        ConfigError: the model is quantized already.
    """
    if config.get("quantization_config"):
        raise ConfigError("the model is quantized already; give the config.json of the one in 16 bits")
    if config.get("model_type") == _EXPERTS_ALONE:
        return ("16bit", "mxfp4")
    return tuple(name for name in FORMATS if name != "mxfp4")


def model_folder(named: str, work: Path) -> Path:
    """Return the folder ``named``, or one below ``work`` with the recorded config of the model of that name.

    Raises:
        ConfigError: there is neither.
    """
    if Path(named, "config.json").is_file():
        return Path(named).resolve()
    models = json.loads(_PUBLIC.read_text())["models"]
    if named not in models:
        raise ConfigError(f"{named} is neither a folder with a config.json nor a model of {_PUBLIC.name}")
    folder = work / named.rpartition("/")[2]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(models[named]["config"]))
    return folder


def write_format(model: Path, name: str, out: Path) -> Path:
    """Write ``out``/MODEL-``name``/config.json and return its folder.

    Raises:
        ConfigError: vLLM does not run the model in that format, or it is quantized already.
    """
    config = read_config(model)
    if name not in (known := formats_of(config)):
        raise ConfigError(f"{model.name} runs in {', '.join(known)}, got {name}")
    folder, quantization = out / f"{model.name}-{name}", FORMATS[name].quantization
    folder.mkdir(parents=True, exist_ok=True)
    said = {"dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16"}
    if quantization is not None:
        said["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps({**config, **said}, indent=1) + "\n")
    return folder


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", help="folder with a config.json in 16 bits, or a recorded model's name")
    parser.add_argument("formats", nargs="*", help=f"of {', '.join(FORMATS)}; all that the model runs in")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as work:
        model = model_folder(options.model, Path(work))
        for name in options.formats or formats_of(read_config(model)):
            print(write_format(model, name, options.out))


if __name__ == "__main__":
    main()
