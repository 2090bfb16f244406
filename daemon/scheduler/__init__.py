"""Pure decisions: who is prefilled, parked, resumed and admitted in the next step."""
