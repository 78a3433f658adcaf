"""Policies: what may change while training runs, and when. Users write policies, too."""
