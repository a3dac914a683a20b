"""Python processes that begin with what is slow to import already imported.

    python tests/support/warm.py serve DESCRIPTOR        forks a process for every command asked for
    python tests/support/warm.py ask SOCKET WORD ...     has it run a command, as the command itself

Importing torch takes most of the time of a short command. `run` and `path` are for tests of what a
process prints and leaves behind; how it starts, which modules it loads, and which threads and
signals it has are matters of a process that is started in earnest.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

PATIENCE = 300  # seconds, for a machine that is busy
SHIM = """#!/bin/sh
exec "{python}" -I -S "{client}" ask "{socket}" {command} "$@"
"""


class Server:
    """A process that forks; it ends with the one that started it."""

    def __init__(self) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory(prefix="warm")
        self.socket = os.path.join(self.folder.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.socket)
            listener.listen()
            self.process = subprocess.Popen(
                [sys.executable, __file__, "serve", str(listener.fileno())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        for command in ("python", "coadjoint"):
            shim = Path(self.folder.name, command)
            words = {"python": sys.executable, "client": __file__, "socket": self.socket}
            shim.write_text(SHIM.format(command=command, **words))
            shim.chmod(0o700)


server = functools.cache(Server)


def run(
    *words: object, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python WORD ...`, as subprocess.run does with a captured output."""
    import tempfile

    command = ["python", *map(str, words)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with open(os.devnull) as nothing:
            streams = [stream.fileno() for stream in (nothing, out, err)]
            code = ask(server().socket, command, streams, str(cwd), env or os.environ)
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def launch(
    processes: int, script: Path, *words: object, cwd: Path, env: Mapping[str, str] | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script in several processes that find each other as those of torchrun do."""
    from concurrent.futures import ThreadPoolExecutor

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    started = []
    with ThreadPoolExecutor(processes) as pool:
        for rank in range(processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            given = {**(env or os.environ), **meeting, **size, **place}
            started.append(pool.submit(run, script, *words, cwd=cwd, env=given))
    return [each.result() for each in started]


def path() -> str:
    """A PATH on which `python` and `coadjoint` are forks of the server."""
    return os.pathsep.join([server().folder.name, os.environ["PATH"]])


def ask(place: str, words: list[str], streams: list[int], cwd: str, env: Mapping[str, str]) -> int:
    """Have the server at a socket run a command with these standard streams -> its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        socket.send_fds(connection, [b"!"], streams)
        connection.sendall(json.dumps([words, cwd, dict(env)]).encode())
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(PATIENCE)
        return int(connection.recv(10) or 1)


def serve(listener: socket.socket) -> None:
    """Fork for every connection until the standard input ends."""
    import matplotlib.pyplot  # noqa: F401

    import coadjoint.cli.preloaded  # noqa: F401

    gc.freeze()  # a collection in a fork need not look at, and so copy, what is here already
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            handle(connection)
        connection.close()
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def handle(connection: socket.socket) -> NoReturn:
    """Run the command of a connection in one more process, and send back its exit code."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    text = b""
    while more := connection.recv(1 << 16):
        text += more
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    words, cwd, env = json.loads(text)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    end(execute, words)


def end(command: Callable[[list[str]], None], words: list[str]) -> NoReturn:
    """End as Python does, except that nothing is taken down: that would copy all the memory."""
    import atexit
    import traceback

    code: object = 0
    try:
        command(words)
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def execute(words: list[str]) -> None:
    """Be `coadjoint ...`, `python FILE ...` or `python -c CODE ...`."""
    import runpy

    command, *arguments = words
    if command == "coadjoint":
        from coadjoint.cli import main

        sys.argv = words
        sys.exit(main())
    if arguments[0] != "-c":
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
        return
    sys.argv = ["-c", *arguments[2:]]
    sys.path[0] = ""
    exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})


def main() -> None:
    mode, place, *words = sys.argv[1:]
    if mode == "serve":
        serve(socket.socket(fileno=int(place)))
        return
    sys.exit(ask(place, words, [0, 1, 2], os.getcwd(), os.environ))


if __name__ == "__main__":
    main()
