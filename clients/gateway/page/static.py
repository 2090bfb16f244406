"""The page's own files, and the headers that keep everything else out."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX: Final = "index.html"
#: Nothing from elsewhere, nothing inline, no form sent, no frame around it; and no text becomes markup.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Assets:
    """All files, read once: no path of a request ever reaches the disk."""

    def __init__(self) -> None:
        folder = resources.files("batond.clients.gateway.page") / "assets"
        self._files = {one.name: one.read_bytes() for one in folder.iterdir() if _suffix(one.name) in _TYPES}
        self._tags = {
            name: f'"{hashlib.sha256(data).hexdigest()[:32]}"' for name, data in self._files.items()
        }

    @property
    def names(self) -> frozenset[str]:
        """The files there are."""
        return frozenset(self._files)

    def answer(self, request: Request, name: str) -> Response | None:
        """A file as a response, without a body if the browser has it; None if there is no such file."""
        data = self._files.get(name)
        if data is None:
            return None
        headers = {**SECURITY_HEADERS, "cache-control": "no-cache", "etag": self._tags[name]}
        if request.headers.get("if-none-match") == self._tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=_TYPES[_suffix(name)])


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
