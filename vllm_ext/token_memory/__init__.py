"""Token ids of conversations, so that a next turn's history is not tokenised again, and not differently."""
