"""Token streams: from the workers' frames to the one request that waits for each piece of news.

A decode worker sends one `Frame` a step with the news of all its requests. The hub splits it into one stream per
request. A stream ends when every sequence of the request has a `finish`, with a delta that ends them all (an error, an
abort), or when its owner releases it. Three things can go wrong and each has its exit here: a worker is lost (every
stream it feeds ends with UNAVAILABLE), a delta comes twice (dropped), a delta is missing (the stream ends with
UNAVAILABLE: text with a hole is never delivered). Frames of an old incarnation, and news of requests that nobody
expects any more, are dropped.

Everything here runs on the gateway's event loop; other threads use `call_soon_threadsafe`. What a stream can queue is
bounded by the request's `max_tokens`, for each of its sequences.

A running request may move to another worker. Its old one says so with its last delta, and from then on the stream is
fed by the new one. What that one said before waits here for this word, by the number of the move, so the news of both
come in order whatever roads they take; and when the old one takes the request back instead, they are never told. The
new one tells its beginning again when it is asked (`Follow`), for we may not have listened yet.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import replace
from typing import Self

from tandem.messages import Code, Declined, Delta, Frame, WorkerRef

MOST_EARLY = 1024
"""Deltas kept for a stream from workers that it may move to. A hole that this leaves is mended by `Follow`."""


class TokenStream:
    """The news of one request, in order: `async for delta in stream`. `sequences` are told apart by their index;
    another stream has told the `first` tokens of the only one."""

    def __init__(self, request_id: str, worker: WorkerRef, sequences: int = 1, first: int = 0) -> None:
        self.request_id = request_id
        self.worker = worker
        self._move = 0
        self._begins_at: int | None = None
        """After a move, until the new worker's beginning is here: its first token."""
        self._early: deque[tuple[str, str, Delta]] = deque(maxlen=MOST_EARLY)
        """(worker, incarnation, news) of moves that the present worker has not told of yet."""
        self._deltas: deque[Delta] = deque()
        self._news = asyncio.Event()
        self._next_seq: Counter[int] = Counter({0: first})
        self._open = set(range(sequences))
        self._ended = False

    def hear(self, worker: str, incarnation: str, delta: Delta) -> None:
        """News of the request from a worker: the one that feeds this stream, or one that may do so soon."""
        if not _feeds(self.worker, worker, incarnation):
            if delta.move:
                self._early.append((worker, incarnation, delta))
            return
        if delta.moved is None and delta.move != self._move:
            return  # of an earlier move to this worker, which came to nothing
        if self._begins_at is not None and delta.seq > self._begins_at:
            return  # told again by `Follow`
        self._begins_at = None
        self.put(delta)
        if delta.moved is not None:
            self._goes_on(delta.moved, delta.move)

    def _goes_on(self, worker: WorkerRef, move: int) -> None:
        self.worker, self._move, self._begins_at = worker, move, self._next_seq[0]
        early = tuple(self._early)
        self._early.clear()
        for name, incarnation, delta in early:
            if _feeds(worker, name, incarnation):
                self.hear(name, incarnation, delta)

    def put(self, delta: Delta) -> None:
        """Add news; what comes after the end is dropped, a repetition is trimmed, a hole ends the stream."""
        if self._ended or (delta.index not in self._open and not delta.ends_request):
            return
        if (missing := delta.seq - self._next_seq[delta.index]) > 0:
            delta = self._lost(f"{missing} tokens of the stream were lost on the way")
        if delta.seq < self._next_seq[delta.index]:
            delta = self._without_repetition(delta)
            if delta.tokens == () and delta.finish is None and delta.error is None and delta.moved is None:
                return
        self._next_seq[delta.index] += len(delta.tokens)
        if delta.finish is not None:
            self._open.discard(delta.index)
        self._ended = delta.ends_request or not self._open
        self._deltas.append(delta)
        self._news.set()

    def skip(self, index: int) -> None:
        """Nobody wants more of this sequence: its news is dropped, also what waits here."""
        self._open.discard(index)
        self._deltas = deque(delta for delta in self._deltas if delta.index != index or delta.ends_request)
        if not self._open:
            self.close()

    def lost(self, why: str) -> None:
        """End the stream: its worker is gone."""
        self.put(self._lost(why))

    def end(self, error: Declined) -> None:
        """End the stream with this error."""
        self.put(Delta(self.request_id, self._next_seq[0], error=error))

    def close(self) -> None:
        """End the stream without news; a reader that waits is woken."""
        self._ended = True
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._deltas.popleft()

    def _lost(self, why: str) -> Delta:
        return Delta(self.request_id, self._next_seq[0], error=Declined(Code.UNAVAILABLE, why, by=self.worker.name))

    def _without_repetition(self, delta: Delta) -> Delta:
        known = self._next_seq[delta.index]
        seen = known - delta.seq
        return replace(delta, seq=known, tokens=delta.tokens[seen:]) if seen > 0 else delta


class FrameHub:
    """All open token streams of one gateway."""

    def __init__(self) -> None:
        self._streams: dict[str, TokenStream] = {}

    def expect(self, request_id: str, worker: WorkerRef, sequences: int = 1, first: int = 0) -> TokenStream:
        """Open the stream of a request before its worker hears of it. The caller releases it in a `finally`."""
        if request_id in self._streams:
            raise ValueError(f"request {request_id} already has a stream")
        stream = self._streams[request_id] = TokenStream(request_id, worker, sequences, first)
        return stream

    def deliver(self, frame: Frame) -> None:
        """Hand each delta of `frame` to its stream."""
        for delta in frame.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.hear(frame.worker, frame.incarnation, delta)

    def lost(self, worker: str, incarnation: str, why: str) -> None:
        """A worker (this incarnation of it) is gone: end every stream that it feeds."""
        for stream in tuple(self._streams.values()):
            if _feeds(stream.worker, worker, incarnation):
                stream.lost(f"worker {worker} was lost: {why}")

    def release(self, request_id: str) -> None:
        """The request is over, whatever its state; later news of it is dropped."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.close()

    def __len__(self) -> int:
        return len(self._streams)


def _feeds(ref: WorkerRef, worker: str, incarnation: str) -> bool:
    return ref.name == worker and ref.incarnation == incarnation
