"""Options that a deployment gives to the engine itself: arguments of its server, and parsers of its answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from fingerprint.errors import ConfigError
from fingerprint.model_use import AS_IT_IS, ModelUse

__all__ = ["NO_OPTIONS", "EngineOptions", "check_options", "option_words", "read_engine_args", "refuse_options"]

_KEY = re.compile(r"[a-z][a-z0-9_-]{0,63}(\.[A-Za-z0-9_.-]{1,64})?")
_PARSER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MOST_ARGUMENTS = 64
_MOST_CHARACTERS = 4096  # of a value


def _base(name: str) -> str:
    """Return the option of ``name`` without a key inside its value, spelled with dashes as the engines read it."""
    return name.partition(".")[0].replace("_", "-")


def _spellings(base: str) -> tuple[str, ...]:
    """Return the option and the ones that its negation may be of: --no-x of --x, --disable-x of --enable-x."""
    plain = base.removeprefix("no-")
    pairs = (("enable-", "disable-"), ("disable-", "enable-"))
    other = [there + plain.removeprefix(here) for here, there in pairs if plain.startswith(here)]
    return tuple(dict.fromkeys((base, plain, *other)))


def _only_once(arguments: tuple[tuple[str, str | None], ...]) -> None:
    """Raise ConfigError where one option is given twice, be it in two spellings or with its negation."""
    seen: dict[tuple[frozenset[str], str], str] = {}
    for name, _ in arguments:
        plain = _base(name).removeprefix("no-")
        option = frozenset(_spellings(plain)), name.partition(".")[2]
        if option in seen:
            raise ConfigError(f"the engine arguments {seen[option]} and {name} are one option; give it once")
        seen[option] = name


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Options that an engine is started with beyond what iServe decides.

    Raises:
        ConfigError: a name or value that cannot be one.
    """

    arguments: tuple[tuple[str, str | None], ...] = ()
    """Pairs of an option's name, without dashes, and its value; a None value makes it a flag."""
    tool_call_parser: str | None = None
    """vLLM's parser of the model's tool calls, such as `hermes`; None: none."""
    reasoning_parser: str | None = None
    """vLLM's parser of the model's reasoning, such as `qwen3`; None: none."""
    use: ModelUse = AS_IT_IS
    """Parts of the model that are served, images of its prompts, and permission to run its own code."""

    def __post_init__(self) -> None:
        if len(self.arguments) > _MOST_ARGUMENTS:
            raise ConfigError(f"{len(self.arguments)} engine arguments are given, {_MOST_ARGUMENTS} at most")
        for name, value in self.arguments:
            if not _KEY.fullmatch(name):
                raise ConfigError(
                    f"the engine argument {name[:80]!r} must be an option's name without dashes before it, such "
                    "as max-log-len"
                )
            if value is not None and (len(value) > _MOST_CHARACTERS or not value.isprintable()):
                raise ConfigError(
                    f"the value of the engine argument {name} must be one line of at most {_MOST_CHARACTERS} "
                    "characters"
                )
        for what, parser in (("tool-call", self.tool_call_parser), ("reasoning", self.reasoning_parser)):
            if parser is not None and not _PARSER.fullmatch(parser):
                raise ConfigError(f"the {what} parser {parser[:80]!r} must be the name of one, such as hermes")


NO_OPTIONS = EngineOptions()


def read_engine_args(given: list[str]) -> dict[str, str | None]:
    """Return ``KEY=VALUE`` words by key; ``KEY`` alone is a flag.

    Raises:
        ConfigError: a key is given twice.
    """
    found: dict[str, str | None] = {}
    for word in given:
        key, equals, value = word.removeprefix("--").partition("=")
        if key in found:
            raise ConfigError(f"the engine argument {key[:80]!r} is given twice")
        found[key] = value if equals else None
    return found


def option_words(options: EngineOptions) -> tuple[str, ...]:
    """Return the arguments as words, each ``--name=value`` so that no value is taken for an option."""
    return tuple(f"--{name}" if value is None else f"--{name}={value}" for name, value in options.arguments)


def check_options(engine: str, options: EngineOptions, own: Mapping[str, str], taken: frozenset[str]) -> None:
    """Raise ConfigError where an argument is not one of ``taken``, in whichever spelling, or is given twice.

    Args:
        own: the options that iServe sets or forbids: by name why, and what to use instead.
        taken: the other ones that iServe knows.
    """
    _only_once(options.arguments)
    for name, _ in options.arguments:
        spellings = _spellings(_base(name))
        refused = next((own[one] for one in spellings if one in own), None)
        if refused is None and taken.isdisjoint(spellings):
            refused = _why_not(spellings, own, taken)
        if refused is not None:
            raise ConfigError(f"--{name} of {engine} cannot be given: {refused}")


def _why_not(spellings: tuple[str, ...], own: Mapping[str, str], taken: frozenset[str]) -> str:
    """Return why an option that is in neither table is refused: as an abbreviation, a slip or a new one."""
    abbreviated = [one for one in (*own, *sorted(taken)) if one.startswith(spellings)]
    if abbreviated and all(one in own for one in abbreviated):
        return own[abbreviated[0]]
    near = abbreviated or get_close_matches(spellings[0], (*own, *taken), n=1)
    return (
        "iServe does not know this option, so it cannot say whether it takes memory, changes what was measured or "
        "loads code" + (f"; did you mean {near[0]}?" if near else "")
    )


def refuse_options(engine: str, options: EngineOptions) -> None:
    """Raise ConfigError if anything is given to an engine that takes nothing."""
    if options.use.trust_remote_code:
        raise ConfigError(
            f"engine {engine} is never let run Python code that a model brings; leave --trust-remote-code out, or "
            "deploy with --engine vllm"
        )
    if options.use.text_only or options.use.images:
        raise ConfigError(
            f"engine {engine} serves text alone; leave --text-only and --images out, or deploy with --engine vllm"
        )
    if options.tool_call_parser is not None or options.reasoning_parser is not None:
        raise ConfigError(
            f"engine {engine} has no tool-call and reasoning parsers; deploy with --engine vllm, or leave them out"
        )
    if options.arguments:
        raise ConfigError(
            f"engine {engine} takes no --engine-arg ({options.arguments[0][0]} was given); deploy with --engine "
            "vllm, or leave it out"
        )
