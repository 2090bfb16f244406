"""The live page: the batch over time in a browser, read-only, for administrators of the daemon."""

from batond.clients.gateway.page.routes import page_routes

__all__ = ["page_routes"]
