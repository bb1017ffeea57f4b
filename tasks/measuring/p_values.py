"""P-values in words; imports nothing, so that every page can say them."""

from __future__ import annotations


def p_phrase(p: float) -> str:
    """`p = 0.012` or `p < 0.0001`."""
    return f"p {p_text(p)}" if p < 0.0001 else f"p = {p_text(p)}"


def p_text(p: float) -> str:
    """A p-value as text, to the digits that a permutation test gives."""
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}"
