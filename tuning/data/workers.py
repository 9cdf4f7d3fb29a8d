"""Work spread over processes, results in order.

Processes are forked: they share the rows and the tokenizer with the parent and start in milliseconds, where a new
interpreter would import transformers for seconds. Where fork does not exist, one process does the work. A pool of
``multiprocessing`` would pickle rows and tokenizer for every task.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from tuning.errors import UserError

__all__ = ["can_fork", "map_ordered", "num_cores"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Say whether processes can be forked here."""
    return "fork" in multiprocessing.get_all_start_methods()


def map_ordered(work: Callable[[Item], Result], items: Sequence[Item], *, num_workers: int) -> Iterator[Result]:
    """Yield ``work(item)`` for each item, in order.

    Args:
        work: Runs in a worker; its result must pickle.
        items: Work to do.
        num_workers: Processes; 1 does the work here.

    Raises:
        UserError: What ``work`` raised for the first item that failed, with the workers stopped.
        RuntimeError: If a worker died.
    """
    num_workers = min(num_workers, len(items))
    if num_workers <= 1 or not can_fork():
        yield from map(work, items)
        return
    context = multiprocessing.get_context("fork")
    processes, receivers = [], []
    try:
        for index in range(num_workers):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(work, items[index::num_workers], sender), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 warns of fork beside threads; a worker touches no lock of theirs: it tokenizes in one
                # thread and computes with numpy
                warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
                process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        for index in range(len(items)):
            yield _receive(receivers[index % num_workers])
    finally:
        for receiver in receivers:
            receiver.close()
        for process in processes:
            process.terminate()
            process.join()


def _work(work: Callable[[Any], Any], items: Sequence[Any], sender: Connection) -> None:
    # a forked tokenizer must not use the threads of its parent, and says so in a warning unless told
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for item in items:
        try:
            result = work(item)
        except UserError as error:
            sender.send(error)
            return
        sender.send((result,))


def _receive(receiver: Connection) -> Any:  # noqa: ANN401 - whatever the work returns
    try:
        message = receiver.recv()
    except EOFError as error:
        raise RuntimeError("a process that prepares data died; its own message is above") from error
    if isinstance(message, UserError):
        raise message
    return message[0]
