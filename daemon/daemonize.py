"""Start of a program that outlives its starter: forked twice, in a session of its own. Run as a script.

``python -I -S daemonize.py LOG PROGRAM ARGS...`` prints the program's process id, then nothing more if it was
started, or one line with the reason if not. Standard library only, so it starts in about 10 ms; a process with
threads must not fork by itself.
"""

from __future__ import annotations

import os
import sys

_REPORT_FD = 1


def main(argv: list[str]) -> None:
    log_path, program = argv[0], argv[1:]
    if os.fork():
        return  # the middle process ends at once: the program's parent is init from here on
    report = os.dup(_REPORT_FD)  # closed by a successful exec, which is how the caller learns of it
    try:
        os.setsid()
        os.write(report, f"{os.getpid()}\n".encode())
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.execvp(program[0], program)
    except OSError as error:
        os.write(report, f"{error}\n".encode())
    os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
