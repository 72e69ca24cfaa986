"""The one error that means: the input must change, not the program."""


class InputError(ValueError):
    """Something the user gave cannot be used.

    The text reads `field = value: remedy`, so that one line says what is wrong, where, and what
    to do about it. The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field} = {value}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["InputError"], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.remedy)
