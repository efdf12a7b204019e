"""What is told while a plan is worked off."""


class RunProgress:
    """Is told by the engine what happens, and does nothing; who shows it overrides what it shows."""

    def federation(self, rounds: int) -> None:
        """A federated run of so many rounds starts."""

    def round(self) -> None:
        """A round starts."""

    def attacks(self, trials: int) -> None:
        """So many trials are about to be attacked and scored."""

    def trials(self, done: int) -> None:
        """So many more trials are in the store."""

    def optimisation(self, done: int, total: int, loss: float) -> None:
        """An attack that optimises has done so many of its steps."""

    def time_left(self, seconds: float) -> None:
        """Say how long the trials that are left will take.

        Args:
            seconds: By the trials of each experiment that were run.
        """
