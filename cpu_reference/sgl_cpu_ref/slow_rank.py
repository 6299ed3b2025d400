"""Makes one tensor-parallel rank slower than the others, so that a decision taken from a rank's own pace shows.

``SGL_CPU_REF_SLOW_RANK=RANK:SECONDS`` has the rank sleep up to so long, at random, before each forward.
"""

import os
import random
import time

VARIABLE = "SGL_CPU_REF_SLOW_RANK"


def install() -> None:
    """Wrap ``ModelRunner.forward`` where the variable is set."""
    setting = os.environ.get(VARIABLE)
    if setting is None:
        return
    from sglang.srt.model_executor.model_runner import ModelRunner

    rank, seconds = setting.split(":")
    forward = ModelRunner.forward

    def slow(self, *args, **kwargs):
        if self.tp_rank == int(rank):
            time.sleep(random.random() * float(seconds))
        return forward(self, *args, **kwargs)

    ModelRunner.forward = slow
