"""Error that ends a start of the stand-in."""


class RefusedError(Exception):
    """Printed as the last line of a traceback, as the engine's own would be."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.text, self.exit_code = text, exit_code
