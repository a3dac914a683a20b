"""Runs on a Dask cluster: the scheduler is found and its workers are checked, then they train.

Dask executes what a client sends it and has no login of its own: see docs/scale.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError, MissingError, StorageError, error_text
from ..training.lock import Lock
from .flags import KeyValues
from .outcomes import read_status
from .pool import Outcome

if TYPE_CHECKING:
    from distributed import Client, Security
    from distributed.cfexecutor import ClientExecutor

CONNECT = 10.0  # seconds for the scheduler to answer, and for the first worker to appear
LOOK = 1.0  # seconds between two looks at the cluster
SEEN = 90.0  # seconds until a result is seen here that its worker has seen: NFS keeps old names
RETRIES = 3  # of a run whose process was killed; a lost worker is counted by Dask itself


class TlsFiles(NamedTuple):
    """The files of a tls:// address; None: as Dask's own configuration has it."""

    ca_file: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def words(self) -> list[str]:
        """The files as words of a command line."""
        words = []
        for name, path in zip(("--tls-ca-file", "--tls-cert", "--tls-key"), self, strict=True):
            if path is not None:
                words += [name, str(path)]
        return words


def open_pool(address: str, tls: TlsFiles, jobs: int | None, folder: Path) -> ClusterPool:
    """The pool at an address, whose workers see the folder of a comparison.

    The folder need not exist yet. jobs: the most runs at a time, None for as many as the workers
    take. Refused: an address without a scheduler, a cluster without workers, workers with other
    versions or without the folder.
    """
    client = connect(address, tls)
    pool = ClusterPool(client, address, tls, jobs)
    try:
        pool.check_workers(folder)
    except BaseException:
        pool.close()
        raise
    return pool


