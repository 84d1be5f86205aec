"""Readers of long answers, for tests that disturb who writes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

from e2e_cluster import PROMPT, Cluster

from tandem import Client
from tandem.errors import RequestError

ENOUGH = "told enough"


class Reader:
    """Reads a stream until it ends or is told `enough`."""

    def __init__(self, client: Client, max_tokens: int) -> None:
        self._pieces = client.chat(
            PROMPT, stream=True, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, timeout_s=150.0
        )
        self._enough = threading.Event()
        self._reading: Future[str] | None = None
        self.token_ids: list[int] = []
        self.text = ""

    def begin(self, pool: ThreadPoolExecutor) -> None:
        self._reading = pool.submit(self._read)

    def ended_at_enough(self) -> str:
        """How it ended: `ENOUGH` when it has been well until now."""
        self._enough.set()
        assert self._reading is not None
        return self._reading.result(20)

    def _read(self) -> str:
        try:
            with closing(self._pieces):
                for piece in self._pieces:
                    self.token_ids += piece.token_ids
                    self.text += piece.text
                    if self._enough.is_set():
                        return ENOUGH
        except RequestError as error:
            return type(error).__name__
        return "it ended by itself"


def go_on_undisturbed(cluster: Cluster, client: Client, streams: Sequence[Reader]) -> None:
    """All of them, for twenty tokens more, and with the text that one alone has."""
    told = [len(stream.token_ids) for stream in streams]
    cluster.until(
        "they go on",
        lambda status: all(len(stream.token_ids) > n + 20 for stream, n in zip(streams, told, strict=True)),
        timeout_s=40,
    )
    assert [stream.ended_at_enough() for stream in streams] == [ENOUGH] * len(streams)
    longest = max(len(stream.token_ids) for stream in streams)
    undisturbed = client.chat(PROMPT, temperature=0.0, max_tokens=longest, ignore_eos=True)
    for stream in streams:
        assert stream.token_ids == list(undisturbed.token_ids[: len(stream.token_ids)])
        assert undisturbed.text.startswith(stream.text)
