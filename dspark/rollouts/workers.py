"""Several processes that generate: Ray actors, each with the models in its own memory, and one writer, which is here.

Requests go out in small pieces as workers become free, and what finishes streams back one by one to whoever writes, so
journal, shards and resume are those of a run without workers, and so are the bytes: a trajectory depends on its own
request alone. That is promised within one device type and build only, so a worker whose models or build are others is
refused. A worker that dies is replaced, and what it had not finished is given out again.

Ray is started on this machine and stopped again, or RAY_ADDRESS names a cluster; its machines then need this package
and the models under the same names. Left out on purpose: one sequence over several workers, and rewards in them.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import groupby
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any

import torch

from dspark.contracts import Completion, DsparkError, Request
from dspark.rollouts.collect import Generator
from dspark.rollouts.manifest import differing_facts

Make = Callable[[], tuple[Generator, dict[str, Any]]]  # what a worker calls: its runner, and manifest.run_facts of it
OnFinish = Callable[[int, Completion], None]

DEATHS = 3  # of the workers that had one and the same piece, with nothing of it finished in between
_SWITCHES = "DEEPINFER_"
_OBJECT_STORE = 128 << 20  # bytes, of a Ray of our own: what passes through are token ids


@dataclass(slots=True)
class Piece:
    """Requests that go to one worker together: their places in the whole list. deaths: of workers that had them."""

    places: list[int]
    deaths: int = 0


class Workers:
    """A Generator over `count` workers.

    make: called in each worker, so it is picklable. batch: sequences a worker has in flight. facts: of the process that
    writes; a worker's must be the same. Raises DsparkError when Ray is not installed or does not start, when a worker
    is another build or has other models, and when workers die again and again over the same requests.
    """

    def __init__(self, make: Make, count: int, batch: int, facts: dict[str, Any]):
        self._make, self._count, self._batch, self._facts = make, count, batch, facts
        self._ray = _import_ray()

    def generate(self, requests: list[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        """Finish all requests; completions in request order, ``on_finish(index, completion)`` as they end."""
        with _running(self._ray, self._count) as threads:
            run = _Run(self._ray, self._arguments(threads), threads, pieces(requests, self._count, self._batch))
            try:
                for place, completion in run.results(requests, self._count):
                    if on_finish:
                        on_finish(place, completion)
            finally:
                run.stop()
        return [run.done[place] for place in range(len(requests))]

    def _arguments(self, threads: int) -> tuple[Any, ...]:
        switches = {name: value for name, value in os.environ.items() if name.startswith(_SWITCHES)}
        return self._make, self._facts, threads, switches


class _Run:
    """One generate call: who works on which piece, and what is done."""

    def __init__(self, ray: ModuleType, arguments: tuple[Any, ...], threads: int, left: Sequence[Piece]):
        self._ray, self._arguments, self._left = ray, arguments, deque(left)
        self._actor = ray.remote(_Worker).options(num_cpus=threads)
        self._alive: list[Any] = []
        self._streams: dict[Any, tuple[Any, Piece]] = {}
        self.done: dict[int, Completion] = {}

    def results(self, requests: Sequence[Request], count: int) -> Iterator[tuple[int, Completion]]:
        free = [self._hire() for _ in range(min(count, len(self._left)))]
        while self._left or self._streams:
            while free and self._left:
                self._give(free.pop(0), self._left.popleft(), requests)
            stream = self._ray.wait(list(self._streams), num_returns=1)[0][0]
            worker, piece = self._streams[stream]
            try:
                index, completion = self._ray.get(next(stream))
            except StopIteration:
                del self._streams[stream]
                free.append(worker)
            except self._ray.exceptions.RayTaskError as error:  # an exception of ours, or of the user's models
                raise _told(error) from error
            except self._ray.exceptions.RayError as error:  # the process is gone
                del self._streams[stream]
                self._alive.remove(worker)
                self._left.appendleft(self._unfinished(piece, error))
                free.append(self._hire())
            else:
                place = piece.places[index]
                self.done[place] = completion
                yield place, completion

    def stop(self) -> None:
        for worker in self._alive:
            self._ray.kill(worker)

    def _hire(self) -> Any:
        self._alive.append(self._actor.remote(*self._arguments))
        return self._alive[-1]

    def _give(self, worker: Any, piece: Piece, requests: Sequence[Request]) -> None:
        stream = worker.run.options(num_returns="streaming").remote([requests[place] for place in piece.places])
        self._streams[stream] = worker, piece

    def _unfinished(self, piece: Piece, error: Exception) -> Piece:
        """What is left of a dead worker's piece. Raises DsparkError when too many died over it."""
        left = [place for place in piece.places if place not in self.done]
        deaths = piece.deaths + 1 if len(left) == len(piece.places) else 1
        if deaths > DEATHS:
            raise DsparkError(
                f"workers: expected them to live, but {deaths} in a row died over the same {len(left)} requests, the "
                f"last one so: {_first_line(error)}. Give them more memory or fewer of them; what is finished is kept, "
                "and the same command goes on."
            ) from error
        return Piece(left, deaths)


