"""The published evaluation, run anew: Tables 1 and 2, the figures, and what plain transformers takes."""
