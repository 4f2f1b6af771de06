"""Floor 1: a served model from outside: where it is, what its server says of it, what it has counted.

The words are those of the v2 protocol and of Triton's extensions to it; how they travel is `backends.served` (HTTP) and
`backends.served_grpc`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from nlpconvert.errors import CannotRunHere, UsageError
from nlpconvert.triton.plan import Tensor

TIMEOUT = 60.0
"""Seconds that a request may take, where nobody says."""

TYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
    "BYTES": "text",
}
"""The protocol's words for element types to numpy's."""
WORDS = {ours: theirs for theirs, ours in TYPES.items()}


class Unreachable(CannotRunHere):
    """No server answers, or it does not within the time."""


class Refused(RuntimeError):
    """The server answered that it will not: its words, in one line."""


@dataclass(frozen=True)
class Place:
    """Where a served model is: scheme ("http", "https", "grpc"), host, port, and its name (and version, or "")."""

    scheme: str
    host: str
    port: int
    model: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}/{self.model}"


def place(url: str) -> Place:
    """`http://host:8000/my_model` or `grpc://host:8001/my_model`, /versions/1 after it where one is meant."""
    advice = "write http://HOST:8000/MODEL or grpc://HOST:8001/MODEL"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--endpoint {url}: {error}; {advice}") from error
    default = {"http": 8000, "https": 443, "grpc": 8001}
    names = [name for name in parts.path.split("/") if name]
    if names[:2] == ["v2", "models"]:
        names = names[2:]
    if parts.scheme not in default or not parts.hostname or not names or len(names) not in (1, 3):
        raise UsageError(f"--endpoint {url} names no served model; {advice}")
    if len(names) == 3 and names[1] != "versions":
        raise UsageError(f"--endpoint {url}: after the model only versions/N may follow; {advice}")
    if parts.username or parts.query or parts.fragment:
        raise UsageError(f"--endpoint {url}: a user, a query or a fragment has no meaning here; {advice}")
    return Place(parts.scheme, parts.hostname, port or default[parts.scheme], names[0], names[2] if names[1:] else "")


@dataclass(frozen=True)
class Described:
    """What a server says of itself and of a model. `max_batch` None where it does not say; 0: nothing is batched.

    `batches`: a dynamic batcher is configured. Shapes include the batch axis.
    """

    server: str
    backend: str
    gpu: bool
    max_batch: int | None
    batches: bool
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Counts:
    """What a model has done since it was loaded: rows that were asked, executions, and how many of which size."""

    rows: int
    executions: int
    sizes: Mapping[int, int]

    def since(self, before: Counts) -> Counts:
        """What was done after `before`."""
        more = {size: count - before.sizes.get(size, 0) for size, count in self.sizes.items()}
        return Counts(
            self.rows - before.rows,
            self.executions - before.executions,
            {size: count for size, count in sorted(more.items()) if count > 0},
        )

    @property
    def formed(self) -> bool:
        """Whether any execution took more than one request's row: more rows than executions."""
        return self.rows > self.executions


class Client(Protocol):
    """A connection to one served model; threads may ask at once."""

    place: Place

    def describe(self) -> Described:
        """What the server says. Unreachable, or UsageError for a model that it does not serve."""
        ...

    def infer(self, batch: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """One request. Refused with the server's words; Unreachable where no answer came."""
        ...

    def counts(self) -> Counts | None:
        """The server's statistics of the model; None where it keeps none."""
        ...

    def close(self) -> None:
        """Closes its connections."""
        ...


def described(server: Any, model: Any, config: Mapping[str, Any]) -> Described:
    """From the server's, the model's and (where there is one) the configuration's JSON. UsageError for other forms."""
    try:
        tensors = [
            tuple(
                Tensor(str(t["name"]), TYPES.get(t["datatype"], str(t["datatype"])), tuple(int(n) for n in t["shape"]))
                for t in model[kind]
            )
            for kind in ("inputs", "outputs")
        ]
        gpu = any(str(group.get("kind")) == "KIND_GPU" for group in config.get("instance_group", ()))
        batches = "dynamic_batching" in config
        most = config.get("max_batch_size")
        backend = str(config.get("backend") or config.get("platform") or model.get("platform") or "unknown")
        words = f"{server.get('name', 'a server')} {server.get('version', '')}".strip()
        return Described(words, backend, gpu, None if most is None else int(most), batches, *tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"the server describes its model in another form than the v2 protocol's: {error}") from error


def counted(stats: Sequence[Mapping[str, Any]]) -> Counts:
    """Triton's statistics of all versions of a model. A size is counted by executions."""
    sizes: dict[int, int] = {}
    for version in stats:
        for each in version.get("batch_stats", ()):
            size = int(each["batch_size"])
            sizes[size] = sizes.get(size, 0) + int(each["compute_infer"]["count"])
    return Counts(
        sum(int(each["inference_count"]) for each in stats), sum(int(each["execution_count"]) for each in stats), sizes
    )


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
