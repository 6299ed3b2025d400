"""The requests: lengths around every edge, alone and together."""

import random
from dataclasses import dataclass
from typing import List, Tuple

TOP_K = 64
WINDOW = 128
RING = 64
VOCABULARY = 2048


@dataclass(frozen=True)
class Request:
    """A random prompt of ``prompt_len`` tokens and the number of tokens to answer with."""

    rid: str
    prompt_len: int
    new_tokens: int

    @property
    def ids(self) -> List[int]:
        rng = random.Random(self.rid)
        return [rng.randrange(3, VOCABULARY) for _ in range(self.prompt_len)]

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.new_tokens


@dataclass(frozen=True)
class Phase:
    """Requests sent ``at_once``; the next ones follow when all of these are answered."""

    at_once: int
    requests: Tuple[Request, ...]

    @property
    def groups(self) -> List[Tuple[Request, ...]]:
        starts = range(0, len(self.requests), self.at_once)
        return [self.requests[i : i + self.at_once] for i in starts]


# (prompt, new tokens). A page is 64 too; LRU part and ring together are 192.
_ALONE = ((1, 16), (63, 16), (64, 16), (65, 144), (127, 16), (128, 16), (129, 80), (190, 80))
_FOUR = ((191, 48), (192, 80), (193, 48), (255, 80), (256, 48), (257, 80), (320, 48), (450, 80))
_SIXTEEN = tuple((150 + 14 * i, 40 + 8 * (i % 6)) for i in range(15)) + ((640, 64),)


def phases() -> List[Phase]:
    """All 32 requests: 8 one after another, two times 4, and 16."""
    return [
        Phase(at_once, tuple(Request(f"{at_once}x-{p}+{n}", p, n) for p, n in lengths))
        for at_once, lengths in ((1, _ALONE), (4, _FOUR), (16, _SIXTEEN))
    ]
