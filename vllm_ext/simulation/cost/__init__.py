"""Cost models: how long steps and copies take on hardware that is not here."""
