"""``elastune deploy``: files that let other systems start a controller and its agents."""

from __future__ import annotations

from typing import Annotated

import typer

from elastune.cli.output import OK


def deploy(
    system: Annotated[str, typer.Argument(help="The system: jobset (Kubernetes) or skypilot.")],
    command: Annotated[
        list[str],
        typer.Argument(help="The program, as a path in the image, and options of elastune run. Put -- before it."),
    ],
    image: Annotated[str, typer.Option(help="Container image with elastune, torch, the program and its data.")],
    name: Annotated[str, typer.Option(help="Name of the job.")] = "train",
    hosts: Annotated[int, typer.Option(help="Number of hosts. Each runs one agent.")] = 2,
    workers: Annotated[int, typer.Option(help="Number of workers on each host.")] = 1,
    gpus: Annotated[int, typer.Option(help="Number of GPUs of each host.")] = 0,
    accelerator: Annotated[str, typer.Option(help="What SkyPilot calls the GPUs, such as H100.")] = "H100",
    port: Annotated[int, typer.Option(help="Port where the controller listens for agents.")] = 7070,
    volume: Annotated[
        str, typer.Option(help="Name of a volume that all hosts share, for checkpoints and results.")
    ] = "results",
) -> int:
    """Print a file that starts a job on Kubernetes or SkyPilot.

    The job is elastune run with COMMAND, on workers of several hosts. Such as: elastune deploy jobset --image IMAGE --
    train.py --epochs 10

    The file's first lines tell what it needs and how to start it. The file is checked, but was not run by us.
    """
    from elastune.cluster.deploy.deployment import deployment
    from elastune.cluster.deploy.render import known, render

    wanted = deployment(
        command, image=image, name=name, hosts=hosts, workers=workers, gpus=gpus, accelerator=accelerator, port=port,
        volume=volume,
    )  # fmt: skip
    print(render(known(system), wanted), end="")
    return OK
