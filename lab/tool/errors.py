"""The one error that a user sees."""


class LabError(Exception):
    """What was found, what was expected, what to do about it. Printed without a traceback, exit status 1."""
