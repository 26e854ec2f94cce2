"""Entry point vLLM calls in every process."""


def register() -> None:
    """Placeholder until the hooks land."""
