"""Kinds of clusters, by the names that ``--cluster`` and ``cluster=`` give them: one file each."""
