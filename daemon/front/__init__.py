"""The asyncio process that faces tenants: gRPC, text, Redis, metrics, systemd. No torch work."""

import os

# What gRPC's core writes to standard error holds bytes that anybody sent, line ends included: lines of a log
# could be forged. It reads this when it is imported. What fails is said by us, or in the call's status.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
