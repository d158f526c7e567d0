"""A whole installation in a home of its own: the real command line, controller, daemon, gateway and workers."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import openai
import pytest

from daemon.process import ProcessRecord, is_alive, read_record
from daemon.procfs import start_time_ticks
from iserve.cli.home_processes import ProcessState, process_states
from iserve.client import ControllerClient
from iserve.settings import Settings
from tests.iserve.forked_programs import COMMAND, run_command
from tests.iserve.postgres_server import PostgresServer, binaries
from tests.waiting import PATIENCE_S, wait_until

# Enough to estimate from, and for a machine that takes its time to start a worker.
QUICK = {"ISERVE_PROFILE_SECONDS": "20", "ISERVE_CPU_DEVICES": "2"}


@dataclass
class Installation:
    """Installation in one home.

    Every process of it is found by the home's path in its environment or command line.

    Attributes:
        as_installed: each process is started, as for a user. Else commands, and the controller, daemon, gateway
            and workers that they start, are forked from processes that have imported them.
    """

    home: Path
    settings: dict[str, str] = field(default_factory=dict)
    as_installed: bool = False

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ISERVE_", "OPENAI_"))}
        own = {"ISERVE_HOME": str(self.home), "ISERVE_PORT": "0", "ISERVE_API_PORT": "0"}
        given = kept | own | QUICK | {"HF_HUB_OFFLINE": "1"} | self.settings
        return {name: value for name, value in given.items() if value}  # a setting of "" is one that is not made

    def run(self, *arguments: object, check: bool = True, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """``iserve ARGUMENTS`` as a person would type it."""
        words = [*map(str, arguments)]
        if self.as_installed:
            done = subprocess.run(
                [COMMAND, *words],
                env=self.environment,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        else:
            done = run_command(words, self.environment, stdin)
        if check:
            assert done.returncode == 0, f"iserve {arguments}: {done.stderr}{done.stdout}{self.logs()}"
        return done

    def json(self, *arguments: object) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def start(self, *arguments: object, stdout: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
        """``iserve ARGUMENTS``, not waited for."""
        command = [COMMAND, *map(str, arguments)]
        return subprocess.Popen(command, env=self.environment, stdout=stdout, stderr=subprocess.PIPE, text=True)

    def record(self, name: str) -> ProcessRecord:
        """Return the record of the living ``controller``, ``daemon`` or ``gateway``."""

        def living() -> ProcessRecord | None:
            record = read_record(self.home / "run" / f"{name}.json")
            return record if is_alive(record) else None

        found = wait_until(living, f"a {name} lives")
        assert isinstance(found, ProcessRecord)
        return found

    def kill(self, name: str) -> int:
        """Kill -9 of one process, its death seen; returns its id."""
        pid = self.record(name).pid
        kill_process(pid)
        return pid

    def controller(self) -> ControllerClient:
        record = self.record("controller")
        return ControllerClient(record.url, record.token)

    def deployment(self, name: str = "iserve-demo") -> dict[str, Any]:
        found = self.get(f"/api/v1/deployments/{name}")
        assert isinstance(found, dict)
        return found

    def get(self, path: str) -> Any:
        """Return what the REST API answers the home's token."""
        return self.controller().get(path, object)

    def worker_pids(self) -> dict[str, Any]:
        """Return process ids by worker."""
        return {s.name.split()[1]: s.pid for s in self.states() if s.name.startswith("worker ")}

    def states(self) -> tuple[ProcessState, ...]:
        """Return what ``iserve status`` shows, without starting a command."""
        return process_states(Settings(home=self.home))

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.record('gateway').url}/v1",
            api_key=key,
            max_retries=0,
            timeout=PATIENCE_S,
            # Without TLS, for which each client would read the certificates of all authorities.
            http_client=openai.DefaultHttpxClient(verify=False),
        )

    def processes(self) -> dict[int, str]:
        """Every living process that belongs to this home."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(self.home).encode() in command + environment and start_time_ticks(int(entry.name)) is not None:
                words = command.rstrip(b"\0").split(b"\0")
                found[int(entry.name)] = b" ".join(words).decode(errors="replace")
        return found

    def logs(self) -> str:
        parts = [f"\n--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in self.home.glob("logs/*.log")]
        return "".join(parts)

    def clear(self) -> None:
        """End everything as a person would; whatever that leaves is killed, and then the test fails."""
        if not self.processes():
            return
        done = self.run("down", check=False)
        # The last of a group may take a moment to be gone after its leader.
        try:
            wait_until(lambda: not self.processes(), "every process of the home is gone")
            left: dict[int, str] = {}
        except AssertionError:
            left = self.processes()
        for pid in left:
            kill_process(pid)
        assert not left, f"`iserve down` left {left}: {done.stdout}{done.stderr}{self.logs()}"
        assert done.returncode == 0, done.stderr


def kill_process(pid: int) -> None:
    started = start_time_ticks(pid)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    wait_until(lambda: start_time_ticks(pid) != started, f"process {pid} is gone")


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any
    headers: dict[str, str]


def ask(
    url: str, method: str, path: str, *, token: str | None = None, body: bytes | None = None, **headers: str
) -> Answer:
    """Send one request over a plain socket, nothing added and nothing checked on this side."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_S)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        given["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, body, given)
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    try:
        decoded = json.loads(text) if text else None
    except ValueError:
        decoded = text.decode(errors="replace")
    return Answer(response.status, decoded, {k.lower(): v for k, v in response.getheaders()})


