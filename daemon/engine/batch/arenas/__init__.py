"""Where the ring's records lie, and how much of that has memory behind it."""
