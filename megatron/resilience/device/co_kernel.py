"""Makes a GPU slow by kernels of the same process that take its time.

A stream of high priority goes first where blocks of two kernels are ready. So while its
multiplications run, training hardly does, and what it keeps is the part of the time in which they
do not.
"""

from __future__ import annotations

import threading
import time

import torch

PERIOD_S = 0.02
_SIZE = 4096
"""Of the square matrices: one product fills any GPU."""
_END_S = 10.0


class CoKernel:
    """A brake: in each period the GPU multiplies matrices for a part of the time."""

    def __init__(self, device: torch.device) -> None:
        """Prepares it; nothing runs yet.

        Args:
            device: The GPU on which this process trains.
        """
        self._device = device
        self._left = 1.0
        self._thread: threading.Thread | None = None

    def keep(self, left: float) -> None:
        """See :class:`resihp_ext.brake.brake.Brake`."""
        self._left = left
        if left >= 1 and self._thread is not None:
            self._thread.join(_END_S)
            self._thread = None
        elif left < 1 and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="co-running kernel", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device, priority=-1)
        with torch.cuda.stream(stream):
            matrix = torch.ones(_SIZE, _SIZE, device=self._device, dtype=torch.float16)
            out = torch.empty_like(matrix)
            while (left := self._left) < 1:
                begun_s = time.perf_counter()
                while time.perf_counter() - begun_s < (1 - left) * PERIOD_S:
                    torch.mm(matrix, matrix, out=out)
                    stream.synchronize()  # one at a time: what is queued would run on
                time.sleep(PERIOD_S * left)
