"""Asks a daemon for its health; exit status 0 is SERVING.

    python healthcheck.py [liveness|readiness|saturation] [address]

The default address is the daemon's Unix socket, which speaks plain text with and without TLS and needs no
credentials.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ADDRESS = "unix:/run/batond/batond.sock"
TIMEOUT_S = 3.0


def main(service: str = "liveness", address: str = ADDRESS) -> int:
    """Asks once; says what came."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            print(f"{service}: {error.code().name}")
            return 1
    print(f"{service}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")
    return int(answer.status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
