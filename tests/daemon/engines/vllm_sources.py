"""Facts of a vLLM release written back as Python files: a package that is read as those facts."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from daemon.engines.vllm.contract import (
    PROFILING_VALUES,
    SOME_TEXTS,
    SOME_VALUES,
    TEXTS,
    VALUES,
    ClassFacts,
    ReleaseFacts,
)
from daemon.engines.vllm.model_registry import REGISTRY_FILE, Registered, Registry

_MODELS = Path(REGISTRY_FILE).parent
_BACKEND = "TransformersForCausalLM"


def write_release(facts: ReleaseFacts, package: Path) -> None:
    """Write a package to ``package``; files that are there already keep their classes."""
    files: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, list[str]] = defaultdict(list)
    files["engine/arg_utils.py"] += [f"parser.add_argument({json.dumps(flag)})" for flag in facts.flags]
    files["envs.py"] += [json.dumps(name) for name in facts.variables]
    files["entrypoints/serve/lora/api_router.py"] += [json.dumps(route) for route in facts.routes]
    files["v1/metrics/loggers.py"] += [json.dumps(name) for name in facts.metrics]
    files["plugins/__init__.py"] += [json.dumps(name) for name in facts.plugin_groups]
    files["model_executor/models/registry.py"] += [json.dumps(dict.fromkeys(facts.architectures, "")) + "\n"]
    for text in facts.texts:
        files[{**TEXTS, **SOME_TEXTS}[text][-1]].append(json.dumps(text))
    for option in facts.values:
        file, name = {**VALUES, **SOME_VALUES, **PROFILING_VALUES}[option]
        files[file].append(f"{name} = Literal[{json.dumps(option.partition('=')[2])}]")
    for function in facts.functions:
        file, _, name = function.partition(":")
        files[file].append(f"def {name}(): pass")
    for module in facts.modules:
        files[module].append("")
    for name, of_class in facts.classes.items():
        file, _, class_name = name.partition(":")
        classes[file] += _class(class_name, of_class, facts)
    for file in {**files, **classes}:
        path = package / file
        there = path.read_text() if path.exists() else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([there, *files[file], *([] if there else classes[file])]) + "\n")


def write_registry(registry: Registry, package: Path) -> None:
    """Write the registry to ``package`` with a class for each architecture that generates text.

    Its digest is another one than that of the release's own file.
    """
    classes = dict(registry.text) | ({_BACKEND: registry.backend} if registry.backend else {})
    rows = {name: _module_of(one) for name, one in classes.items()}
    text = {name for name, one in registry.text.items() if not one.multimodal and not one.by_transformers}
    multimodal = {name for name, one in registry.text.items() if one.multimodal and not one.by_transformers}
    backed = registry.text.keys() - text - multimodal
    tables = {
        "_TEXT_GENERATION_MODELS": {name: (rows[name], name) for name in sorted(text)},
        "_MULTIMODAL_MODELS": {name: (rows[name], name) for name in sorted(multimodal)},
        "_EMBEDDING_MODELS": {name: ("others", name) for name in registry.others if name != _BACKEND},
        "_TRANSFORMERS_SUPPORTED_MODELS": {
            name: (rows[name], f"{'MultiModal' if registry.text[name].multimodal else ''}{name}")
            for name in sorted(backed)
        },
        "_TRANSFORMERS_BACKEND_MODELS": {_BACKEND: ("transformers", _BACKEND)} if registry.backend else {},
    }
    joined = "".join(f"    **{name},\n" for name in tables)
    lines = [f"{name} = {table!r}\n" for name, table in tables.items()]
    lines += [f"_VLLM_MODELS = {{\n{joined}}}\n"]
    lines += [
        f"_PREVIOUSLY_SUPPORTED_MODELS = {registry.removed!r}\n_OOT_SUPPORTED_MODELS = {registry.plugins!r}\n"
    ]
    folder = package / _MODELS
    folder.mkdir(parents=True, exist_ok=True)
    (package / REGISTRY_FILE).write_text("".join(lines))
    (folder / "interfaces.py").write_text("class SupportsLoRA: ...\nclass SupportsPP: ...\n")
    for module in ("own", "transformers"):
        there = {name: one for name, one in classes.items() if rows[name] == module}
        (folder / f"{module}.py").write_text(
            "from .interfaces import SupportsLoRA, SupportsPP\n"
            + "".join(
                _model(name, one, multimodal=one.multimodal and module != "own") for name, one in there.items()
            )
        )


def _module_of(one: Registered) -> str:
    return "transformers" if one.by_transformers else "own"


def _model(name: str, one: Registered, *, multimodal: bool) -> str:
    bases = [base for base, has in (("SupportsLoRA", one.lora), ("SupportsPP", one.pp)) if has]
    bases += ["Untold"] if None in (one.lora, one.pp) else []
    return f"class {'MultiModal' if multimodal else ''}{name}({', '.join(bases)}): ...\n"


def _class(name: str, facts: ClassFacts, release: ReleaseFacts) -> list[str]:
    values = {
        "max_concurrent_batches": release.batches_in_flight,
        "max_in_flight_tokens": release.tokens_in_flight,
    }
    lines = [f"class {name}:", "    pass", *(f"    {field}: int" for field in facts.fields)]
    for number, (method, parameters) in enumerate(facts.methods.items()):
        lines.append(f"    def {method}({_signature(parameters)}):")
        if number == 0:
            lines += [f"        self.{attribute} = 0" for attribute in facts.attributes]
        lines += [f"        return {value}" for value in values.get(method, ())]
        lines.append("        pass")
    return lines


def _signature(parameters: tuple[str, ...]) -> str:
    """Return a signature of parameters that end in ``=`` where they have a default; all by keyword but starred
    ones.
    """
    starred = [p for p in parameters if p.startswith("*")]
    plain = [f"{p}0" if p.endswith("=") else p for p in parameters if not p.startswith("*")]
    positional = [p for p in starred if not p.startswith("**")]
    keywords = [p for p in starred if p.startswith("**")]
    separator = positional or (["*"] if plain else [])
    return ", ".join(["self", *separator, *plain, *keywords])
