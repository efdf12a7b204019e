"""Shares as people read them."""


def percent(value: float) -> str:
    """Write a share in percent; 199 of 200 are not all of them.

    Args:
        value: The share, from 0 to 1.
    """
    whole = round(100 * value)
    bounded = ">" if whole == 100 > 100 * value else "<" if whole == 0 < value else ""
    return f"{bounded} {min(99, max(1, whole))} %" if bounded else f"{whole} %"
