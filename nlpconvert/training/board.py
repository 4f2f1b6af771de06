"""Floor 2: a run's numbers for TensorBoard, where that is installed: import this file only there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

SHOWN = ("loss", "learning_rate", "gradient_norm")


class Board:
    """Writes a line of the log as TensorBoard's scalars, into `directory`."""

    def __init__(self, directory: Path) -> None:
        self._writer: Any = SummaryWriter(str(directory))

    def write(self, line: Mapping[str, Any]) -> None:
        """One step, or one epoch's scores."""
        for name in SHOWN:
            if name in line:
                self._writer.add_scalar(f"train/{name}", line[name], line["step"])
        for name, both in line.get("scores", {}).items():
            for side, value in both.items():
                if value is not None:
                    self._writer.add_scalar(f"eval/{name}/{side}", value, line["step"])

    def close(self) -> None:
        """Everything is on the disk."""
        self._writer.close()
