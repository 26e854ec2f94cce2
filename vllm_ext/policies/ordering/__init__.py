"""Who first? One ordering per file."""
