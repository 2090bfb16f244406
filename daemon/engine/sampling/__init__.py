"""From logits to tokens and text, over all rows at once."""
