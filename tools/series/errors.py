"""The one exception that ends a command."""


class SeriesError(Exception):
    """A fault of the series, the base or a target, told in one clear line."""
