"""What the operators mean, in float64 numpy. Shares no code with the product; see recurrence.py."""
