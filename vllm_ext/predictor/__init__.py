"""Prediction beside the engine: a process that predicts, and the front end's side of it."""
