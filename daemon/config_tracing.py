"""The configuration of traces: where spans of jobs go, and of which jobs."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from batond.daemon.config_base import Seconds, Section


class TracingConfig(Section):
    """Spans of jobs, over OTLP. The rest (headers, certificates) is OpenTelemetry's own `OTEL_...` variables.

    Attributes:
        endpoint: The collector's OTLP/gRPC address, `http://host:4317` or `https://...`; empty is off.
        sample_ratio: Part of the jobs that are traced where the caller brings no trace; a caller that brings
            one decides.
        service_name: What spans call the service.
        most_waiting_spans: Kept until the collector has taken them; more are dropped and counted.
        export_timeout_s: Longest time of one export, its retries included.
    """

    endpoint: str = ""
    sample_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    service_name: str = Field(default="batond", min_length=1, max_length=200)
    most_waiting_spans: int = Field(default=2048, ge=1, le=1 << 20)
    export_timeout_s: Seconds = 10.0

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        if not endpoint:
            return endpoint
        parts = urlsplit(endpoint)
        port = parts.port  # Raises ValueError where it is none.
        plain = parts.scheme in {"http", "https"} and parts.hostname and port and parts.path in {"", "/"}
        if not plain or parts.username is not None or parts.query or parts.fragment:
            raise ValueError(f"{endpoint!r} is not http://host:port or https://host:port, and nothing else")
        return endpoint
