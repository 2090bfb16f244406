"""The one door to unmodified Hugging Face models: forwards, positions, masks, the bytes of their caches."""
