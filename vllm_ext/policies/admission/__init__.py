"""Who may join? One admission rule per file."""
