"""Sources of private pictures, and how they are dealt to clients."""

from fedmjp import lean as lean
