"""``elastune deploy``: files that let other systems start a controller and its agents."""

from __future__ import annotations

from typing import Annotated

import typer

from elastune.cli.output import OK


def deploy(
    system: Annotated[str, typer.Argument(help="What is to run it: jobset (Kubernetes) or skypilot.")],
    command: Annotated[list[str], typer.Argument(help="The program, as a path in the image, and options of run.")],
    image: Annotated[str, typer.Option(help="Container image with elastune, torch, the program and its data.")],
    name: Annotated[str, typer.Option(help="Of the job.")] = "train",
    hosts: Annotated[int, typer.Option(help="Agents, each on a machine of its own.")] = 2,
    workers: Annotated[int, typer.Option(help="Workers of each agent.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each host.")] = 0,
    accelerator: Annotated[str, typer.Option(help="What SkyPilot calls the GPUs.")] = "H100",
    port: Annotated[int, typer.Option(help="Where the controller listens for agents.")] = 7070,
    volume: Annotated[str, typer.Option(help="Volume that all hosts share, for checkpoints and results.")] = "results",
) -> int:
    """Print a file that has SYSTEM run COMMAND on agents: elastune deploy jobset --image IMAGE -- train.py --epochs 10.

    The file's first lines tell what it needs and how it is started. It is checked, but was not run by us.
    """
    from elastune.cluster.deploy.deployment import deployment
    from elastune.cluster.deploy.render import known, render

    wanted = deployment(
        command, image=image, name=name, hosts=hosts, workers=workers, gpus=gpus, accelerator=accelerator, port=port,
        volume=volume,
    )  # fmt: skip
    print(render(known(system), wanted), end="")
    return OK
