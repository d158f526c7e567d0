"""A LoRA merged into the bundled model, deployed on the embedded engine: other tokens, and the right ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from iserve.demo import demo_model_path
from tests.fingerprint.small_adapters import values, write_adapter

RANK, ALPHA = 4, 32
PROMPTS = [list(text.encode()) for text in ("123+456=", "Once upon", "abc")]
NUM_TOKENS = 12
LEAST_MARGIN = 0.2  # of the first logit over the second; that of two orders of summing in bfloat16 is 0.1
WORK = ("--input-tokens", "64", "--output-tokens", "32", "--batch", "2")


def load_demo() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.bfloat16).eval()


def updates() -> dict[str, tuple[Any, Any]]:
    """Return A and B of every query and down projection of the demo model."""
    names = (
        name for name, _ in load_demo().named_parameters() if name.endswith(("q_proj.weight", "down_proj.weight"))
    )
    model = load_demo().state_dict()
    return {
        name.removesuffix(".weight"): (
            values((RANK, model[name].shape[1]), 2 * number, 0.1),
            values((model[name].shape[0], RANK), 2 * number + 1, 0.1),
        )
        for number, name in enumerate(names)
    }


def greedy_tokens(*, adapted: bool) -> list[list[int]]:
    """Return the tokens of transformers' model, whose weights torch has changed here where it is ``adapted``."""
    import torch

    model = load_demo()
    for name, (down, up) in updates().items() if adapted else ():
        weight = model.get_submodule(name).weight
        update = torch.tensor(up) @ torch.tensor(down) * (ALPHA / RANK)
        with torch.no_grad():
            weight.copy_((weight.float() + update).to(torch.bfloat16))
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float().topk(2)
            assert not adapted or best.values[0] - best.values[1] > LEAST_MARGIN
            tokens.append(int(best.indices[0]))
        found.append(tokens[len(prompt) :])
    return found


def served_tokens(home: Any, name: str) -> list[list[int]]:
    answer = home.openai().completions.create(
        model=name,
        prompt=PROMPTS,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return [choice.token_ids for choice in answer.choices]


def test_a_merged_adapter_is_served_as_any_model(profiled: Path, make_installation: Any, tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
    for name, (down, up) in updates().items():
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    adapter = write_adapter(
        tmp_path / "adapter", tensors, r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "down_proj"]
    )
    home = make_installation(profiled)
    home.run("variant", "merge", "iserve-demo", adapter, tmp_path / "merged")
    assert home.json("deploy", tmp_path / "merged", *WORK)["status"] == "ready"
    tokens = served_tokens(home, "merged")
    assert tokens == greedy_tokens(adapted=True)
    assert all(found != base for found, base in zip(tokens, greedy_tokens(adapted=False), strict=True))
