"""Floor 2: asks a model that a server serves, by the v2 protocol over HTTP: arrays in, arrays out.

The standard library speaks it: a client in CI needs no more, and threads may ask at once. gRPC is `served_grpc`. What
the answers are worth is `judging`'s, starting a server `triton.serving`'s.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from nlpconvert.backends import Batch
from nlpconvert.errors import UsageError, first_line
from nlpconvert.triton.endpoints import (
    TIMEOUT,
    TYPES,
    WORDS,
    Client,
    Counts,
    Described,
    Place,
    Refused,
    Unreachable,
    counted,
    described,
)


class HttpClient:
    """The v2 protocol over HTTP, arrays as raw bytes where the server takes them, else as JSON."""

    def __init__(self, place: Place, timeout: float = TIMEOUT) -> None:
        self.place = place
        self.timeout = timeout
        self._local = threading.local()
        self._opened: list[http.client.HTTPConnection] = []
        self._binary = True

    # -- one request --------------------------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Status, body and headers. Unreachable in one line. A connection that the server had closed is opened anew."""
        for attempt in (1, 2):
            known = getattr(self._local, "connection", None)
            connection = known or self._connect()
            try:
                connection.request(method, path, body, dict(headers or {}))
                answer = connection.getresponse()
                return answer.status, answer.read(), {key.lower(): value for key, value in answer.getheaders()}
            except TimeoutError as error:
                self._drop()
                raise Unreachable(f"{self._where()} gave no answer within {self.timeout:g} s") from error
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                stale = known is not None and isinstance(error, http.client.RemoteDisconnected | ConnectionError)
                if attempt == 2 or not stale:
                    why = getattr(error, "strerror", None) or first_line(error)
                    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
                        why = "what listens there does not speak HTTP"
                    raise Unreachable(f"no server answers at {self._where()}: {why}; is it up?") from error
        raise AssertionError

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.place.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.place.host, self.place.port, timeout=self.timeout)
        self._local.connection = connection
        self._opened.append(connection)
        return connection

    def _where(self) -> str:
        return f"{self.place.scheme}://{self.place.host}:{self.place.port}"

    def _model(self, model: str | None = None) -> str:
        version = f"/versions/{quote(self.place.version, safe='')}" if self.place.version else ""
        return f"/v2/models/{quote(model or self.place.model, safe='')}{version}"

    def get(self, path: str) -> Any:
        """A JSON document; Refused with the server's words where it has none."""
        status, body, _ = self.request("GET", path)
        return self._json(status, body)

    def _json(self, status: int, body: bytes) -> Any:
        try:
            found = json.loads(body) if body else {}
        except (ValueError, RecursionError) as error:
            if status == 200:
                raise Refused(f"{self._where()} does not speak the v2 protocol: its answer is no JSON") from error
            found = body.decode("utf-8", "replace")
        if status != 200:
            said = found.get("error") if isinstance(found, Mapping) else found
            raise Refused(first_line(RuntimeError(str(said or f"HTTP {status}")), 300))
        return found

    # -- what the server says -----------------------------------------------------------------------------------------

    def ready(self, model: str | None = None) -> bool:
        """Whether the server, or one of its models, is ready. Unreachable where nothing answers."""
        path = "/v2/health/ready" if model is None else f"{self._model(model)}/ready"
        return self.request("GET", path)[0] == 200

    def describe(self) -> Described:
        """As `Client.describe`."""
        try:
            server = self.get("/v2")
        except Refused as error:
            raise UsageError(f"{self._where()} is no server of the v2 protocol: {error}") from error
        try:
            data = self.get(self._model())
        except Refused as error:
            raise UsageError(f"{self._where()} does not serve {self.place.model}: {error}{self._served()}") from error
        config: Mapping[str, Any] = {}
        with contextlib.suppress(Refused):  # Triton's extension; another server does without
            config = self.get(f"{self._model()}/config")
        extensions = server.get("extensions", ()) if isinstance(server, Mapping) else ()
        self._binary = "binary_tensor_data" in extensions
        return described(server, data, config)

    def _served(self) -> str:
        try:
            status, body, _ = self.request("POST", "/v2/repository/index", b"{}")
            names = sorted({str(each["name"]) for each in self._json(status, body)})
        except (Refused, KeyError, TypeError):
            return ""
        return f"; it serves {', '.join(names)}" if names else "; it serves nothing"

    def counts(self) -> Counts | None:
        """As `Client.counts`."""
        try:
            data = self.get(f"{self._model()}/stats")
            return counted(data["model_stats"])
        except (Refused, KeyError, TypeError, ValueError):
            return None

    # -- asking -------------------------------------------------------------------------------------------------------

    def infer(self, batch: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """As `Client.infer`."""
        inputs, raw = [], []
        for name, array in batch.items():
            entry: dict[str, Any] = {"name": name, "shape": list(array.shape), "datatype": _word(name, array)}
            if self._binary:
                raw.append(_bytes(array))
                entry["parameters"] = {"binary_data_size": len(raw[-1])}
            else:
                entry["data"] = array.reshape(-1).tolist()
            inputs.append(entry)
        wanted = [{"name": name, "parameters": {"binary_data": self._binary}} for name in outputs]
        head = json.dumps({"inputs": inputs, "outputs": wanted}).encode()
        headers = {"Content-Type": "application/octet-stream" if self._binary else "application/json"}
        if self._binary:
            headers["Inference-Header-Content-Length"] = str(len(head))
        status, body, given = self.request("POST", f"{self._model()}/infer", b"".join([head, *raw]), headers)
        size = int(given.get("inference-header-content-length", len(body)))
        answer = self._json(status, body[:size])
        try:
            return _arrays(answer["outputs"], memoryview(body)[size:])
        except (KeyError, TypeError, ValueError, struct.error) as error:
            raise Refused(f"its answer cannot be read: {type(error).__name__} {first_line(error)}") from error

    def stream(self, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Triton's generate_stream: the answers of a decoupled model, one by one. Refused, Unreachable as `infer`."""
        connection = self._connect()
        try:
            connection.request("POST", f"{self._model()}/generate_stream", json.dumps(given).encode())
            answer = connection.getresponse()
            if answer.status != 200:
                self._json(answer.status, answer.read())
            for line in answer:
                if line.startswith(b"data:"):
                    found = json.loads(line[5:])
                    if "error" in found:
                        raise Refused(str(found["error"]))
                    yield found
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self._where()} broke off: {first_line(error)}") from error
        finally:
            self._drop()

    def _drop(self) -> None:
        """Gives up the calling thread's connection."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None
            self._opened.remove(connection)

    def close(self) -> None:
        """As `Client.close`: every thread's connection."""
        for connection in self._opened:
            connection.close()


def _word(name: str, array: np.ndarray) -> str:
    kind = "text" if array.dtype == object else array.dtype.name
    if kind not in WORDS:
        raise UsageError(f"{name} is {kind}, and the v2 protocol has no such type")
    return WORDS[kind]


def _bytes(array: np.ndarray) -> bytes:
    if array.dtype != object:
        return np.ascontiguousarray(array).tobytes()
    parts = [each if isinstance(each, bytes) else str(each).encode() for each in array.reshape(-1)]
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _arrays(outputs: Sequence[Mapping[str, Any]], raw: memoryview) -> dict[str, np.ndarray]:
    """Arrays by name; raises what a malformed answer raises."""
    found: dict[str, np.ndarray] = {}
    for entry in outputs:
        shape = [int(size) for size in entry["shape"]]
        kind = TYPES[entry["datatype"]]
        size = entry.get("parameters", {}).get("binary_data_size")
        if size is None:
            data = np.array(entry["data"], object if kind == "text" else kind)
        elif kind == "text":
            data = np.array(list(_texts(raw[:size])), object)
        else:
            data = np.frombuffer(raw[:size], kind)
        raw = raw if size is None else raw[size:]
        found[str(entry["name"])] = data.reshape(shape).copy()
    return found


def _texts(raw: memoryview) -> Iterator[bytes]:
    while raw:
        (size,) = struct.unpack_from("<I", raw)
        yield bytes(raw[4 : 4 + size])
        raw = raw[4 + size :]


# ---- the session ----------------------------------------------------------------------------------------------------


class ServedSession:
    """A served model as a `Session`: a batch goes as one request, or as several where it is over max_batch_size."""

    concurrent = True

    def __init__(self, client: Client, inputs: Sequence[str], outputs: Sequence[str], precision: str) -> None:
        self.client = client
        self.described = client.describe()
        self._inputs, self._outputs = list(inputs), list(outputs)
        kind = "tensorrt" if "tensorrt" in self.described.backend else "cuda" if self.described.gpu else "cpu"
        where = f"{self.described.server}, {self.described.backend} backend, {client.place.scheme}"
        self.provider = f"{kind} ({where})"
        self.precision = precision
        self.lost: Unreachable | None = None
        """What went wrong when the server was lost on the way: then nothing that followed is the artifact's fault."""

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """One forward pass. Refused with the server's words."""
        if self.lost is not None:
            raise self.lost
        given = {name: batch[name] for name in self._inputs}
        rows = len(next(iter(given.values())))
        most = self.described.max_batch or rows
        try:
            parts = [
                self.client.infer({name: array[start : start + most] for name, array in given.items()}, self._outputs)
                for start in range(0, rows, most)
            ]
        except Unreachable as error:
            self.lost = error
            raise
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def close(self) -> None:
        """Closes the connection."""
        self.client.close()
