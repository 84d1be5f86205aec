"""A worker's process from birth to end: wait for the turn, start the rank, register, serve, say why it ends.

One process is one incarnation. Whatever goes wrong, the process ends and whoever watches it (Ray) starts another, which
waits for its turn again; so there is one road back from every fault. A worker that is fenced while it lives finds out
when it asks whether it is still known, and ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from cluster import models
from cluster.config import TandemConfig
from cluster.control import Control, WorkerUnfit
from cluster.wiring import control_settings, model_source, rank_settings
from engine.errors import TandemError
from tandem.messages import Declined, WorkerInfo, WorkerRef

log = logging.getLogger(__name__)

KNOWN_EVERY_S = 1.0


class Desk(Protocol):
    """The router, as a worker knows it. `None` from `knows`: the router cannot be asked right now."""

    async def turn(self, name: str) -> Declined | None: ...

    async def register(self, info: WorkerInfo, events: str, draining: bool) -> Declined | None: ...

    async def failed(self, name: str, why: str, hopeless: bool) -> None: ...

    async def knows(self, ref: WorkerRef) -> bool | None: ...


class GivenUp(TandemError):
    """This worker does not start; its process stays, idle, so that nothing starts it again."""


class WorkerHost:
    """`host` is the address that this worker binds and gives to others."""

    def __init__(
        self,
        config: TandemConfig,
        secret: str,
        name: str,
        desk: Desk,
        *,
        host: str,
        resolve: Callable[[str], Path] = models.resolve,
        allow_faults: bool = False,
    ) -> None:
        self._config = config
        self._secret = secret
        self.name = name
        self._desk = desk
        self._host = host
        self._resolve = resolve
        self._allow_faults = allow_faults
        self.control: Control | None = None

    async def run(self) -> str:
        """Serve until the end of this incarnation and return why it ended. Raises GivenUp."""
        declined = await self._desk.turn(self.name)
        if declined is not None:
            raise GivenUp(declined.message)
        hopeless = False
        try:
            why = await self._serve()
        except TandemError as error:
            why, hopeless = str(error), isinstance(error, WorkerUnfit)
        await self._desk.failed(self.name, why, hopeless)
        return why

    async def stop(self) -> None:
        if self.control is not None:
            await self.control.stop()

    async def _serve(self) -> str:
        model = await asyncio.to_thread(self._resolve, model_source(self._config))
        rank = rank_settings(self._config, self.name, model, host=self._host, allow_faults=self._allow_faults)
        control = self.control = Control(control_settings(self._config, self._secret, host=self._host), rank)
        info = await control.start()
        try:
            return await self._until_the_end(control, info)
        finally:
            await control.stop()

    async def _until_the_end(self, control: Control, info: WorkerInfo) -> str:
        known: bool | None = False
        while not control.died.done():
            if known is False:
                draining = control.last_report is not None and control.last_report.draining
                declined = await self._desk.register(info, control.events_address, draining)
                if declined is not None:
                    return declined.message
            await asyncio.wait({control.died}, timeout=KNOWN_EVERY_S)
            known = await _unless_dead(control, self._desk.knows(info.ref))
        return control.died.result()


async def _unless_dead(control: Control, question: Awaitable[bool | None]) -> bool | None:
    """The answer, or None when the rank ends first: a router that hangs must not hide that."""
    asked = asyncio.ensure_future(question)
    either: set[asyncio.Future[Any]] = {asked, control.died}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if asked.done():
        return asked.result()
    asked.cancel()
    return None
