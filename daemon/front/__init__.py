"""The asyncio process that faces tenants: gRPC, text, Redis, metrics, systemd. No torch work."""
