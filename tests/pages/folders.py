"""The folder where the commands of a page are typed: what lies there, and what was done there before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.pages.blocks import ROOT, blocks

HERE = Path(__file__).parent
PAGE_FILES = {"commands-as-programs": {"train.py": "script.py"}}
"""Files of a page that are other ones than those of the same name here."""
COMMON_FILES = {"train.py": "train.py", "plain.py": "plain.py"}
TUTORIAL = ("loop", "scale", "tune")
"""Its pages go on with the files of those before."""
STUDY = """
    elastune run train.py --out begin
    elastune tune train.py --trials 4 --workers 2 --keep all --start-from begin --out OUT
"""
EARLIER = {
    "after-the-search": STUDY,
    "ensembles": STUDY,
    "meshes": "elastune run train.py --out RUN",
    "simulate": "elastune tune train.py --trials 4 --workers 2",
    "spaces": """
        elastune tune digits.py --trials 2 --workers 2
        elastune tune digits.py --trials 2 --workers 2 --out elastune-out/other-tune-3
    """,
    "spot": f"""
        printf 'time,workers\\n0,32\\n3600,27\\n80000,27\\n' > offer.csv
        printf 'kind,price\\nspot,0.918\\non-demand,3.06\\n' > prices.csv
        elastune run train.py
        {STUDY}
    """,
    "transfer": f"""
        elastune run train.py --out runs/pretrained
        elastune export runs/pretrained --safetensors all.safetensors
        python -c "
from safetensors.torch import load_file, save_file
tensors = load_file('all.safetensors')
save_file({{name.replace('encoder', 'backbone'): tensors[name] for name in tensors}}, 'backbone.safetensors')"
        {STUDY}
    """,
}
"""What a reader of a page has done before."""
LIMIT_S = 900


def stage(page: Path, folder: Path) -> None:
    """What lies in the folder where a page's commands are typed."""
    for name in ("examples", "tests", "src", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for name, source in (COMMON_FILES | PAGE_FILES.get(page.stem, {})).items():
        shutil.copy(HERE / source, folder / name)
    for each in (*TUTORIAL[: TUTORIAL.index(page.stem)], page.stem) if page.stem in TUTORIAL else (page.stem,):
        for block in blocks(page.with_stem(each)):
            if block.file:
                (folder / block.file).write_text(block.code)
    if page.stem in EARLIER:
        shell(EARLIER[page.stem], folder)


def shell(code: str, folder: Path) -> str:
    """Run code; what it prints. Fails with the output where a command does."""
    environment = dict(os.environ, COLUMNS="400", OMP_NUM_THREADS="1")
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{code}\nexit code {done.returncode}\n{done.stdout}"
    return done.stdout
