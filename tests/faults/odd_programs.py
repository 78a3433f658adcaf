"""Programs that do what no program should: what each does, where, and what a run of it must come to.

Each is the same small training with one oddity. ``ODD`` in its text marks the line that the answer has to name.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

LINEAR = """
import os, signal, sys, threading, time
import torch
from torch import nn
from torch.utils.data import TensorDataset

{module}

config = {{"epochs": 2}}

def once():
    marker = __file__ + ".once"
    first = not os.path.exists(marker)
    open(marker, "w").close()
    return first

def odd(session):
    pass
{odd}

class Points(TensorDataset):
    pass
{data}

def train(session):
    pass
{before}
    x = torch.arange(8.0).reshape(8, 1)
    model = nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in session.epochs(session.config["epochs"]):
        for a, b in session.batches(Points(x, 2 * x), batch_size=4, loader_workers={loaders}):
            loss = nn.functional.mse_loss(model(a), b)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step and session.rank == 1 and session.step == 1:
                odd(session)
        session.report(loss=float(loss.detach()))
{after}
"""


@dataclass(frozen=True)
class OddProgram:
    """``module``, ``before``, ``odd`` (rank 1, after step 1), ``data`` and ``after`` are pieces of its text.

    ``code``: the exit code; ``says``: parts of the failure's one line, {line} being that of the mark; "" for a run that
    completes. ``lost``: workers that had to be replaced. ``alone``: in a command of its own, not on a shared cluster,
    which starts so many ``servers``. ``soak``: where another program meets what this one does.
    """

    name: str
    odd: str = ""
    module: str = ""
    before: str = ""
    data: str = ""
    after: str = ""
    loaders: int = 0
    code: int = 0
    says: tuple[str, ...] = ()
    lost: int | None = 0
    logged: str = ""
    workers: int = 2
    heartbeat: str = "2s"
    alone: bool = False
    servers: int = 1
    soak: bool = False

    def text(self) -> str:
        """The program."""

        def indented(piece: str) -> str:
            return textwrap.indent(textwrap.dedent(piece).strip("\n"), "    ")

        return LINEAR.format(
            module=textwrap.dedent(self.module),
            odd=indented(self.odd),
            data=indented(self.data),
            before=indented(self.before),
            after=indented(self.after),
            loaders=self.loaders,
        )

    @property
    def line(self) -> int:
        """The number of the line that is marked."""
        return next((n for n, line in enumerate(self.text().splitlines(), 1) if "# ODD" in line), 0)


AT = "odd.py:{line}"

PROGRAMS = (
    OddProgram("does nothing odd"),
    # -- exceptions: one cause, told once, with its line
    OddProgram(
        "raises BaseException",
        soak=True,
        odd="raise BaseException('odd words')  # ODD",
        code=1,
        says=(
            "BaseException: odd words",
            AT,
        ),
    ),
    OddProgram(
        "raises KeyboardInterrupt",
        odd="raise KeyboardInterrupt  # ODD",
        code=1,
        says=(
            "KeyboardInterrupt",
            AT,
        ),
    ),
    OddProgram(
        "raises GeneratorExit",
        soak=True,
        odd="raise GeneratorExit('odd words')  # ODD",
        code=1,
        says=(
            "GeneratorExit: odd words",
            AT,
        ),
    ),
    OddProgram(
        "raises a huge text",
        odd="raise ValueError('odd ' * 5_000_000)  # ODD",
        code=1,
        says=(
            "ValueError: odd odd",
            AT,
        ),
    ),
    OddProgram(
        "raises what cannot be printed",
        soak=True,
        odd="raise Mute('x')  # ODD",
        module="""
            class Mute(Exception):
                def __str__(self): raise RuntimeError('no words')
                __repr__ = __str__
        """,
        code=1,
        says=(
            "Mute",
            AT,
        ),
    ),
    OddProgram(
        "raises what ends who prints it",
        odd="raise Deadly('x')  # ODD",
        module="""
            class Deadly(Exception):
                def __str__(self): raise SystemExit(0)
                __repr__ = __str__
        """,
        code=1,
        says=(
            "Deadly",
            AT,
        ),
    ),
    OddProgram(
        "raises what cannot be pickled",
        odd="""
            error = ValueError('odd words', lambda: 0, threading.Lock())
            raise error  # ODD
        """,
        code=1,
        says=(
            "ValueError: ('odd words'",
            AT,
        ),
    ),
    OddProgram(
        "raises a group",
        odd="raise ExceptionGroup('odd words', [ValueError(1), ExceptionGroup('inner', [KeyError(2)])])  # ODD",
        code=1,
        says=(
            "ExceptionGroup: odd words (2 sub-exceptions)",
            AT,
        ),
    ),
    OddProgram(
        "raises a group of interrupts",
        soak=True,
        odd="raise BaseExceptionGroup('odd words', [KeyboardInterrupt()])  # ODD",
        code=1,
        says=(
            "BaseExceptionGroup: odd words",
            AT,
        ),
    ),
    OddProgram(
        "recurses",
        odd="""
            def deeper(n):
                return deeper(n + 1)  # ODD
            deeper(0)
        """,
        code=1,
        says=(
            "RecursionError",
            AT,
        ),
    ),
    OddProgram(
        "raises the recursion limit and recurses",
        odd="""
            sys.setrecursionlimit(10**9)
            def deeper(n):
                return [*map(deeper, [n + 1])]
            deeper(0)
        """,
        lost=1,
        logged="Segmentation fault",
    ),
    OddProgram(
        "calls sys.exit",
        soak=True,
        odd="sys.exit()  # ODD",
        code=1,
        says=(
            "sys.exit(None)",
            AT,
        ),
    ),
    OddProgram(
        "calls sys.exit(0)",
        odd="sys.exit(0)  # ODD",
        code=1,
        says=(
            "sys.exit(0)",
            AT,
        ),
    ),
    OddProgram(
        "exits with a sentence",
        odd="sys.exit('odd words')  # ODD",
        code=1,
        says=(
            "sys.exit('odd words')",
            AT,
        ),
    ),
    OddProgram(
        "exits with an odd code",
        soak=True,
        odd="raise SystemExit(-7.5)  # ODD",
        code=1,
        says=(
            "sys.exit(-7.5)",
            AT,
        ),
    ),
    OddProgram(
        "exits with code 256",
        soak=True,
        odd="sys.exit(256)  # ODD",
        code=1,
        says=(
            "sys.exit(256)",
            AT,
        ),
    ),
    OddProgram(
        "calls os._exit(0)",
        odd="os._exit(0)",
        code=1,
        says=(
            "exit code 0",
            "os._exit",
        ),
    ),
    OddProgram(
        "calls os._exit(7)",
        soak=True,
        odd="os._exit(7)",
        code=1,
        says=(
            "exit code 7",
            "os._exit",
        ),
    ),
    OddProgram(
        "raises in a hook at exit",
        after="""
            import atexit
            def late(): raise ValueError('odd words')
            atexit.register(late)
        """,
        logged="odd words",
    ),
    OddProgram(
        "raises in a thread",
        soak=True,
        odd="""
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
        """,
        logged="ZeroDivisionError",
    ),
    OddProgram(
        "raises in a destructor",
        soak=True,
        odd="""
            late = Late()
            del late
        """,
        module="""
            class Late:
                def __del__(self): raise ValueError('odd words')
        """,
        logged="odd words",
    ),
    OddProgram(
        "raises in a forked child",
        soak=True,
        odd="""
            if os.fork() == 0:
                raise ValueError('of a child')
            os.wait()
        """,
        logged="of a child",
    ),
    OddProgram(
        "exits in a forked child",
        soak=True,
        odd="""
            if os.fork() == 0:
                sys.exit(3)
            os.wait()
        """,
    ),
    OddProgram(
        "trains on in a forked child",
        odd="os.fork()",
        logged="a child that the program forks must end",
    ),
    OddProgram(
        "raises in a process",
        soak=True,
        odd="""
            import multiprocessing
            child = multiprocessing.get_context('fork').Process(target=lambda: 1 / 0)
            child.start()
            child.join()
        """,
        logged="ZeroDivisionError",
    ),
    OddProgram(
        "raises in a data loader",
        data="def __getitem__(self, index): raise ValueError('odd words')  # ODD",
        loaders=2,
        code=1,
        says=(
            "ValueError",
            "odd words",
            "odd.py:",
        ),
    ),
    OddProgram(
        "exits in a data loader",
        data="def __getitem__(self, index): os._exit(3)",
        loaders=2,
        code=1,
        says=(
            "DataLoader worker",
            "odd.py:",
        ),
    ),
    # -- slow, frozen, gone
    OddProgram(
        "holds the lock for long",
        odd="""
            started = time.monotonic()
            while time.monotonic() - started < 4: sum(range(150_000_000))
        """,
        heartbeat="1s",
    ),
    OddProgram(
        "freezes",
        soak=True,
        odd="""
            if once():
                os.kill(os.getpid(), signal.SIGSTOP)
        """,
        lost=1,
        heartbeat="1s",
    ),
    OddProgram(
        "sleeps with the lock",
        odd="""
            import ctypes
            if once():
                ctypes.PyDLL(None).sleep(100)
        """,
        lost=1,
        heartbeat="1s",
    ),
    OddProgram(
        "is killed once",
        soak=True,
        odd="""
            if once():
                os.kill(os.getpid(), signal.SIGKILL)
        """,
        lost=1,
    ),
    OddProgram(
        "kills its parent",
        odd="""
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(100)
        """,
        code=1,
        says=("fork server",),
        lost=None,
        alone=True,
        servers=2,
    ),
    OddProgram(
        "freezes its parent",
        soak=True,
        odd="os.kill(os.getppid(), signal.SIGSTOP)",
        alone=True,
    ),
    # -- surroundings
    OddProgram(
        "closes all files",
        before="""
            os.closerange(3, 65536)
            time.sleep(100)
        """,
        code=1,
        says=(
            "closed",
            "connection",
        ),
        lost=None,  # gloo's own thread meets the closed files, too, and may end the worker first
    ),
    OddProgram(
        "closes stdout",
        soak=True,
        odd="""
            sys.stdout.close()
            sys.stderr.close()
        """,
    ),
    OddProgram(
        "closes the files of stdout",
        odd="""
            os.close(1)
            os.close(2)
        """,
    ),
    OddProgram(
        "raises without stderr",
        odd="""
            sys.stderr = None
            sys.stdout = 3
            raise ValueError('odd words')  # ODD
        """,
        code=1,
        says=(
            "ValueError: odd words",
            AT,
        ),
    ),
    OddProgram(
        "replaces stdout",
        soak=True,
        odd="""
            class Silent:
                def write(self, text): raise OSError('nothing here')
                flush = write
            sys.stdout = sys.stderr = Silent()
        """,
    ),
    OddProgram(
        "changes the folder",
        odd="os.chdir('/')",
    ),
    OddProgram(
        "prints without a line end",
        soak=True,
        odd="print('x' * 100, end='', flush=True)",
        module="print('at import', end='')",
    ),
    OddProgram(
        "prints bytes, many",
        soak=True,
        odd="""
            sys.stdout.flush()
            sys.stdout.buffer.write(bytes(range(256)) * 100_000)
        """,
    ),
    OddProgram(
        "handles signals",
        before="""
            for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)
        """,
    ),
    OddProgram(
        "masks what it makes",
        before="os.umask(0o777)",
    ),
    OddProgram(
        "sets a locale",
        soak=True,
        before="""
            import locale
            locale.setlocale(locale.LC_ALL, 'C')
        """,
    ),
    OddProgram(
        "deletes itself",
        odd="os.remove(__file__)",
    ),
    OddProgram(
        "makes errors of warnings",
        module="""
            import warnings
            warnings.simplefilter('error')
        """,
        alone=True,
    ),
    OddProgram(
        "leaves threads",
        after="""
            threading.Thread(target=time.sleep, args=(1000,)).start()
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        """,
    ),
    OddProgram(
        "hangs at exit",
        soak=True,
        after="""
            import atexit
            atexit.register(time.sleep, 1000)
        """,
    ),
    OddProgram(
        "leaves children",
        odd="""
            import subprocess
            subprocess.Popen(['sleep', '1000'])
            subprocess.Popen(['sleep', '1000'], start_new_session=True)
            if os.fork() == 0:
                time.sleep(1000)
        """,
    ),
    OddProgram(
        "clears its environment",
        before="os.environ.clear()",
    ),
    OddProgram(
        "sets default dtype and threads",
        soak=True,
        before="""
            torch.set_default_dtype(torch.float64)
            torch.set_num_threads(2)
            torch.set_default_dtype(torch.float32)
        """,
    ),
    # -- at import
    OddProgram(
        "changes its surroundings at import",
        module="""
            import socket, locale
            os.chdir('/')
            os.umask(0o777)
            socket.setdefaulttimeout(0.01)
            sys.stdout = None
            sys.setrecursionlimit(20_000)
        """,
        alone=True,
    ),
    OddProgram(
        "closes stdout at import",
        soak=True,
        module="""
            sys.stdout.close()
            os.close(1)
        """,
        alone=True,
    ),
    OddProgram(
        "raises BaseException at import",
        soak=True,
        module="raise BaseException('odd words')  # ODD",
        code=2,
        says=(
            "BaseException: odd words",
            AT,
        ),
    ),
    OddProgram(
        "raises what cannot be printed at import",
        module="""
            class Mute(Exception):
                def __str__(self): raise RuntimeError('no words')
            raise Mute  # ODD
        """,
        code=2,
        says=(
            "Mute",
            AT,
        ),
    ),
    OddProgram(
        "exits at import",
        module="sys.exit(0)  # ODD",
        code=2,
        says=(
            "sys.exit(0)",
            AT,
        ),
    ),
)
