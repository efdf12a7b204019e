"""What is told while a plan is worked off."""


class RunProgress:
    """Is told by the engine what happens, and does nothing; who shows it overrides what it shows."""

    def federation(self, rounds: int) -> None:
        """Hear that a federated run starts.

        Args:
            rounds: So many.
        """

    def round(self) -> None:
        """Hear that a round starts."""

    def attacks(self, trials: int) -> None:
        """Hear that trials are about to be attacked and scored.

        Args:
            trials: So many.
        """

    def trials(self, count: int) -> None:
        """Hear that more trials have rows.

        Args:
            count: So many.
        """

    def optimisation(self, step: int, total: int, loss: float) -> None:
        """Hear how far an attack that optimises is.

        Args:
            step: Of its steps.
            total: Number of steps.
            loss: At this step.
        """

    def time_left(self, seconds: float) -> None:
        """Say how long the trials that are left will take.

        Args:
            seconds: By the trials of each experiment that were run.
        """
