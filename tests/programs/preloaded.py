"""Imported once by the server that forks the tests' workers: each of them would read the digits for itself."""

from elastune.recipes.datasets import digits

digits()
