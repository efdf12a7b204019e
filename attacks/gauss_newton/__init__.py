"""``gauss_newton``: second-order search among the pictures that the linear facts leave open."""
