"""The reward of the quickstart: 1 for the right sum, else 0."""


def exact(response: str, reference: str) -> float:
    """Whether the response is the reference, character for character."""
    return float(response == reference)
