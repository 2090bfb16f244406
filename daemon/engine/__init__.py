"""The engine: model, batch, planner, copies. One step at a time."""
