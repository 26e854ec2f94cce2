"""What an engine is checked for and fitted with before any of its processes starts: all that a user sees at once."""
