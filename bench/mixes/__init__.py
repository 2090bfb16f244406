"""The published mixes under four ways of batching, on the engine's own ring, and what arithmetic predicts."""
