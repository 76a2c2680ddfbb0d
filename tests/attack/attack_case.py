"""For attacks on services: raw calls, the memory that a process takes, and separate connections."""

from pathlib import Path

import grpc

from isobit.launch import Service
from isobit_tools.testing import ServiceTest

MIB = 1 << 20

METHODS = {
    "rollout": {
        "Generate": "GenerateRequest",
        "Abort": "AbortRequest",
        "PauseGeneration": "PauseGenerationRequest",
        "ContinueGeneration": "ContinueGenerationRequest",
        "Sleep": "SleepRequest",
        "WakeUp": "WakeUpRequest",
        "UpdateWeights": "UpdateWeightsRequest",
        "UpdateWeightsFromStream": "WeightChunk",
        "InitWeightTransfer": "InitWeightTransferRequest",
        "StartWeightTransfer": "StartWeightTransferRequest",
        "ReceiveWeights": "ReceiveWeightsRequest",
        "FinishWeightTransfer": "FinishWeightTransferRequest",
        "ShutdownWeightTransfer": "ShutdownWeightTransferRequest",
        "GetServerInfo": "GetServerInfoRequest",
        "GetLoad": "GetLoadRequest",
    },
    "scorer": {
        "Score": "ScoreRequest",
        "UpdateWeights": "UpdateWeightsRequest",
        "UpdateWeightsFromStream": "WeightChunk",
        "GetServerInfo": "GetServerInfoRequest",
    },
    "comparator": {
        "Compare": "CompareRequest",
        "Record": "RecordRequest",
        "Watch": "WatchRequest",
        "GetServerInfo": "GetServerInfoRequest",
    },
}

# Of a rollout with --vllm_face, beside its own.
VLLM_METHODS = {
    "Generate": "GenerateRequest",
    "Abort": "AbortRequest",
    "HealthCheck": "HealthCheckRequest",
    "GetModelInfo": "GetModelInfoRequest",
    "GetServerInfo": "GetServerInfoRequest",
    "GetLoads": "GetLoadsRequest",
    "Embed": "NotServed",
    "GetTokenizer": "NotServed",
    "SubscribeKvEvents": "NotServed",
}
VLLM_SERVICE = "/vllm.grpc.engine.VllmEngine"


def path_of(service: str, method: str) -> str:
    return f"/isobit.v1.{service.capitalize()}Service/{method}"


def memory_of(service: Service, what: str = "VmRSS") -> int:
    """Resident bytes of the process now (VmRSS), or the most so far (VmHWM)."""
    for line in Path(f"/proc/{service.process.pid}/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise ValueError(what)


def call(channel: grpc.Channel, path: str, request: bytes, **options) -> tuple[grpc.StatusCode, str]:
    """The status of a call whose request is the bytes `request`."""
    method = channel.stream_stream(path)  # bytes in, bytes out; works for every kind of method
    try:
        for _ in method(iter([request]), timeout=60, **options):
            pass
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


class AttackTest(ServiceTest):
    def channel(self, service: Service) -> grpc.Channel:
        """A connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        return self.enterContext(grpc.insecure_channel(service.target, options))

    def assert_serves(self, name: str, channel: grpc.Channel) -> None:
        status = call(channel, path_of(name, "GetServerInfo"), b"")
        self.assertEqual(status, (grpc.StatusCode.OK, ""), name)
