"""Fakes and conformance kits that plugins inherit."""
