"""Asks the router of this pod how it is, over mutual TLS, which Kubernetes' own probes do not speak.

    python probe.py PORT SERVICE DOMAIN

DOMAIN is what follows the pod's name in its certificate; SERVICE "" is liveness, a service's name is readiness. Exits
with 0 where the answer is SERVING.
"""

import pathlib
import socket
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 8.0


def serving(address: str, service: str, name: str, folder: pathlib.Path) -> bool:
    """The answer of `address`, whose certificate must be for `name`. Raises grpc.RpcError where there is none."""
    ca, key, certificate = ((folder / file).read_bytes() for file in ("ca.crt", "tls.key", "tls.crt"))
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    options = [("grpc.ssl_target_name_override", name)]
    with grpc.secure_channel(address, credentials, options) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


if __name__ == "__main__":
    port, service, domain = sys.argv[1:]
    host = socket.gethostname()
    address = socket.gethostbyname(host)
    try:
        well = serving(f"{address}:{port}", service, f"{host}.{domain}", pathlib.Path("/etc/jaxpd/tls"))
    except grpc.RpcError as error:
        sys.exit(f"no answer from {address}:{port}: {error.details()}")
    sys.exit(0 if well else f"{service or 'the process'} is not serving")
