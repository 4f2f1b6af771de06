"""Floor 2: asks a served model by the v2 protocol over gRPC, through tritonclient; as `served` does over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from nlpconvert.errors import UsageError, first_line
from nlpconvert.triton.endpoints import (
    TYPES,
    WORDS,
    Counts,
    Described,
    Place,
    Refused,
    Unreachable,
    described,
)

_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_MOST = 1 << 30
"""Bytes of a message at most."""


class GrpcClient:
    """One channel; threads may ask at once."""

    def __init__(self, place: Place, timeout: float) -> None:
        self.place = place
        self.timeout = timeout
        limits = [("grpc.max_send_message_length", _MOST), ("grpc.max_receive_message_length", _MOST)]
        self._channel = grpc.insecure_channel(f"{place.host}:{place.port}", options=limits)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _call(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=self.timeout)
        except grpc.RpcError as error:
            said = first_line(RuntimeError(error.details() or str(error.code())), 300)
            if error.code() not in _LOST:
                raise Refused(said) from error
            where = f"grpc://{self.place.host}:{self.place.port}"
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unreachable(f"{where} gave no answer within {self.timeout:g} s") from error
            raise Unreachable(f"no server answers at {where}: {said}; is it up?") from error

    def describe(self) -> Described:
        """As `triton.endpoints.Client.describe`."""
        about = {"name": self.place.model, "version": self.place.version}
        server = self._call("ServerMetadata", service_pb2.ServerMetadataRequest())
        try:
            model = self._call("ModelMetadata", service_pb2.ModelMetadataRequest(**about))
        except Refused as error:
            where = f"grpc://{self.place.host}:{self.place.port}"
            raise UsageError(f"{where} does not serve {self.place.model}: {error}") from error
        config: dict[str, Any] = {}
        try:
            found = self._call("ModelConfig", service_pb2.ModelConfigRequest(**about)).config
            groups = [
                {"kind": model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind)} for group in found.instance_group
            ]
            config = {
                "max_batch_size": found.max_batch_size,
                "backend": found.backend,
                "platform": found.platform,
                "instance_group": groups,
            }
            if found.HasField("dynamic_batching"):
                config["dynamic_batching"] = {}
        except Refused:
            pass  # Triton's extension; another server does without
        tensors = {
            kind: [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in getattr(model, kind)]
            for kind in ("inputs", "outputs")
        }
        words = {"name": server.name, "version": server.version}
        return described(words, {"platform": model.platform, **tensors}, config)

    def infer(self, batch: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """As `triton.endpoints.Client.infer`."""
        request = service_pb2.ModelInferRequest(model_name=self.place.model, model_version=self.place.version)
        for name, array in batch.items():
            kind = WORDS.get(array.dtype.name)
            if kind is None:
                raise UsageError(f"{name} is {array.dtype}, and the v2 protocol has no such type")
            request.inputs.add(name=name, datatype=kind, shape=array.shape)
            request.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
        for name in outputs:
            request.outputs.add(name=name)
        answer = self._call("ModelInfer", request)
        try:
            return {
                entry.name: np.frombuffer(raw, TYPES[entry.datatype]).reshape(tuple(entry.shape)).copy()
                for entry, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
            }
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"its answer cannot be read: {first_line(error)}") from error

    def counts(self) -> Counts | None:
        """As `triton.endpoints.Client.counts`."""
        try:
            found = self._call(
                "ModelStatistics",
                service_pb2.ModelStatisticsRequest(name=self.place.model, version=self.place.version),
            )
        except Refused:
            return None
        sizes: dict[int, int] = {}
        for version in found.model_stats:
            for each in version.batch_stats:
                sizes[each.batch_size] = sizes.get(each.batch_size, 0) + each.compute_infer.count
        stats = found.model_stats
        return Counts(sum(s.inference_count for s in stats), sum(s.execution_count for s in stats), sizes)

    def close(self) -> None:
        """Nothing is a thread's own; the channel closes with its last user."""

    def __del__(self) -> None:
        self._channel.close()


def connect(place: Place, timeout: float) -> GrpcClient:
    """A client for a place whose scheme is grpc."""
    return GrpcClient(place, timeout)
