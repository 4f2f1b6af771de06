"""Floor 2: a session under other names: a foreign file speaks its own, the goldens speak ours."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nlpconvert import renaming
from nlpconvert.backends import Batch, Session


class RenamedSession:
    """Wraps an opened session. `inputs` and `outputs` are their names to ours; `types` the element types they read.

    What it gives besides is left out; what it reads and the batch does not hold is derived (`renaming.derive`).
    """

    def __init__(
        self, session: Session, inputs: Mapping[str, str], outputs: Mapping[str, str], types: Mapping[str, str]
    ) -> None:
        self.wrapped = self._session = session
        self.plain = all(theirs == ours for names in (inputs, outputs) for theirs, ours in names.items())
        self._inputs = dict(inputs)
        self._outputs = dict(outputs)
        self._types = dict(types)
        self.provider = session.provider
        self.precision = session.precision

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """One forward pass, in our names on both sides."""
        answers = self._session.run(feed(batch, self._inputs, self._types))
        return {ours: answers[theirs] for theirs, ours in self._outputs.items() if theirs in answers}

    def close(self) -> None:
        """Closes what it wraps."""
        self._session.close()


def feed(batch: Batch, inputs: Mapping[str, str], types: Mapping[str, str]) -> dict[str, np.ndarray]:
    """A batch in their names and element types."""
    given = {}
    for theirs, ours in inputs.items():
        array = batch[ours] if ours in batch else renaming.derive(ours, batch)
        given[theirs] = array.astype(types.get(theirs, array.dtype.name))
    return given
