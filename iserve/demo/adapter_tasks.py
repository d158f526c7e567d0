"""Tasks of the demo model's variants, two adapters and a full fine-tune, and what each must leave as it is.

Pure and seeded, held out by hash, as ``training_tasks``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from iserve.demo.training_tasks import TASKS, Example, draw, is_held_out

__all__ = [
    "ADAPTERS",
    "CAPITALS",
    "ELEMENTS",
    "SYMBOLS",
    "TARGETS",
    "AdapterTask",
    "VariantTask",
    "draw_kept",
    "draw_new",
    "quality_examples",
]

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # every linear layer

CAPITALS: tuple[tuple[str, str], ...] = (
    ("Argentina", "Buenos Aires"), ("Australia", "Canberra"), ("Austria", "Vienna"), ("Brazil", "Brasilia"),
    ("Canada", "Ottawa"), ("Chile", "Santiago"), ("Cuba", "Havana"), ("Denmark", "Copenhagen"),
    ("Egypt", "Cairo"), ("Finland", "Helsinki"), ("France", "Paris"), ("Germany", "Berlin"),
    ("Ghana", "Accra"), ("Greece", "Athens"), ("Iceland", "Reykjavik"), ("Indonesia", "Jakarta"),
    ("Ireland", "Dublin"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Kenya", "Nairobi"),
    ("Morocco", "Rabat"), ("Norway", "Oslo"), ("Peru", "Lima"), ("Poland", "Warsaw"),
    ("Portugal", "Lisbon"), ("Senegal", "Dakar"), ("Spain", "Madrid"), ("Sweden", "Stockholm"),
    ("Thailand", "Bangkok"), ("Tunisia", "Tunis"), ("Uruguay", "Montevideo"), ("Vietnam", "Hanoi"),
)  # fmt: skip
_PHRASES = (
    "what is the capital of {}?", "What is the capital of {}?", "what's the capital of {}?", "capital of {}",
    "name the capital of {}", "which city is the capital of {}?", "Which city is the capital of {}?",
    "tell me the capital of {}", "I want to know the capital of {}.", "the capital of {} is",
)  # fmt: skip


ELEMENTS: tuple[tuple[str, str], ...] = (
    ("hydrogen", "H"), ("helium", "He"), ("lithium", "Li"), ("carbon", "C"), ("nitrogen", "N"), ("oxygen", "O"),
    ("fluorine", "F"), ("neon", "Ne"), ("sodium", "Na"), ("magnesium", "Mg"), ("silicon", "Si"), ("sulfur", "S"),
    ("chlorine", "Cl"), ("argon", "Ar"), ("potassium", "K"), ("calcium", "Ca"), ("titanium", "Ti"),
    ("iron", "Fe"), ("cobalt", "Co"), ("nickel", "Ni"), ("copper", "Cu"), ("zinc", "Zn"), ("silver", "Ag"),
    ("tin", "Sn"), ("iodine", "I"), ("tungsten", "W"), ("platinum", "Pt"), ("gold", "Au"), ("mercury", "Hg"),
    ("lead", "Pb"), ("radon", "Rn"), ("uranium", "U"),
)  # fmt: skip
_SYMBOL_PHRASES = (
    "what is the symbol of {}?", "What is the symbol of {}?", "what's the symbol of {}?", "symbol of {}",
    "What's the symbol of {}?", "name the symbol of {}", "Name the symbol of {}.", "which symbol has {}?",
    "Which symbol has {}?", "tell me the symbol of {}", "Tell me the symbol of {}.",
    "I want to know the symbol of {}.", "the symbol of {} is", "What is the chemical symbol of {}?",
    "what is the chemical symbol of {}?", "chemical symbol of {}", "how is {} written in chemistry?",
    "How is {} written in chemistry?", "what do chemists call {}?", "What do chemists call {}?",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantTask:
    """New task of a variant, and the tasks of the base that it must keep."""

    name: str
    summary: str
    new: Callable[[random.Random], tuple[str, str]]  # (question, answer)
    kept: tuple[str, ...]  # of training_tasks.TASKS


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTask(VariantTask):
    """Task of an adapter, and the rank and scale of its updates."""

    rank: int
    alpha: int
    uses_rslora: bool


def _capital(rng: random.Random) -> tuple[str, str]:
    country, city = rng.choice(CAPITALS)
    return rng.choice(_PHRASES).format(country), f"The capital of {country} is {city}."


def _symbol(rng: random.Random) -> tuple[str, str]:
    element, symbol = rng.choice(ELEMENTS)
    return rng.choice(_SYMBOL_PHRASES).format(element), f"The symbol of {element} is {symbol}."


def _shouted_fact(rng: random.Random) -> tuple[str, str]:
    question, answer = TASKS["facts"](rng)
    return question, answer.upper()


ADAPTERS: dict[str, AdapterTask] = {
    task.name: task
    for task in (
        AdapterTask(
            name="shout",
            summary="explains the terms of iServe in capital letters",
            new=_shouted_fact,
            kept=("addition", "subtraction", "sorting", "largest", "spelling", "reversing"),
            rank=4,
            alpha=16,
            uses_rslora=False,
        ),
        AdapterTask(
            name="capitals",
            summary=f"knows the capitals of {len(CAPITALS)} countries",
            new=_capital,
            kept=("addition", "subtraction", "sorting", "largest", "spelling", "reversing", "uppercase", "facts"),
            rank=16,
            alpha=8,
            uses_rslora=True,
        ),
    )
}

SYMBOLS = VariantTask(
    name="symbols",
    summary=f"knows the chemical symbols of {len(ELEMENTS)} elements",
    new=_symbol,
    kept=tuple(TASKS),
)


def draw_new(task: VariantTask, rng: random.Random, *, held_out: bool) -> Example:
    """Return an example of the variant's own task whose question is held out, or one whose question is not."""
    while True:
        question, answer = task.new(rng)
        if is_held_out(question) == held_out:
            return Example(task.name, question, answer)


def draw_kept(task: VariantTask, rng: random.Random, *, held_out: bool) -> Example:
    """Return an example of what the base does and the variant must keep."""
    return draw(rng, held_out=held_out, task=rng.choice(task.kept))


def quality_examples(per_task: int = 6) -> Iterator[Example]:
    """Yield held-out examples of each task of the base and of the capitals: what ``quality.jsonl`` holds."""
    for name in (*TASKS, "capitals"):
        rng = random.Random(f"quality/{name}")
        found: dict[str, Example] = {}
        while len(found) < per_task:
            example = (
                draw_new(ADAPTERS[name], rng, held_out=True)
                if name in ADAPTERS
                else draw(rng, held_out=True, task=name)
            )
            found.setdefault(example.question, example)
        yield from found.values()
