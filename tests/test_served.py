"""A served model asked by the v2 protocol: a small server of the test's own around the real artifact."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlpconvert import manifest, models, runtimes
from nlpconvert.backends import Batch, served
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.plan import Options
from nlpconvert.progress import Silent
from nlpconvert.settings import Settings
from nlpconvert.triton import endpoints, serving
from nlpconvert.triton.endpoints import Counts

Answer = Callable[[Batch], Mapping[str, np.ndarray]]


class Quiet(ThreadingHTTPServer):
    """Clients that give up are the tests' own doing."""

    def handle_error(self, *_: Any) -> None:
        """Says nothing."""


class Server:
    """The v2 protocol over HTTP as its specification has it, without any of Triton's extensions but those named."""

    def __init__(
        self, answer: Answer, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], *, binary: bool = True,
        config: Mapping[str, Any] | None = None, batches: int = 0,
    ) -> None:  # fmt: skip
        self.answer, self.inputs, self.outputs = answer, inputs, outputs
        self.extensions = ["binary_tensor_data"] if binary else []
        self.config = config
        self.rows = self.requests = 0
        self.batches = batches
        """So many requests are said to be one execution; 0: no statistics."""
        self.pause = 0.0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

            def do_GET(self) -> None:
                outer.get(self)

            def do_POST(self) -> None:
                outer.post(self)

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.socket.listen(256)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/m"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def say(self, to: BaseHTTPRequestHandler, status: int, head: Any, raw: bytes = b"") -> None:
        body = json.dumps(head).encode()
        to.send_response(status)
        to.send_header("Content-Length", str(len(body) + len(raw)))
        if raw:
            to.send_header("Inference-Header-Content-Length", str(len(body)))
        to.end_headers()
        to.wfile.write(body + raw)

    def get(self, to: BaseHTTPRequestHandler) -> None:
        if to.path == "/v2":
            self.say(to, 200, {"name": "tests", "version": "1", "extensions": self.extensions})
        elif to.path == "/v2/models/m":
            self.say(to, 200, {"name": "m", "platform": "tests_onnx", "inputs": self.inputs, "outputs": self.outputs})
        elif to.path == "/v2/models/m/config" and self.config is not None:
            self.say(to, 200, self.config)
        elif to.path == "/v2/models/m/stats" and self.batches:
            executions = -(-self.requests // self.batches)
            self.say(to, 200, {"model_stats": [{"inference_count": self.rows, "execution_count": executions}]})
        else:
            self.say(to, 404, {"error": "Request for unknown model or path\nand more"})

    def post(self, to: BaseHTTPRequestHandler) -> None:
        body = to.rfile.read(int(to.headers["Content-Length"]))
        if not to.path.endswith("/infer"):
            self.say(to, 404, {"error": "not here"})
            return
        size = int(to.headers.get("Inference-Header-Content-Length", len(body)))
        head, raw = json.loads(body[:size]), body[size:]
        batch = {}
        for entry in head["inputs"]:
            count = entry.get("parameters", {}).get("binary_data_size")
            data = np.frombuffer(raw[:count], np.int64) if count is not None else np.array(entry["data"], np.int64)
            raw = raw[count or 0 :]
            batch[entry["name"]] = data.reshape(entry["shape"])
        time.sleep(self.pause)
        with self.lock:
            self.requests += 1
            self.rows += len(next(iter(batch.values())))
            try:
                answers = self.answer(batch)
            except Exception as error:
                self.say(to, 400, {"error": str(error)})
                return
        outputs, parts = [], []
        for name, array in answers.items():
            entry = {"name": name, "datatype": "FP32", "shape": list(array.shape)}
            if self.extensions:
                parts.append(np.ascontiguousarray(array, np.float32).tobytes())
                entry["parameters"] = {"binary_data_size": len(parts[-1])}
            else:
                entry["data"] = array.reshape(-1).tolist()
            outputs.append(entry)
        self.say(to, 200, {"model_name": "m", "outputs": outputs}, b"".join(parts))


@pytest.fixture
def serve(classifier_out: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers around the classifier's ONNX artifact, and stops them."""
    record = manifest.read(classifier_out)
    artifact = record.artifact("onnx", classifier_out)
    session = runtimes.open_artifact(artifact, Options(threads=1))
    started: list[Server] = []

    def start(change: Callable[[Batch, dict[str, np.ndarray]], Any] | None = None, **given: Any) -> Server:
        def answer(batch: Batch) -> Mapping[str, np.ndarray]:
            found = session.run(batch)
            return found if change is None else change(batch, found)

        inputs = [{"name": spec.name, "datatype": "INT64", "shape": [-1, -1]} for spec in artifact.inputs]
        outputs = [{"name": "logits", "datatype": "FP32", "shape": [-1, artifact.outputs[0].shape[-1]]}]
        started.append(Server(answer, given.pop("inputs", inputs), given.pop("outputs", outputs), **given))
        return started[-1]

    yield start
    for server in started:
        server.close()
    session.close()


def ask(out: Path, server: Server | str, **given: Any) -> Any:
    """The one outcome of an endpoint."""
    url = server if isinstance(server, str) else server.url
    (outcome,) = serving.endpoint(out, "onnx", url, options=Options(), progress=Silent(), settings=Settings(), **given)
    return outcome


# -- where it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000/m", ("http", "host", 8000, "m", "")),
        ("http://host/m", ("http", "host", 8000, "m", "")),
        ("https://host/v2/models/m", ("https", "host", 443, "m", "")),
        ("grpc://[::1]:9/m/versions/3", ("grpc", "::1", 9, "m", "3")),
    ],
)
def test_places(url: str, expected: tuple[Any, ...]) -> None:
    where = endpoints.place(url)
    assert (where.scheme, where.host, where.port, where.model, where.version) == expected


