"""Shares as people read them, whatever they are of."""


def percent(value: float) -> str:
    """A share in percent: 199 of 200 are not all of them."""
    whole = round(100 * value)
    bounded = ">" if whole == 100 > 100 * value else "<" if whole == 0 < value else ""
    return f"{bounded} {min(99, max(1, whole))} %" if bounded else f"{whole} %"
