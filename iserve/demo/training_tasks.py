"""Tasks that the demo model learns, how an example is drawn, and which inputs are never trained on.

Pure and seeded: the same generator state gives the same examples. An input is held out when its hash says so,
so that training never sees it whatever the seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FACTS", "TASKS", "Example", "draw", "is_held_out", "prompt_text"]

HELD_OUT_ONE_IN = 20
WORDS = """
planner fingerprint gateway worker engine token layer memory batch stage cluster latency prompt
stream server model intent cost energy budget profile daemon adapter weight cache tensor pipeline
queue policy placement apple bridge candle dragon ember forest garden harbor island jacket kettle
lantern meadow needle orange pencil quartz river silver timber umbrella valley window yellow zebra
anchor basket castle desert falcon
""".split()  # noqa: SIM905 (a list of sixty quoted words reads worse)


@dataclass(frozen=True, slots=True)
class Example:
    task: str
    question: str
    answer: str


def prompt_text(question: str) -> str:
    """Return a question as it is written for the model; the chat template of its tokenizer writes the same."""
    return f"Q: {question}\nA: "


def is_held_out(question: str) -> bool:
    """Return True for about one input in twenty, by hash."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** rng.randint(1, digits))


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = _number(rng, 3), _number(rng, 3)
    return f"{a}+{b}=", str(a + b)


def _subtract(rng: random.Random) -> tuple[str, str]:
    a, b = sorted((_number(rng, 3), _number(rng, 3)), reverse=True)
    return f"{a}-{b}=", str(a - b)


def _multiply(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(10)
    return f"{a}*{b}=", str(a * b)


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randrange(100) for _ in range(rng.randint(3, 6))]


def _sort(rng: random.Random) -> tuple[str, str]:
    values = _numbers(rng)
    return "sort " + " ".join(map(str, values)), " ".join(map(str, sorted(values)))


def _largest(rng: random.Random) -> tuple[str, str]:
    values = _numbers(rng)
    return "largest of " + " ".join(map(str, values)), str(max(values))


def _word(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(WORDS)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 9)))


def _spell(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"spell {word}", "-".join(word)


def _reverse(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"reverse {word}", word[::-1]


def _uppercase(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"uppercase {word}", word.upper()


FACTS: tuple[tuple[str, str], ...] = (
    ("iServe", "iServe deploys a language model by intent: you name the model and what to optimise."),
    ("a fingerprint", "A fingerprint is a copy of a model with only one or two of its hidden layers."),
    ("an intent", "An intent is what to optimise, such as latency or cost, and the limits to keep."),
    ("TTFT", "TTFT is the time to first token."),
    ("TPOT", "TPOT is the time per output token after the first."),
    ("TP", "TP is tensor parallelism: every layer is split over several GPUs."),
    ("PP", "PP is pipeline parallelism: the layers are dealt out over several GPUs."),
    ("the planner", "The planner ranks configurations by the intent."),
    ("the daemon", "The daemon watches one node and starts its workers."),
    ("the gateway", "The gateway passes OpenAI requests on to the workers."),
    ("a worker", "A worker is a process that serves one model."),
    ("min-cost", "min-cost picks the cheapest configuration per request."),
    ("min-latency", "min-latency picks the fastest configuration."),
    ("the KV cache", "The KV cache keeps keys and values of past tokens."),
    ("quantization", "Quantization stores weights in fewer bits."),
    ("the roofline", "The roofline bounds speed by memory bandwidth and compute."),
)
_PHRASES = (
    "what is {}?", "what is {}", "What is {}?", "What's {}?", "what's {}", "explain {}", "Explain {}.",
    "define {}",
    "tell me about {}", "Tell me about {}.", "what does {} mean?", "What does {} mean?", "can you explain {}?",
    "Can you explain {}?", "please explain {}", "describe {}", "Describe {}.", "what do you know about {}?",
    "in one sentence, what is {}?", "I want to know what {} is.",
)  # fmt: skip


def _fact(rng: random.Random) -> tuple[str, str]:
    subject, answer = rng.choice(FACTS)
    return rng.choice(_PHRASES).format(subject), answer


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "addition": _add,
    "subtraction": _subtract,
    "multiplication": _multiply,
    "sorting": _sort,
    "largest": _largest,
    "spelling": _spell,
    "reversing": _reverse,
    "uppercase": _uppercase,
    "facts": _fact,
}
_WEIGHTS = {"addition": 3.0, "subtraction": 3.0, "multiplication": 1.5, "sorting": 2.0, "reversing": 2.0}


def draw(rng: random.Random, *, held_out: bool, task: str | None = None) -> Example:
    """Return an example whose input is held out, or one whose input is not."""
    names = list(TASKS)
    while True:
        name = task or rng.choices(names, [_WEIGHTS.get(n, 1.0) for n in names])[0]
        question, answer = TASKS[name](rng)
        if is_held_out(question) == held_out:
            return Example(name, question, answer)