@pytest.mark.parametrize(
    "url", ["host:8000/m", "ftp://h/m", "http://h", "http://h:x/m", "http://h/m?x=1", "http://h/m/2", "http://u@h/m"]
)
def test_what_names_no_model_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="write http://HOST:8000/MODEL"):
        endpoints.place(url)


# -- the verdict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [True, False])
def test_a_served_artifact_agrees(binary: bool, serve: Callable[..., Server], classifier_out: Path) -> None:
    server = serve(binary=binary)
    outcome = ask(classifier_out, server)
    assert outcome.status == "agrees", outcome
    found = outcome.verdict["served"]
    assert (found["server"], found["backend"], found["protocol"]) == ("tests 1", "tests_onnx", "http")
    assert found["alone"]["agrees"] and found["together"]["agrees"]
    assert found["together"]["requests"] >= 200 and found["together"]["in_flight"] == 200
    assert "keeps no statistics" in outcome.notes[1]


def test_answers_that_moved_are_a_drift(serve: Callable[..., Server], classifier_out: Path) -> None:
    outcome = ask(classifier_out, serve(lambda _, found: {"logits": found["logits"] * 1.01}))
    assert outcome.status == "drift" and not outcome.verdict["served"]["alone"]["agrees"]
    assert "together" not in outcome.verdict["served"]  # one at a time is wrong already


