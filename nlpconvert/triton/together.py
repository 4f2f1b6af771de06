"""Floor 3: the goldens asked all at once, so that a server's batcher has something to batch.

Each row of each case is a request of its own. What came back is put together again and judged like anything else:
`Together` is a session that has its answers already.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from nlpconvert.backends import Batch
from nlpconvert.inputs import Case
from nlpconvert.judging import Probes
from nlpconvert.progress import Progress

if TYPE_CHECKING:
    from nlpconvert.backends.served import ServedSession
    from nlpconvert.triton.endpoints import Counts

REQUESTS = 200
"""Requests in flight at once: every row of every case is sent, again and again until there are so many."""


class Together:
    """Every row of every case as a request of its own, all in flight at once; a `Session` that gives what came back.

    Rows are sent as they stand in their case, so that lengths are mixed. Of the copies that are sent of a case the one
    that lies farthest from the one before is what is judged.
    """

    def __init__(self, probes: Probes, session: ServedSession, requests: int = REQUESTS, seed: int = 0) -> None:
        self._session = session
        self._cases = [case for case in probes.cases if case.name not in probes.not_applicable]
        self._answers: dict[bytes, dict[str, np.ndarray] | Exception] = {}
        rows = sum(_rows(case) for case in self._cases)
        self.copies = max(2, math.ceil(requests / rows)) if rows else 0
        self.requests = rows * self.copies
        self.in_flight = min(requests, self.requests)
        self.moved = 0.0
        """By how much the same request was answered otherwise in another batch, at most."""
        self._order = random.Random(seed)
        self.provider, self.precision = session.provider, session.precision

    def ask(self, progress: Progress) -> Counts | None:
        """Sends them all; what the server counted meanwhile, None where it does not."""
        jobs = [(case, row, copy) for copy in range(self.copies) for case in self._cases for row in range(_rows(case))]
        self._order.shuffle(jobs)
        progress.start("verify, all at once", len(jobs))
        before = self._session.client.counts()
        found: dict[tuple[str, int, int], dict[str, np.ndarray] | Exception] = {}
        pool = ThreadPoolExecutor(max(self.in_flight, 1))
        try:
            asked = [pool.submit(self._one, *job) for job in jobs]
            for (case, row, copy), future in zip(jobs, asked, strict=True):
                found[case.name, row, copy] = future.result()
                progress.advance()
        finally:
            # Interrupted, nobody waits for answers that are still out: they end when the server does.
            pool.shutdown(wait=False, cancel_futures=True)
        after = self._session.client.counts()
        for case in self._cases:
            self._answers[_key(case.inputs)] = self._worst(case, found)
        return None if before is None or after is None else after.since(before)

    def _one(self, case: Case, row: int, copy: int) -> dict[str, np.ndarray] | Exception:
        try:
            return self._session.run({name: array[row : row + 1] for name, array in case.inputs.items()})
        except Exception as error:  # told when it is judged
            return error

    def _worst(
        self, case: Case, found: Mapping[tuple[str, int, int], dict[str, np.ndarray] | Exception]
    ) -> dict[str, np.ndarray] | Exception:
        whole: list[dict[str, np.ndarray]] = []
        for copy in range(self.copies):
            rows = [found[case.name, row, copy] for row in range(_rows(case))]
            for answer in rows:
                if isinstance(answer, Exception):
                    return answer
            parts = [answer for answer in rows if not isinstance(answer, Exception)]
            whole.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
        first = whole[0]
        far = [max((moved(first[name], each[name]) for name in first), default=0.0) for each in whole]
        self.moved = max(self.moved, *far)
        return whole[int(np.argmax(far))]

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """What came back for a case that was asked."""
        answer = self._answers[_key(batch)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Holds nothing open."""


def _rows(case: Case) -> int:
    return len(next(iter(case.inputs.values())))


def _key(batch: Batch) -> bytes:
    return b"".join(name.encode() + str(array.shape).encode() + array.tobytes() for name, array in batch.items())


def moved(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference; infinite where one of them is no number."""
    if not one.size:
        return 0.0
    moved = float(np.max(np.abs(one.astype(np.float64) - other.astype(np.float64))))
    return moved if math.isfinite(moved) else math.inf


def batches(together: Together, counts: Counts | None) -> str:
    """What came of sending them all, in a line."""
    said = f"{together.requests} requests, {together.in_flight} at once"
    if counts is None:
        return f"{said}; the server keeps no statistics, so that it is not known which batches formed"
    largest = max(counts.sizes, default=0)
    return (
        f"{said}: {counts.rows} rows in {counts.executions} executions, the largest of {largest}; the same request in "
        f"another batch differs by {f'{together.moved:.1e}' if together.moved else '0'} at most"
    )


def unproven(session: ServedSession, counts: Counts | None) -> list[str]:
    """Why nothing is known of batches, where the server is told to form them."""
    if not session.described.batches or (session.described.max_batch or 0) < 2:
        return []
    if counts is None or counts.formed:
        return []
    return [f"no batch formed: {counts.rows} rows in {counts.executions} executions: what batching does is not known"]
