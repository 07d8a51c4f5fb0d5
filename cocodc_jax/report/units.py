"""Readable bytes, counts and durations: three digits and a unit."""

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNTS = ("", "k", "M", "G", "T")


def format_bytes(num_bytes: float) -> str:
    """Format a size in decimal units, like network speeds.

    >>> format_bytes(999), format_bytes(1_234_567)
    ('999 B', '1.23 MB')
    """
    return _scaled(num_bytes, _BYTES)


def format_count(count: float) -> str:
    """Format a count with k, M, G or T.

    >>> format_count(22_140), format_count(999.6)
    ('22.1 k', '1.00 k')
    """
    return _scaled(count, _COUNTS).rstrip()


def format_duration(seconds: float) -> str:
    """Format a duration in the two largest units that matter.

    >>> format_duration(7.4), format_duration(125), format_duration(8_000)
    ('7 s', '2 min 05 s', '2 h 13 min')
    """
    whole_s = round(seconds)
    if whole_s < 60:
        return f"{whole_s} s"
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60:02d} s"
    return f"{whole_s // 3600} h {whole_s % 3600 // 60:02d} min"


def _scaled(number: float, units: tuple[str, ...]) -> str:
    power = 0
    # 999.5 would print as "1000": three digits belong to the next unit from there on.
    while abs(number) >= 999.5 and power < len(units) - 1:
        number = number / 1000
        power = power + 1
    digits = (
        0 if power == 0 or abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    )
    return f"{number:.{digits}f} {units[power]}"
