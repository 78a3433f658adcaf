"""Conformance kits: tests that every implementation of a contract inherits."""
