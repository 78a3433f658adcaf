"""Conformance kits: what every implementation of a contract inherits as its tests."""
