"""Runs an endless loop one round at a time.

The loop runs in a thread of its own, but never at the same time as its owner: control is handed over, as between
coroutines. SGLang's event loops can so be stepped as they are written, patched or not.
"""

import threading
from typing import Callable, Optional


class _Stop(BaseException):
    """Thrown into the loop to end it."""


class Stepper:
    """Steps ``loop``, which must call `pause` once a round.

    An exception that leaves the loop is raised from the `step` that met it; afterwards the stepper is dead.
    """

    def __init__(self, loop: Callable[[], None]) -> None:
        self._loop = loop
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._stopping = False
        self._error: Optional[BaseException] = None
        self._thread = threading.Thread(target=self._main, name="stepper", daemon=True)
        self._started = False

    @property
    def alive(self) -> bool:
        """Whether another step can be taken."""
        return not self._stopping and self._error is None

    def step(self) -> None:
        """Run the loop from its present pause to the next (at first: from its start, through one whole round)."""
        if not self.alive:
            raise RuntimeError("the loop has ended") from self._error
        if not self._started:
            self._started = True
            self._thread.start()
            self._back.acquire()
            self._raise_error()
        self._go.release()
        self._back.acquire()
        self._raise_error()

    def pause(self) -> None:
        """Called by the loop: hand control back, and wait for the next step."""
        self._back.release()
        self._go.acquire()
        if self._stopping:
            raise _Stop

    def stop(self) -> None:
        """End the loop's thread; idempotent."""
        if self._stopping:
            return
        self._stopping = True
        if self._started and self._thread.is_alive():
            self._go.release()
            self._thread.join(timeout=30)

    def _main(self) -> None:
        try:
            self._loop()
            self._error = RuntimeError("the loop returned")
        except _Stop:
            pass
        except BaseException as error:
            self._error = error
        self._back.release()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
