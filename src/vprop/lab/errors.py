"""What a user asked for and cannot have, as one family of errors, so that commands show all of it in one way."""

from __future__ import annotations


class LabError(Exception):
    """A request that cannot be met; the message says what was found, what is allowed and what to do."""


class UsageError(LabError):
    """What was asked for does not exist; the message says what does."""


class Interrupted(Exception):
    """Ctrl-C, after everything that was finished has been kept; the message says what that is."""
