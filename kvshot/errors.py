"""One exception for everything a user can mend."""


class KvshotError(Exception):
    """What was wrong and what to do, in one line; the command line exits with code 2."""
