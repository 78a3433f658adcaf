"""An installed package as a folder on ``sys.path``: its modules, and the metadata that names its entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_package(
    folder: Path, entry_points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str], name: str = "toys"
) -> Path:
    """Write the package ``name`` 1.0 into ``folder``, to be put on ``sys.path`` or ``PYTHONPATH``.

    Args:
        folder: The folder; other packages may be in it.
        entry_points: For each group its entry points, such as ``{"elastune.commands": {"greet": "toys:greet"}}``.
        modules: The source of each module.
        name: The name of the package.

    Returns:
        ``folder``.
    """
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""])
        for group, points in entry_points.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    return folder
