"""A worker of the standard library alone: the HTTP face of an engine, and every way to misbehave.

``python fake_worker.py spec.json``; how it behaves is read from ``behaviour.json`` in the spec's checkpoint folder
at each start (``once``: at the next only): ``slow_start_s``, ``exit_code``, ``last_words``, ``ignore_sigterm``,
``grandchildren`` (one in the group, one in a session of its own), ``print_lines``, ``busy_fraction``,
``bind_file`` (listens only once it exists), ``fail_health_file`` (unhealthy while it exists),
``running_file`` (has a request while it exists), ``exit_if`` (exits with 1 if its id has this part),
``record_starts`` (a file that each start adds its worker's id and its process id to), ``exit_file`` (exits as
``exit_code`` and ``last_words`` say only once it exists, whatever it does until then).
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STARTED_S = time.monotonic()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    checkpoint = Path(spec["checkpoint"])
    behaviour_file = checkpoint / "behaviour.json"
    behaviour = json.loads(behaviour_file.read_text()) if behaviour_file.exists() else {}
    if behaviour.get("once"):
        behaviour_file.unlink()
    print("fake worker starts", os.getpid(), flush=True)
    if behaviour.get("record_starts"):
        with Path(behaviour["record_starts"]).open("a") as file:
            file.write(f"{spec['worker_id']} {os.getpid()}\n")
    if behaviour.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for own_session in (False, True) if behaviour.get("grandchildren") else ():
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=own_session)
        with (checkpoint / "grandchildren").open("a") as file:
            file.write(f"{child.pid}\n")
    for number in range(behaviour.get("print_lines", 0)):
        print(f"line {number} " + "x" * 90)
    sys.stdout.flush()
    if behaviour.get("exit_if", spec["worker_id"] + "x") in spec["worker_id"]:
        print("this worker is not to start", flush=True)
        sys.exit(1)
    if behaviour.get("exit_file"):
        threading.Thread(target=end, args=(behaviour,), daemon=True).start()
    elif "exit_code" in behaviour:
        end(behaviour)
    serve(spec, behaviour)


def end(behaviour: dict) -> None:
    while behaviour.get("exit_file") and not Path(behaviour["exit_file"]).exists():
        time.sleep(0.02)
    print(behaviour.get("last_words", ""), flush=True)
    os._exit(behaviour["exit_code"])


def serve(spec: dict, behaviour: dict) -> None:
    token_file = Path(sys.argv[1]).with_name("token")
    token = token_file.read_text() if token_file.exists() else ""
    devices = [device for stage in spec["stages"] for device in stage["device_ids"]]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path != "/health" and token and self.headers.get("Authorization") != f"Bearer {token}":
                self.answer(401, {})
                return
            alive_s = time.monotonic() - STARTED_S
            ready = alive_s >= behaviour.get("slow_start_s", 0)
            if behaviour.get("fail_health_file") and Path(behaviour["fail_health_file"]).exists():
                ready = False
            if self.path == "/health" and "Authorization" in self.headers:
                self.answer(400, {"error": "an open route is sent no token"})
            elif self.path == "/health":
                self.answer(200 if ready else 503, {"status": "ok" if ready else "loading"})
            elif self.path == "/stats":
                busy_s = alive_s * behaviour.get("busy_fraction", 0.0)
                self.answer(
                    200,
                    dict.fromkeys(
                        [
                            "running",
                            "waiting",
                            "kv_tokens_total",
                            "kv_tokens_free",
                            "prompt_tokens",
                            "output_tokens",
                            "steps",
                        ],
                        0,
                    )
                    | {
                        "running": int(Path(behaviour.get("running_file", "/no such file")).exists()),
                        "model": spec["served_model"],
                        "busy": [{"device_id": device, "busy_s": busy_s} for device in devices],
                        "memory": [],
                    },
                )
            else:
                names = ("CUDA_VISIBLE_DEVICES", "ISERVE_DEVICE_CORES")
                self.answer(
                    200,
                    {
                        "env": {name: os.environ.get(name) for name in names},
                        "cores": sorted(os.sched_getaffinity(0)),
                    },
                )

        def answer(self, status: int, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_arguments: object) -> None:
            """Print nothing of a probe that gave up: tests count the log's lines."""

    while behaviour.get("bind_file") and not Path(behaviour["bind_file"]).exists():
        time.sleep(0.02)
    try:
        server = Server(("127.0.0.1", spec["port"]), Handler)
    except OSError:
        sys.exit(98)
    server.serve_forever()


main()
