"""Renderer of one chat template, in a process that the kernel bounds: ``python -P template_process.py``.

A template is a program that is part of a checkpoint. Jinja's sandbox keeps it from files and sockets, not from
looping, calling itself or writing ``2 ** 10**9``; only the kernel stops all of that. Its own limits are on this
process before it sees the template. One JSON document a line: first the template, its special tokens and its
seconds a rendering, then a question a line, each answered by a line; ends with its input. Standard library and
jinja2 only, so that it starts in 0.1 s.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["MAX_BYTES", "compile_template", "main"]

MAX_BYTES = 512 * 2**20  # of address space, which 32 MiB of messages and their text fit in


class _Generation(Extension):
    """``{% generation %}``, which marks an answer for training; here it is what it encloses."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Jinja's, without names that begin with an underscore: the sandbox does not look at what is stored there."""

    def __init__(*args: Any, **values: Any) -> None:  # self too may be a name
        for name in dict(*args[1:], **values):
            _check_name(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name that begins with an underscore: {name!r}")


def compile_template(text: str) -> Template:
    """Compile a template in the environment that transformers gives a chat template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **values: dict(*args, **values),  # not the class: it has attributes
        "namespace": _Namespace,
    }
    return environment.from_string(text)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _bounded(work: Callable[[], str], max_cpu_s: int) -> dict[str, Any]:
    """Answer what ``work`` returns or raises. Past its CPU time the kernel ends the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    used_s = math.ceil(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + max_cpu_s, hard))
    try:
        return {"text": work()}
    except RecursionError:
        return {"refused": "it calls itself without end"}
    except MemoryError:
        return {"refused": f"it takes more than {MAX_BYTES // 2**20} MiB of memory"}
    except Exception as error:  # noqa: BLE001 - whatever a template raises is its refusal
        return {"refused": f"{error}"[:1000]}


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach the worker's whole process group: it decides
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of the kernel's end by SIGXCPU
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES if hard < 0 else min(hard, MAX_BYTES), hard))
    setup = json.loads(sys.stdin.readline())
    compiled: list[Template] = []

    def compile_once() -> str:
        compiled.append(compile_template(setup["template"]))  # folds constants: as long as any rendering
        return ""

    failed = _bounded(compile_once, setup["max_cpu_s"])
    for line in sys.stdin:
        question = json.loads(line)

        def render(question: dict[str, Any] = question) -> str:
            text = compiled[0].render(
                messages=question["messages"],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **setup["special_tokens"],
            )
            text.encode()  # half a surrogate pair is no text
            return text

        answer = _bounded(render, setup["max_cpu_s"]) if compiled else failed
        if len(answer.get("text", "")) > question["max_chars"]:
            answer = {"too_long": len(answer["text"])}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