@pytest.fixture
def one_line() -> Callable[..., str]:
    """The single line on stderr of a command that was refused: exit code 1, nothing on stdout, no traceback."""

    def check(done: subprocess.CompletedProcess[str]) -> str:
        assert done.returncode == 1, done.stderr + done.stdout
        assert done.stdout == ""
        assert done.stderr.endswith("\n")
        assert done.stderr.count("\n") == 1, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr.strip()

    return check


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    return wait_until


@pytest.fixture(scope="session")
def kill() -> Callable[[int], None]:
    """Kill -9 of one process, its death seen."""
    return kill_process


@pytest.fixture(scope="session")
def request_to() -> Callable[..., Answer]:
    return ask


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this run's own."""
    programs = binaries()
    if programs is None:
        pytest.skip("no postgres on the PATH or in /usr/lib/postgresql (Debian's package `postgresql` has it)")
    with PostgresServer(programs) as server:
        yield server


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return the state of a home where the demo model has been profiled, for further homes to begin with.

    There is one for the run: of its several processes the first takes the profile, and the rest wait for it.
    """
    if worker_id == "master":
        return profile_demo(tmp_path_factory.mktemp("profiled") / "home")
    run = tmp_path_factory.getbasetemp().parent
    kept = run / "profiled.db"
    with (run / "profiled.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            # A rename: what the next process finds is whole, also if this one is killed here.
            profile_demo(tmp_path_factory.mktemp("profiled") / "home").rename(kept)
    return kept


def profile_demo(home: Path) -> Path:
    """The ``state.db`` that a profile of the demo model leaves."""
    installation = Installation(home)
    try:
        done = installation.run("profile", "--max-seconds", "12", check=False)
        if "too short" in done.stderr:
            installation.run("profile", "--max-seconds", "60")
    finally:
        installation.clear()
    return home / "state.db"


def make_used(installation: Installation, state: Path, engine_sources: Path) -> None:
    """Make the home of an installation in which something has run, and left ``state``."""
    installation.home.mkdir(mode=0o700)
    shutil.copy(state, installation.home / "state.db")
    (installation.home / engine_sources.name).symlink_to(engine_sources)


@pytest.fixture
def make_installation(
    request: pytest.FixtureRequest, tmp_path: Path, engine_sources: Path
) -> Iterator[Callable[..., Installation]]:
    """``make_installation(state, ISERVE_REQUIRE_KEYS="1")``: a home of its own, ended with the test.

    ``state``: a state.db to begin with; else nothing has ever run there. Where the module sets ``AS_INSTALLED``
    its processes are started as for a user.
    """
    made: list[Installation] = []
    as_installed = getattr(request.module, "AS_INSTALLED", False)

    def make(state: Path | None = None, **settings: str) -> Installation:
        made.append(Installation(tmp_path / f"home-{len(made)}", settings, as_installed))
        if state is not None:
            make_used(made[-1], state, engine_sources)
        return made[-1]

    yield make
    for installation in made:
        installation.clear()


@pytest.fixture(scope="module")
def shared_home(
    request: pytest.FixtureRequest, profiled: Path, engine_sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Yield a home for the tests of a module, the demo model profiled there; they leave it as they found it.

    Where the module sets ``AS_INSTALLED`` its processes are started as for a user.
    """
    as_installed = getattr(request.module, "AS_INSTALLED", False)
    installation = Installation(tmp_path_factory.mktemp("home") / "home", as_installed=as_installed)
    make_used(installation, profiled, engine_sources)
    yield installation
    installation.clear()
