"""What the front tells the engine, and asks of it."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import StateError, UnavailableError
from batond.daemon.wire.messages import Cancel, CommandResult, HandBack, Park, Resume, SetPolicy

if TYPE_CHECKING:
    from batond.daemon.front.engine_link import EngineLink
    from batond.daemon.front.held import HeldJob
    from batond.daemon.wire.messages import Command, Ready

COMMAND_TIMEOUT_S: Final = 30.0


class EngineDesk:
    """Commands to the engine, and the answers to those that get one.

    Args:
        link: The engine.

    Attributes:
        policy: Set by hand, for this engine and those after it; empty is the configured one.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._answers: dict[int, asyncio.Future[CommandResult]] = {}
        self._requests = itertools.count(1)
        self.policy = ""

    @property
    def ready(self) -> Ready | None:
        """What the engine says of itself; None while there is none that takes commands."""
        return self._link.ready

    def tell(self, command: Command) -> None:
        """Send a command; without an engine it is not needed: a new one is told everything."""
        try:
            self._link.send(command)
        except UnavailableError:
            return

    def tell_all(self, kind: type[Cancel | HandBack], held: HeldJob) -> None:
        """Send a command for each query of a job, if the engine has them."""
        if held.given:
            for query_id in held.query_ids:
                self.tell(kind(query_id=query_id))

    async def ask_all(self, kind: type[Park | Resume], held: HeldJob) -> None:
        """Ask something of each query of a job; it is refused if all refuse.

        Raises:
            StateError: The engine refuses.
            UnavailableError: There is no engine now, or it is silent.
        """
        refusals = []
        for query_id in held.query_ids:
            try:
                await self._ask(kind(query_id=query_id, request_id=next(self._requests)))
            except StateError as error:
                refusals.append(error)
        if refusals and len(refusals) >= len(held.query_ids):
            raise refusals[0]

    async def set_policy(self, name: str) -> None:
        """Exchange the engine's policy; raises as `ask_all`."""
        await self._ask(SetPolicy(name=name, request_id=next(self._requests)))
        self.policy = name

    def engine_up(self, ready: Ready) -> None:
        """A new engine has the configured policy."""
        if self.policy and self.policy != ready.policy:
            self.tell(SetPolicy(name=self.policy, request_id=next(self._requests)))

    def engine_down(self) -> None:
        """It will answer nothing more."""
        for future in self._answers.values():
            if not future.done():
                future.set_exception(UnavailableError("the engine died", reason="ENGINE_DOWN"))

    def answer(self, result: CommandResult) -> None:
        """The engine has answered."""
        future = self._answers.get(result.request_id)
        if future is not None and not future.done():
            future.set_result(result)

    async def _ask(self, command: Park | Resume | SetPolicy) -> None:
        future = asyncio.get_running_loop().create_future()
        self._answers[command.request_id] = future
        try:
            self._link.send(command)
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                result: CommandResult = await future
        except TimeoutError as error:
            raise UnavailableError("the engine did not answer", reason="ENGINE_SILENT") from error
        finally:
            del self._answers[command.request_id]
        if result.reason:
            raise StateError(result.message, reason=result.reason)
