"""OpenAI's API over HTTP, as a thin client of the daemon's gRPC API. Needs the extra `gateway`."""

from batond.clients.gateway.app import Gateway, create_app, gateway_of
from batond.clients.gateway.settings import GatewaySettings

__all__ = ["Gateway", "GatewaySettings", "create_app", "gateway_of"]