class _Worker:
    """What runs in a process of Ray's. The models are loaded at the first piece."""

    def __init__(self, make: Make, facts: dict[str, Any], threads: int, switches: dict[str, str]):
        for name in [name for name in os.environ if name.startswith(_SWITCHES)]:
            del os.environ[name]  # of the machine's own: those of the process that writes hold everywhere
        os.environ.update(switches)
        self._make, self._facts, self._threads = make, facts, threads
        self._engine: Generator | None = None

    def run(self, requests: list[Request]) -> Iterator[tuple[int, Completion]]:
        """(index in requests, completion) as they end."""
        if self._engine is None:
            self._engine = self._load()
        yield from streamed(self._engine, requests, self._threads)

    def _load(self) -> Generator:
        torch.set_num_threads(self._threads)
        engine, facts = self._make()
        if differing := differing_facts(self._facts, facts):
            shown = "; ".join(f"{key} is {facts.get(key)!r}, there {self._facts.get(key)!r}" for key in differing)
            raise DsparkError(
                f"worker on {os.uname().nodename}: expected models and build of the process that writes, but here "
                f"{shown}. The same bytes are promised within one build: install the same releases and copy the same "
                "models to every machine."
            )
        return engine


def streamed(engine: Generator, requests: list[Request], threads: int) -> Iterator[tuple[int, Completion]]:
    """engine.generate as an iterator over what ends; it runs in a thread of its own, with so many of torch's."""
    ended: SimpleQueue[tuple[int, Completion] | BaseException | None] = SimpleQueue()

    def work() -> None:
        torch.set_num_threads(threads)  # a thread's own setting
        try:
            engine.generate(requests, lambda index, completion: ended.put((index, completion)))
            ended.put(None)
        except BaseException as error:  # raised again below, where the caller is
            ended.put(error)

    Thread(target=work, daemon=True).start()
    while (item := ended.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


def pieces(requests: Sequence[Request], workers: int, batch: int) -> list[Piece]:
    """Whole runs of requests with the same prompt, whose prefix is then read once, in pieces of about a quarter of a
    worker's share and at most two batches; a run is cut only when it is larger, or there are fewer than workers."""
    runs = [list(run) for _, run in groupby(range(len(requests)), lambda i: requests[i].prompt_ids)]
    whole = max(map(len, runs), default=1) if len(runs) >= workers else 1
    size = min(2 * batch, max(whole, math.ceil(len(requests) / (4 * workers))))
    found: list[Piece] = []
    for run in runs:
        if found and len(found[-1].places) + len(run) <= size:
            found[-1].places += run
        else:
            found += [Piece(run[i : i + size]) for i in range(0, len(run), size)]
    return found


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise DsparkError(
            'workers: expected Ray for more than one worker, but it is not installed. Install it: pip install "ray" '
            '(or "dspark[ray]"), or leave out --workers.'
        ) from None
    return ray


@contextmanager
def _running(ray: ModuleType, count: int) -> Iterator[int]:
    """Ray while it is needed: the caller's own, the one at RAY_ADDRESS, or one that is started here and stopped again.
    Yields how many threads each worker gets: its share of the cores."""
    ours = not ray.is_initialized()
    if ours:
        _start(ray, count)
    try:
        with redirect_stdout(sys.stderr):  # Ray prints there that a worker died; stdout is the summary's
            yield _threads(ray, count)
    finally:
        if ours:
            ray.shutdown()


def _start(ray: ModuleType, count: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get("RAY_ADDRESS")
    if not address:  # "local": not one that somebody else has started on this machine
        quiet |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE, "num_cpus": max(_cores(), count)}
    try:
        _knock(address or "")
        ray.init(address=address or "local", **quiet)
    except Exception as error:  # Ray's own, and whatever its start brings up
        where = f"at RAY_ADDRESS={address}" if address else "on this machine"
        raise DsparkError(
            f"workers: expected Ray {where}, but got {type(error).__name__}: {_first_line(error)}. Mend that, or leave "
            "out --workers."
        ) from error


def _knock(address: str) -> None:
    """Raises OSError where nobody listens at host:port: Ray would ask for minutes. Other forms are Ray's matter."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if separator and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5).close()


def _threads(ray: ModuleType, count: int) -> int:
    machines = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    if sum(machines) < count:
        raise DsparkError(
            f"workers: expected a core for each of {count}, but Ray has {sum(machines)}. Give fewer --workers."
        )
    cores = min(sum(machines), _cores()) if len(machines) == 1 else sum(machines)
    return max(1, min(cores // count, max(machines)))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _told(error: Any) -> BaseException:
    """What a worker raised, as it raised it when it is for the user."""
    return error.cause if isinstance(error.cause, DsparkError) else error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
