"""The batond daemon: front, queue, scheduler, engine, memory and telemetry."""
