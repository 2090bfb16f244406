"""`batond doctor`: looks at all that a daemon needs, changes nothing, and says what to do."""
