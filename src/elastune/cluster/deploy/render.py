"""Deployments as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml

from elastune.cluster.deploy import jobset, skypilot
from elastune.cluster.deploy.deployment import Deployment
from elastune.core.errors import UserError

SYSTEMS: Mapping[str, tuple[Callable[[Deployment], dict[str, Any]], str]] = {
    "jobset": (jobset.jobset, jobset.HEADER),
    "skypilot": (skypilot.skypilot, skypilot.HEADER),
}


def known(system: str) -> str:
    """``system``, if there is one of this name. Raises ``UserError``."""
    if system not in SYSTEMS:
        raise UserError(f"elastune deploy knows {' and '.join(SYSTEMS)}", repr(system), "choose one of them")
    return system


def render(system: str, wanted: Deployment) -> str:
    """The file of ``wanted`` for ``system``, YAML. Raises ``UserError``."""
    build, header = SYSTEMS[known(system)]
    text: str = yaml.dump(build(wanted), Dumper=_Dumper, sort_keys=False, width=120)
    return header.format(name=wanted.name, volume=wanted.volume) + text


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks, and nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)
