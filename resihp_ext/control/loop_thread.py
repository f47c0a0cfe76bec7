"""A daemon thread that runs asyncio; its errors reach whoever owns it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any

from resihp_ext.errors import ResiHPError

logger = logging.getLogger(__name__)


class LoopThread:
    """Runs one coroutine until it ends, fails, or :meth:`stop` is called.

    The coroutine calls :meth:`ready` once others may use it. An error of the coroutine, or of
    anything scheduled in its loop, is logged with its traceback, handed to ``on_error`` (in this
    thread), and raised by :meth:`stop`.
    """

    def __init__(
        self,
        name: str,
        main: Callable[[], Coroutine[Any, Any, None]],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._main = main
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._others: set[asyncio.Task[None]] = set()
        self._pid = os.getpid()
        self.error: BaseException | None = None

    def start(self, timeout_s: float) -> None:
        """Starts the thread and waits until the coroutine is ready.

        Raises:
            ResiHPError: it was not in time; or whatever the coroutine raised before it was ready.
        """
        self._thread.start()
        if not self._ready.wait(timeout_s):
            self._cancel()
            raise ResiHPError(f"{self._thread.name} was not ready within {timeout_s:g} s")
        if self.error is not None:
            raise self.error

    def ready(self) -> None:
        """Lets :meth:`start` return."""
        self._ready.set()

    def call(self, function: Callable[..., object], *args: object) -> bool:
        """Calls a function in the thread, soon; False when the thread has ended.

        From any thread. In a forked child, where the thread does not exist, it does nothing.
        """
        loop = self._loop
        if loop is None or os.getpid() != self._pid:
            return False
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs a coroutine in the thread.

        Raises:
            ResiHPError: the thread has ended.
        """
        loop = self._loop
        if loop is None or loop.is_closed() or os.getpid() != self._pid:
            coroutine.close()
            raise ResiHPError(f"{self._thread.name} has ended")
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def ask[Told](self, function: Callable[[], Told], timeout_s: float) -> Told:
        """What a function gives that is called in the thread; from any other one.

        Raises:
            ResiHPError: the thread has ended.
            TimeoutError: it did not answer in time.
        """

        async def called() -> Told:
            return function()

        future = self.submit(called())
        try:
            told: Told = future.result(timeout_s)
        except CancelledError:
            raise ResiHPError(f"{self._thread.name} has ended") from None
        finally:
            future.cancel()
        return told

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine beside the first one, with the same care; only from the thread."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._others.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._others.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the thread with this error; only from the thread."""
        if self.error is None:
            self.error = error
            if self._task is not None:
                self._task.cancel()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread; may be called again, and from the thread itself.

        Raises:
            ResiHPError: it did not end in time; or the error that ended it before.
        """
        if os.getpid() != self._pid or not self._thread.ident:
            return
        self._cancel()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise ResiHPError(f"{self._thread.name} did not end within {timeout_s:g} s")
        if self.error is not None:
            raise self.error

    def _cancel(self) -> None:
        if self._task is not None:
            self.call(self._task.cancel)

    def _run(self) -> None:
        try:
            asyncio.run(self._supervised())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread
            self.error = self.error or error
        if self.error is not None:
            logger.error("%s failed", self._thread.name, exc_info=self.error)
            if self._ready.is_set():
                self._on_error(self.error)
        self._loop = None
        self._ready.set()

    async def _supervised(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._loop.set_exception_handler(self._handle)
        try:
            await self._main()
        finally:
            for task in self._others:
                task.cancel()

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError):  # a peer that is gone, a port without descriptors left
            loop.default_exception_handler(context)
            return
        self.fail(error or ResiHPError(context["message"]))