def connect(address: str, tls: TlsFiles) -> Client:
    """A client of the scheduler at tcp://HOST:PORT or tls://HOST:PORT."""
    try:
        from distributed import Client
    except ImportError:
        raise MissingError("--on needs Dask: pip install 'coadjoint[cluster]'.") from None
    scheme, separator, place = address.partition("://")
    if scheme not in ("tcp", "tls") or not separator or ":" not in place:
        raise ConfigError(f"--on takes tcp://HOST:PORT or tls://HOST:PORT; got {address!r}.")
    for name in ("distributed", "distributed.client", "distributed.core", "distributed.comm"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what fails is said in one line
    security = security_of(scheme, tls)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # versions that differ: compared below
            return Client(address, security=security, timeout=CONNECT, set_as_default=False)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        reason = comm_error_text(error.__cause__ or error)
        raise MissingError(
            f"no Dask scheduler answers at {address} ({reason}): start one with `dask scheduler`, "
            "and name the address that it prints."
        ) from None


def security_of(scheme: str, tls: TlsFiles) -> Security | None:
    """What Dask needs to know for TLS; None for tcp://."""
    from distributed import Security

    if scheme != "tls":
        if tls.words:
            raise ConfigError(f"{tls.words[0]} belongs to an address tls://HOST:PORT.")
        return None
    for path in tls:
        if path is not None and not path.is_file():
            raise StorageError(f"{path} is not a file: the files of TLS are in PEM format.")
    given = {"tls_ca_file": tls.ca_file, "tls_client_cert": tls.cert, "tls_client_key": tls.key}
    files = {key: str(path) for key, path in given.items() if path is not None}
    security = Security(require_encryption=True, **files)
    try:
        context = security.get_connection_args("client")["ssl_context"]
    except OSError as error:
        raise StorageError(
            f"the files of TLS cannot be used ({error_text(error)}): expected certificates and a "
            "key in PEM format."
        ) from None
    if context is None:
        raise ConfigError(
            "tls:// needs --tls-ca-file, --tls-cert and --tls-key, or the same in Dask's "
            "configuration (distributed.comm.tls)."
        )
    return security


def comm_error_text(error: BaseException) -> str:
    """The text of an error of Dask's, without the object that it happened in: "in <TCP ...>: "."""
    return re.sub(r"^in <[^>]*>: ", "", error_text(error))


class ClusterPool:
    """The workers of a Dask scheduler, each of which trains as many runs as it has threads."""

    def __init__(self, client: Client, address: str, tls: TlsFiles, jobs: int | None) -> None:
        """jobs: the most runs at a time; None: as many as the workers have threads."""
        self.client = client
        self.address = address
        self.flags = " " + shlex.join(["--on", address, *tls.words])
        self.jobs = jobs
        self.most = 1
        self.failure: str | None = None
        self.token = uuid.uuid4().hex
        self.executor: ClientExecutor = client.get_executor(retries=RETRIES, pure=False)
        self.keys: dict[Future[Outcome], str] = {}  # of tasks that are under way
        self.targets: dict[Future[Outcome], Path] = {}
        self.workers: Mapping[str, KeyValues] = {}  # by address, as of the last look
        self.processing: Mapping[str, Sequence[str]] = {}  # keys of tasks, by address of the worker
        self.stopping = threading.Event()
        self.closing = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)

    # the workers

    def check_workers(self, folder: Path) -> None:
        """Refuse a cluster that has no workers, or workers that cannot train; then watch it."""
        from . import cluster_worker

        with contextlib.suppress(TimeoutError):
            self.client.wait_for_workers(1, timeout=CONNECT)
        self.look()
        if not self.workers:
            raise MissingError(
                f"the scheduler at {self.address} has no workers: start some with `dask worker "
                f"{self.address} --nthreads 1 --nworkers N`."
            )
        self.ask(cluster_worker.compare_versions, cluster_worker.versions())
        self.watcher.start()
        ground = folder if folder.is_dir() else folder.parent
        ground.mkdir(parents=True, exist_ok=True)
        probe = Path(tempfile.mkdtemp(prefix=".probe-", dir=ground))
        try:
            (probe / "token").write_text(self.token)
            lock = Lock(probe)
            try:
                self.ask(cluster_worker.examine_folder, str(Path.cwd()), str(probe), self.token)
            finally:
                lock.release()
        finally:
            shutil.rmtree(probe, ignore_errors=True)

    def ask(self, question: Callable[..., str | None], *arguments: object) -> None:
        """Ask every worker; refuse the cluster if one answers with a complaint."""
        from . import cluster_worker

        answers = self.client.run(question, *arguments, on_error="return")
        for address, answer in answers.items():
            if answer is None:
                continue
            where = f"worker {self.label(address)}"
            if isinstance(answer, ModuleNotFoundError):
                raise MissingError(f"{where}: {answer}. Install coadjoint[cluster] there, too.")
            if isinstance(answer, OSError) and self.has_left(address):
                continue  # workers come and go
            if isinstance(answer, Exception):
                raise MissingError(f"{where} does not answer: {comm_error_text(answer)}.")
            if question is cluster_worker.compare_versions:
                raise MissingError(f"{where}: {answer}. Install the same version on all machines.")
            raise StorageError(
                f"{where} {answer}. All machines must share this folder, under the same name, "
                "with locks that hold between them."
            )

    def has_left(self, address: str) -> bool:
        """Whether a worker is gone, while there are others."""
        self.look()
        return bool(self.workers) and address not in self.workers

    def label(self, address: str) -> str:
        """A worker in words: its address, after its name if it was given one."""
        name = str(self.workers.get(address, {}).get("name", address))
        short = address.partition("://")[2]
        return short if name == address else f"{name} ({short})"

    # what runs where

    def watch(self) -> None:
        """Look at the cluster again and again, in a thread of its own: an answer may take long."""
        while not self.closing.wait(LOOK):
            with contextlib.suppress(Exception):  # a scheduler that is gone cancels the futures
                self.look()
                if self.stopping.is_set():
                    self.tell_to_stop()

    def look(self) -> None:
        """Note the workers and what they do."""
        # not scheduler_info(): another thread may just have put one without workers in its place
        scheduler = self.client.scheduler
        if scheduler is not None:  # it is, once the client is closed
            self.workers = self.client.sync(scheduler.identity, n_workers=-1)["workers"]
        self.processing = self.client.processing()
        self.most = max(self.most, self.size())

    def size(self) -> int:
        """The number of runs at a time: that of all threads of the workers."""
        threads: int = sum(worker["nthreads"] for worker in self.workers.values())
        return threads if self.jobs is None else min(threads, self.jobs)

    def places(self) -> Mapping[str, str]:
        """Where runs are under way, by their names."""
        where = {}
        for address, keys in list(self.processing.items()):
            where.update(dict.fromkeys(keys, self.label(address)))
        found = {}
        for future, key in list(self.keys.items()):
            if not self.workers:
                where[key] = "no worker: all are lost"
            if key in where:
                found[self.targets[future].name] = where[key]
        return found

    # runs

    def start(self, folder: Path, run: str) -> Future[Outcome]:
        """Send a run to the scheduler, which chooses a worker."""
        from .cluster_worker import AssignedRun, run_assigned, versions

        task = AssignedRun(str(Path.cwd()), str(folder), run, self.token, versions())
        key = f"{Path(run).name}-{self.token}"
        future: Future[Outcome] = self.executor.submit(run_assigned, task, key=key)
        self.keys[future] = key
        self.targets[future] = folder / run
        return future

    def complaint(self, future: Future[Outcome]) -> str | None:
        """Why a run failed; None if it did not. A lost scheduler or an unfit worker ends all."""
        from distributed.scheduler import KilledWorker

        from .cluster_worker import UnfitWorkerError

        del self.keys[future]
        target = self.targets.pop(future)
        if future.cancelled():
            if not self.stopping.is_set():
                self.failure = f"The Dask scheduler at {self.address} is gone"
            return None
        error = future.exception()
        if error is None:
            outcome = future.result()
            wait_until_seen(target, outcome.status)
            return outcome.complaint
        if isinstance(error, UnfitWorkerError):
            self.failure = f"{error}. Install the same version on all machines"
        if isinstance(error, KilledWorker):
            return "the workers that it ran on were lost, one after another"
        return error_text(error)

    def tell_to_stop(self) -> None:
        """Tell the workers to stop the runs, and take back those that no worker has."""
        from .cluster_worker import stop_runs

        self.client.run(stop_runs, self.token, on_error="ignore")
        taken = {key for keys in self.processing.values() for key in keys}
        for future, key in list(self.keys.items()):
            if key not in taken:
                future.cancel()

    def stop(self, at_once: bool) -> None:
        """Tell all runs to save and end. at_once: do not wait until they have."""
        self.stopping.set()
        if at_once:
            for future in list(self.keys):
                future.cancel()

    def close(self) -> None:
        """Leave the cluster; runs that are under way are stopped. Further calls do nothing."""
        if self.closing.is_set():
            return
        with contextlib.suppress(Exception):
            if self.keys and not self.stopping.is_set():
                self.tell_to_stop()
        self.closing.set()
        with contextlib.suppress(Exception):
            self.executor.shutdown(wait=False)
        with contextlib.suppress(Exception):
            self.client.close(timeout=CONNECT)


def wait_until_seen(target: Path, status: str | None) -> None:
    """Wait until the result of a run is seen here as well as where it was written."""
    end = time.monotonic() + SEEN
    while status is not None and read_status(target) != status and time.monotonic() < end:
        with contextlib.suppress(OSError):
            os.listdir(target)
        time.sleep(0.1)
