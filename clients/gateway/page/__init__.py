"""The live page: the batch over time in a browser, read-only, for administrators of the daemon."""

from batond.clients.gateway.page.routes import Page

__all__ = ["Page"]
