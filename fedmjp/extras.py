"""The extras of the installation: packages that single commands need."""

from importlib.util import find_spec

from fedmjp.errors import MissingExtraError

# The packages of each extra of pyproject.toml, by the name under which it is imported.
EXTRAS = {
    "datasets": ("datasets",),
    "postgresql": ("psycopg",),
    "study": ("umap",),  # and scikit-learn, which it needs itself
    "training": ("tensorboard", "datasets", "flwr_datasets"),
}


def require(extra: str, purpose: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Args:
        extra: Its name, as in ``pip install 'fedmjp[NAME]'``.
        purpose: What needs them, as the beginning of the message.

    Raises:
        MissingExtraError: If one is not; the message says how to install it.
    """
    for package in EXTRAS[extra]:
        if find_spec(package) is None:
            raise MissingExtraError(purpose, package, extra)
