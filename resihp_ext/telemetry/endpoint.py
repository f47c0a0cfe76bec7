"""An HTTP endpoint for Prometheus, in daemon threads: nothing in the job waits for who asks.

It listens on one interface, answers a few requests at a time, and gives up on whoever is slow.
Metrics are gathered when they are asked for. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any, ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from resihp_ext.control.forks import close_in_children
from resihp_ext.errors import ResiHPError, UserError

logger = logging.getLogger(__name__)

REQUEST_S = 10.0
"""For a client to say what it wants, and to take it."""
REQUESTS = 8
"""At a time; further ones are turned away."""
ASK_S = 5.0
"""For a control thread to tell what it knows."""
CLOSE_S = 5.0
POLL_S = 0.1
"""Within which it notices that it is to end."""

Source = Callable[[float], Iterable[Metric]]
"""Gives metrics, waiting no longer than so many seconds for anybody."""


class Endpoint:
    """Serves what its :attr:`source` gives; the owner calls :meth:`close`."""

    def __init__(self, host: str, port: int) -> None:
        """Listens.

        Raises:
            UserError: it cannot listen there.
        """
        registry = CollectorRegistry()
        self._metrics = _Metrics()
        registry.register(self._metrics)
        ProcessCollector(registry=registry)
        try:
            self._server = _Server(_resolved(host, port), _Handler)
        except OSError as error:
            what = error.strerror or str(error)
            raise UserError(
                f"resihp-run: metrics at {host} port {port}: {what}; "
                "give another --metrics-port or --metrics-host, or none"
            ) from None
        self._server.set_app(make_wsgi_app(registry))
        self._pid = os.getpid()
        close_in_children(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=[POLL_S], name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self._server.server_name, self._server.server_port

    def show(self, source: Source) -> None:
        """From now on serves what this source gives."""
        self._metrics.source = source

    def filenos(self) -> list[int]:
        """Listening sockets, for ``forks``."""
        return [self._server.fileno()]

    def close(self) -> None:
        """Stops listening."""
        if os.getpid() != self._pid:
            return
        self._server.shutdown()
        self._thread.join(CLOSE_S)
        self._server.server_close()


class _Metrics(Collector):
    """What is told at this moment; that a part of it fails is said once."""

    def __init__(self) -> None:
        self.source: Source = lambda _wait_s: ()
        self._complained = False

    def collect(self) -> Iterator[Metric]:
        try:
            yield from self.source(ASK_S)
        except (ResiHPError, TimeoutError):
            return  # a control thread that ends, or is busy: the rest is left out
        except Exception as error:
            # The boundary of the thread: the answer is an error 500, and people are told.
            if not self._complained:
                self._complained = True
                print(f"resihp-run: no metrics: {error!r}", file=sys.stderr, flush=True)  # noqa: T201
            logger.exception("no metrics")
            raise

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is, is known only later."""
        return ()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, found: tuple[int, Any], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = found[0]
        self._free = threading.BoundedSemaphore(REQUESTS)
        super().__init__(found[1], handler)

    def server_bind(self) -> None:
        """As the base class, but without asking the network for the host's full name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, unless there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In that thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is slow or gone is no error of ours."""
        logger.debug("request of %s broken off", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout: ClassVar[float] = REQUEST_S

    def get_stderr(self) -> Any:
        """Nobody: tracebacks are in the log."""
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""


def _resolved(host: str, port: int) -> tuple[int, Any]:
    """Family and address to listen at.

    Raises:
        OSError: there is no such host.
    """
    if not host:
        raise OSError("needs the name or address of an interface")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, address
