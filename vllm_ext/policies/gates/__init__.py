"""Who must not join, although there is room? One gate per file."""