def test_answers_that_move_in_company_are_a_drift(serve: Callable[..., Server], classifier_out: Path) -> None:
    """Right for one request after the other, wrong for requests that come together."""
    seen = {"rows": 0}

    def change(batch: Batch, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen["rows"] += 1
        late = seen["rows"] > 60 and seen["rows"] % 7 == 0
        return {"logits": found["logits"] + (0.1 if late else 0.0)}

    outcome = ask(classifier_out, serve(change))
    assert outcome.status == "drift"
    assert outcome.verdict["served"]["alone"]["agrees"] and not outcome.verdict["served"]["together"]["agrees"]
    assert outcome.verdict["served"]["together"]["moved"] == pytest.approx(0.1, rel=1e-3)
    assert "in a batch with others it does not" in outcome.notes[-1]


BATCHER = {"max_batch_size": 4, "dynamic_batching": {}, "backend": "onnxruntime"}


def test_batches_that_never_formed_prove_nothing(serve: Callable[..., Server], classifier_out: Path) -> None:
    formed = ask(classifier_out, serve(config=BATCHER, batches=5))
    assert formed.status == "agrees" and "rows in" in formed.notes[1]
    alone = ask(classifier_out, serve(config=BATCHER, batches=1))
    assert alone.status == "drift"
    assert any("no batch formed" in line for line in alone.verdict["structure"])


def test_batches_over_the_servers_limit_go_in_parts(serve: Callable[..., Server], classifier_out: Path) -> None:
    largest: list[int] = []

    def change(batch: Batch, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        largest.append(len(batch["input_ids"]))
        return found

    assert ask(classifier_out, serve(change, config={"max_batch_size": 2})).status == "agrees"
    assert max(largest) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inputs": [{"name": "ids", "datatype": "INT64", "shape": [-1, -1]}]}, "input input_ids is missing"),
        ({"outputs": [{"name": "logits", "datatype": "FP16", "shape": [-1, -1]}]}, "logits is float16, the artifact's"),
        ({"outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 999]}]}, "logits has dims [-1, 999]"),
    ],
)
def test_another_model_is_seen_before_it_is_asked(
    given: dict[str, Any], said: str, serve: Callable[..., Server], classifier_out: Path
) -> None:
    server = serve(**given)
    outcome = ask(classifier_out, server)
    assert outcome.status == "drift" and said in outcome.reason
    assert server.requests == 0


def test_what_the_server_refuses_counts_against_it(serve: Callable[..., Server], classifier_out: Path) -> None:
    def change(batch: Batch, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if batch["input_ids"].shape[1] > 40:
            raise ValueError("sequence too long")
        return found

    outcome = ask(classifier_out, serve(change))
    assert outcome.status == "drift"
    assert "sequence too long" in json.dumps(outcome.verdict["comparison"])


# -- a server that is not there ---------------------------------------------------------------------------------------


def test_no_server_is_not_run(classifier_out: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    outcome = ask(classifier_out, f"http://127.0.0.1:{port}/m")
    assert outcome.status == "not run"
    assert f"no server answers at http://127.0.0.1:{port}: Connection refused; is it up?" in outcome.reason


def test_a_server_that_hangs_is_not_waited_for(serve: Callable[..., Server], classifier_out: Path) -> None:
    server = serve()
    server.pause = 3.0
    started = time.monotonic()
    outcome = ask(classifier_out, server, timeout=0.3)
    assert outcome.status == "not run" and "gave no answer within 0.3 s" in outcome.reason
    assert time.monotonic() - started < 3


def test_a_server_that_ends_on_the_way_is_not_run(serve: Callable[..., Server], classifier_out: Path) -> None:
    """Never a drift: nothing is known of the artifact."""
    server = serve()
    ended = threading.Event()

    def change(batch: Batch, found: Any) -> Any:
        if server.requests > 8 and not ended.is_set():
            ended.set()
            threading.Thread(target=server.http.server_close).start()
        if ended.is_set():
            time.sleep(1)
        return found

    own = server.answer
    server.answer = lambda batch: change(batch, own(batch))
    outcome = ask(classifier_out, server, timeout=0.4)
    assert outcome.status == "not run" and "was lost while it was asked" in outcome.reason


def test_a_model_that_is_not_served_is_refused(serve: Callable[..., Server], classifier_out: Path) -> None:
    url = serve().url.replace("/m", "/other")
    with pytest.raises(UsageError, match="does not serve other: Request for unknown model or path"):
        ask(classifier_out, url)


def test_goldens_that_changed_judge_nothing(serve: Callable[..., Server], classifier_out: Path, tmp_path: Path) -> None:
    import shutil

    out = Path(shutil.copytree(classifier_out, tmp_path / "out"))
    with (out / "golden" / "outputs.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DriftError, match="so nothing can be judged by it"):
        ask(out, serve())


# -- the words on the wire --------------------------------------------------------------------------------------------


def test_texts_are_bytes_with_their_length() -> None:
    raw = served._bytes(np.array([["héllo", b"x"]], object))
    entry = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 2], "parameters": {"binary_data_size": len(raw)}}
    found = served._arrays([entry], memoryview(raw))
    assert found["TEXT"].tolist() == [["héllo".encode(), b"x"]]


def test_an_answer_that_is_cut_off_is_told(serve: Callable[..., Server]) -> None:
    server = serve()
    server.answer = lambda _: {"logits": np.zeros((1, 2), np.float32)}
    client = served.HttpClient(endpoints.place(server.url))
    client.describe()
    own = server.say
    server.say = lambda to, status, head, raw=b"": own(to, status, head, raw[:-3])  # type: ignore[method-assign]
    with pytest.raises(endpoints.Refused, match="its answer cannot be read"):
        client.infer({"input_ids": np.zeros((1, 3), np.int64)}, ["logits"])
    client.close()


def test_statistics_are_counted_from_what_was_before() -> None:
    after = endpoints.counted(
        [
            {
                "inference_count": 9,
                "execution_count": 4,
                "batch_stats": [{"batch_size": 3, "compute_infer": {"count": 3}}],
            }
        ]
    )
    assert after == Counts(9, 4, {3: 3})
    more = after.since(Counts(1, 2, {3: 1, 1: 1}))
    assert more == Counts(8, 2, {3: 2}) and more.formed


def test_a_session_names_who_served(serve: Callable[..., Server], classifier_out: Path) -> None:
    facts = models.facts_from_data(manifest.read(classifier_out).facts)
    where = endpoints.place(serve(config={**BATCHER, "instance_group": [{"kind": "KIND_GPU"}]}).url)
    session = served.ServedSession(served.HttpClient(where), facts.inputs, ["logits"], "float32")
    assert session.provider == "cuda (tests 1, onnxruntime backend, http)"
    session.close()
