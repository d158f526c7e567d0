"""Check of an engine on a machine that has it: conformance, accuracy and one deployment, with a file to send back.

Run: ``python -m tests.bench.verify_engine ENGINE MODEL [--out FILE] [--max-seconds S]``; for TensorRT-LLM, which
was never run with iServe, ``make verify-tensorrt-llm MODEL=/path/to/checkpoint``. All goes through ``iserve`` as a
user would go: a home of its own, the profile by fingerprints, the deployment that it leads to, requests to the
OpenAI endpoint, ``iserve verify`` (TTFT, TPOT and memory of the whole model against the prediction), on
TensorRT-LLM adapters of random values, each of which must change an answer, and the end, after which no process
and no GPU memory may be left. FILE is written after each step, so that what ran is there whatever happens; a step
that fails ends those that need it. Exit status 0: every step held.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import psutil
import pynvml

from fingerprint.codec import to_json
from fingerprint.errors import IserveError
from iserve.demo import DEMO_MODEL_NAME, demo_model_path
from iserve.model_source import resolve
from tests.bench.lora_adapters import write_adapter

__all__ = ["Check", "Report", "Step", "main"]

NAME = "checked"
TOKENS, AT_ONCE = 16, 32
PATIENCE_S = 1800.0  # of one command: an engine may build kernels for minutes
_WITH_ADAPTERS = "tensorrt-llm"  # whose adapters were never run
_RANK, _DEVIATION = 8, 0.1  # an update about as large as weights are: no answer stays
_LEFT_BYTES = 64 * 2**20  # of a GPU, which other programs may have taken meanwhile


class CheckError(IserveError):
    """A step that did not hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Result of one step."""

    name: str
    ok: bool
    seconds: float
    problem: str | None  # in the engine's or iServe's own last words
    result: Any  # JSON


@dataclass(kw_only=True)
class Report:
    """Everything that ran, to be sent back."""

    engine: str
    model: str
    created_at: str
    machine: str
    gpus: tuple[str, ...]
    driver: str
    installed: Any = None  # what `iserve engines` says of the engine
    steps: list[Step] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("torch", "vllm", "tensorrt-llm"))
    parser.add_argument("model", help="a checkpoint's folder, or a model as `iserve deploy` takes it")
    parser.add_argument("--out", type=Path, help="default: verify-ENGINE.json")
    parser.add_argument("--max-seconds", type=float, default=90.0, help="budget of the profile")
    options = parser.parse_args()
    out = options.out or Path(f"verify-{options.engine}.json")
    held_bytes, gpus, driver = _gpus()
    report = Report(
        engine=options.engine,
        model=options.model,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=platform.platform(),
        gpus=gpus,
        driver=driver,
    )
    with tempfile.TemporaryDirectory(prefix="iserve-verify-") as folder:
        check = Check(report, Path(folder), out, options.max_seconds, held_bytes)
        check.run_all()
    failed = [step.name for step in report.steps if not step.ok]
    print(f"{out}: " + (f"failed: {', '.join(failed)}" if failed else "every step held"), file=sys.stderr)
    sys.exit(1 if failed else 0)


@dataclass
class Check:
    """All steps in their order, with what they need; a step that raises has failed."""

    report: Report
    home: Path
    out: Path
    max_seconds: float
    held_bytes: tuple[int, ...]  # of each GPU, before

    def run_all(self) -> None:
        try:
            if self._step("installed", self._installed) and self._step("profile", self._profile):
                deployed = self._step("deploy", self._deploy)
                if deployed:
                    self._step("conformance", lambda: _conformance(str(deployed["base_url"])))
                    self._step("accuracy", lambda: self._json("verify", NAME))
                if deployed and self.report.engine == _WITH_ADAPTERS:
                    self._step("adapters", self._adapters)
        finally:
            self._step("end", self._end)

    def _step(self, name: str, run: Callable[[], Any]) -> Any:
        print(f"{name} ...", file=sys.stderr)
        begun, result, problem = time.monotonic(), None, None
        try:
            result = run()
        except Exception as error:  # noqa: BLE001 - an engine may answer anything
            problem = str(error) if isinstance(error, CheckError) else f"{type(error).__name__}: {error}"
            print(f"{name} failed: {problem}", file=sys.stderr)
        seconds = round(time.monotonic() - begun, 1)
        step = Step(name=name, ok=problem is None, seconds=seconds, problem=problem, result=result)
        self.report.steps.append(step)
        self.out.write_bytes(to_json(self.report, indent=1))
        return result

    def _iserve(self, *words: str) -> str:
        home = {"ISERVE_HOME": str(self.home), "ISERVE_PORT": "0", "ISERVE_API_PORT": "0"}
        command = [str(Path(sys.executable).parent / "iserve"), *words]
        done = subprocess.run(
            command, env=os.environ | home, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if done.returncode:
            raise CheckError(f"iserve {words[0]} exited with {done.returncode}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def _json(self, *words: str) -> Any:
        return json.loads(self._iserve(*words, "--json"))

    def _installed(self) -> Any:
        (found,) = (each for each in self._json("engines") if each["engine"] == self.report.engine)
        if found["problem"]:
            raise CheckError(found["problem"])
        self.report.installed = found
        return found

    def _profile(self) -> Any:
        model, engine = self.report.model, self.report.engine
        return self._json("profile", model, "--engine", engine, "--max-seconds", f"{self.max_seconds:g}")

    def _deploy(self) -> Any:
        return self._json("deploy", self.report.model, "--engine", self.report.engine, "--name", NAME)

    def _adapters(self) -> dict[str, str]:
        """Deploy with adapter slots, and return what the base and two contents of one name say.

        Raises:
            CheckError: an adapter was left out, or one answered for the other.
        """
        model = self.report.model
        directory = resolve(model, {DEMO_MODEL_NAME: demo_model_path()}).directory
        config = json.loads((directory / "config.json").read_text())
        self._iserve("rm", NAME)
        slots = ("--variants", "2", "--rank", str(_RANK))
        deployed = self._json("deploy", model, "--engine", self.report.engine, "--name", NAME, *slots)
        said = {"base": _said(str(deployed["base_url"]), NAME)}
        for seed in (1, 2):
            folder = self.home / f"random-adapter-{seed}"
            write_adapter(folder, config, _RANK, seed=seed, deviation=_DEVIATION)
            self._json("variant", "add", "random", "--base", NAME, str(folder), "--replace")
            said[f"adapter {seed}"] = _said(str(deployed["base_url"]), "random")
        if len(set(said.values())) < len(said):
            raise CheckError(f"base and adapters do not all answer otherwise: {said}")
        return said

    def _end(self) -> Any:
        said = self._iserve("down")
        if processes := _processes_of(self.home):
            raise CheckError(f"processes are left behind: {', '.join(processes)}")
        left = [now - before for now, before in zip(_gpus()[0], self.held_bytes, strict=True)]
        if any(more > _LEFT_BYTES for more in left):
            raise CheckError(f"GPU memory is left behind: {left} bytes more than before")
        return {"said": said.splitlines(), "gpu_bytes_left": left}


def _said(base_url: str, model: str) -> str:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        ask = {"prompt": "The capital of France is", "max_tokens": TOKENS, "temperature": 0}
        return str(client.completions.create(model=model, **ask).choices[0].text)  # type: ignore[call-overload]


def _conformance(base_url: str) -> dict[str, Any]:
    """Ask the endpoint with OpenAI's own client.

    Raises:
        CheckError: an answer that does not keep to the protocol.
    """
    ask = {"model": NAME, "prompt": "The capital of France is", "max_tokens": TOKENS, "temperature": 0}
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        whole = client.completions.create(**ask)  # type: ignore[call-overload]
        parts = client.completions.create(**ask, stream=True)  # type: ignore[call-overload]
        streamed = "".join(choice.text for part in parts for choice in part.choices)
        try:
            client.completions.create(**ask | {"prompt": []})  # type: ignore[call-overload]
            refusal = "none"
        except openai.BadRequestError as error:
            refusal = str(error.body)
        begun = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda _: client.completions.create(**ask), range(AT_ONCE)))  # type: ignore[call-overload]
        took_s = time.monotonic() - begun
    text, counted = whole.choices[0].text, whole.usage.completion_tokens
    problems = {
        f"{counted} tokens counted, {TOKENS} were asked for": not 1 <= counted <= TOKENS,
        f"streamed {streamed!r}, whole {text!r}": streamed != text,
        "an empty prompt was not refused": refusal == "none",
        f"of {AT_ONCE} requests at once some have no answer": not all(one.choices for one in answers),
    }
    if failed := [problem for problem, holds in problems.items() if holds]:
        raise CheckError("; ".join(failed))
    return {"text": text, "refusal": refusal, "at_once": AT_ONCE, "at_once_s": round(took_s, 3)}


def _processes_of(home: Path) -> list[str]:
    """Return the living processes that were started for ``home``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ISERVE_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.name()}")
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return found


def _gpus() -> tuple[tuple[int, ...], tuple[str, ...], str]:
    """Return bytes in use on each GPU, their names, and the driver's version; nothing without NVIDIA's driver."""
    with _nvml() as is_there:
        if not is_there:
            return (), (), ""
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        used = tuple(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
        return used, tuple(map(pynvml.nvmlDeviceGetName, handles)), pynvml.nvmlSystemGetDriverVersion()


@contextmanager
def _nvml() -> Iterator[bool]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


if __name__ == "__main__":
    main()
