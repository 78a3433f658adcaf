"""A data-parallel trunk around divided layers, with the bits of a run without it.

This is "one weird trick" (Krizhevsky 2014, arXiv 1404.5997), with equal bits. A replica of T workers takes T slots
at a time, worker t the trunk of slot t. Where the divided layers begin (the *tail*) all T activations are gathered,
and the tail runs slot by slot. Each slot's run uses the activations, buffers and random stream of its own trunk.
So its numbers are those of a worker that runs this slot alone. The backward pass gathers the output's gradients,
runs the tail slot by slot, and gives each trunk the gradient of its own.
Last, the trunks' gradients are gathered. So each worker hands on the whole gradient of each of the T slots, in order,
as if it had run all of them: neither the layout of sums nor their bits change.
``divide_layers`` builds a model's tensor parallelism, with or without such a trunk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.formatting import count as counted
from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.group import GroupBroken
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import ModelParallel, Until, restore_rng_states, rng_states
from elastune.parallel.mechanisms.guards import refuse_pickling
from elastune.parallel.mechanisms.tensor.axis import BlockAxis
from elastune.parallel.mechanisms.tensor.blocked import as_whole
from elastune.parallel.mechanisms.tensor.layers import ParallelStyle
from elastune.parallel.mechanisms.tensor.tensor_parallel import DataParallelTrunk, TensorParallel, chosen, plan_of

Run = Callable[[torch.Tensor], Any]
_Gradients = list[torch.Tensor | None]
_Row = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]
_WAITS = 2  # added to the mode of a call (0 or 1) by a worker that waits for another event


def divide_layers(division: ModelParallel, execution: ExecutionSettings) -> ModelParallel:
    """``division`` with layers divided into the virtual blocks of ``execution``; unchanged for one block.

    Raises:
        UserError: The plan does not fit the model or the mechanism, or no layer of the model can be divided.
    """
    count = blocks_of(execution)
    if count == 1:
        return division
    module, plan = division.module, plan_of(division.module)
    apart = isinstance(plan, DataParallelTrunk)
    parallel_styles = chosen(module, count, plan.layers if isinstance(plan, DataParallelTrunk) else plan)
    if not parallel_styles:
        fix = "give session.prepare a plan, or use another mechanism"
        raise UserError("tensor divides layers that it knows", f"none found in {type(module).__name__}", fix)
    axis = BlockAxis(count, exact=execution.mode == "exact")
    if not apart:
        return TensorParallel(module, parallel_styles, axis)
    _check(execution)
    return TrunkTensorParallel(module, parallel_styles, axis, tail_of(module, parallel_styles))


def _check(execution: ExecutionSettings) -> None:
    """Raise ``UserError`` for execution settings that do not allow a data-parallel trunk."""
    rule, other = "a data-parallel trunk is for exact mode, whole slots, and tensor alone or with zero", "leave it out"
    if execution.mode != "exact":
        raise UserError(rule, f"{execution.mode} mode", "use --mode exact, or a plan without DataParallelTrunk")
    if execution.micro_batch is not None:
        raise UserError(rule, f"--micro-batch {execution.micro_batch}", f"{other}, and use more --slots")
    if execution.parts.pipeline or execution.parts.state == "sharded":
        raise UserError(rule, execution.mechanism, "use --mechanism tensor or tensor+zero")
    needed = execution.first_mesh.batch * execution.first_mesh.tensor
    if needed > execution.num_slots:
        numbers = f"{counted(execution.first_mesh.workers, 'worker')}, {counted(execution.num_slots, 'slot')}"
        raise UserError(
            "each worker of a data-parallel trunk has a slot of its own", numbers, f"use --slots {needed} or more"
        )


def blocks_of(execution: ExecutionSettings) -> int:
    """The number of virtual blocks. Without a setting it is the number of workers: exact for that number only."""
    return execution.virtual_tensor if execution.virtual_tensor > 1 or execution.mesh is None else execution.mesh.tensor


class TrunkTensorParallel(TensorParallel):
    """Tensor parallelism with a data-parallel trunk: outside of ``tail`` each worker runs slots of its own."""

    streams = False
    apart = True

    def __init__(
        self, module: nn.Module, parallel_styles: Mapping[str, ParallelStyle], axis: BlockAxis, tail: Tail
    ) -> None:
        super().__init__(module, parallel_styles, axis)
        inside = {id(p) for part in tail.parts for p in part.parameters()}
        self._inside = [p for p in self.parameters if id(p) in inside]
        self._outside = [p for p in self.parameters if id(p) not in inside]
        self._floats = [b for b in module.buffers() if b.is_floating_point()]
        self._counters = [b for b in module.buffers() if not b.is_floating_point()]
        self._run = tail.hand_over(self._through)
        self._tail_modules = [tail.module, *(each for part in tail.parts for each in part.modules())]
        self._modes: list[bool] = []  # training or evaluation, for each module of the tail
        self._device = self.parameters[0].device
        self._forget(0)

    def _forget(self, passes: int) -> None:
        self._passes_left = passes  # passes of the step whose forward pass is still to come
        self._passed: _PassedTail | None = None

    def enter(self, comms: Comms) -> None:
        super().enter(comms)
        self._forget(0)

    def begin_step(self, parts: Sequence[BatchSlice]) -> None:
        super().begin_step(parts)
        self._forget(len(parts))

    def abandon(self) -> None:
        super().abandon()
        self._forget(0)

    # -- forwards -----------------------------------------------------------------------------------------------------

    def _through(self, run: Run, inputs: Any) -> torch.Tensor:
        """The result of ``run`` for this worker's ``inputs``. This worker runs it for the other workers' inputs too."""
        if not isinstance(activations := as_whole(inputs), torch.Tensor):
            rule = "what holds the divided layers of a DataParallelTrunk is called with one tensor"
            raise UserError(rule, type(activations).__name__, "put them into a module of their own")
        activations = activations.contiguous()
        learns = torch.is_grad_enabled() and self._passes_left > 0
        if learns:  # the program may have left an evaluation early
            self.stand_in()
        if learns and self._passed is not None:
            rule, fix = (
                "the divided layers of a DataParallelTrunk run once for each training batch",
                "call the model once",
            )
            raise UserError(rule, "a second call", fix)
        try:
            if self.axis.failed is None and not self.failure_hooks.step_lost():
                evaluates, self.evaluates = self.evaluates, False  # after an error here no worker waits for others
                self._modes = self._own_modes()
                output = self._together(run, activations, learns)
                self.evaluates = evaluates
                return output
        except GroupBroken as error:
            self.axis.failed = error
        return self._tensor(run(activations))  # a result of the right shape, so that the program runs on

    def _together(self, run: Run, activations: torch.Tensor, learns: bool) -> torch.Tensor:
        """Run the tail for all workers' slots, one after another, and return this worker's output."""
        rank = self.axis.group.rank
        rows, _ = self._gathered(activations)
        counters = [b.detach().clone() for b in self._counters]
        runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        state: Sequence[torch.Tensor] = ()
        buffers: Sequence[torch.Tensor] = ()
        with torch.set_grad_enabled(learns):
            for slot, row in enumerate(rows):
                if row is None:
                    continue
                tail_input, random_states, buffer_values = row
                tail_input.requires_grad_(learns and activations.requires_grad)
                self._put_buffers(buffer_values)
                _put(self._counters, counters)
                restore_rng_states(random_states)
                runs.append((tail_input, self._tensor(run(tail_input.clone() if learns else tail_input))))
                if slot == rank:
                    state, buffers, own_run = rng_states(), self._moved(), len(runs) - 1
        restore_rng_states(state)
        self._put_buffers(buffers)
        if not learns:
            output = runs[own_run][1]
            if torch.is_grad_enabled():
                output = _NoGraph.apply(activations, output)  # type: ignore[no-untyped-call]
            return output
        output = runs[own_run][1].detach().requires_grad_(runs[own_run][1].requires_grad)
        self._passed = _PassedTail(activations, output, [d for d, _ in runs], [y for _, y in runs])
        self._passes_left -= 1
        return output.clone()  # the program may change the copy in place

    def _gathered(self, activations: torch.Tensor | None, *, waits: bool = False) -> tuple[list[_Row | None], bool]:
        """Gather the state of all workers behind their trunks.

        Returns:
            By rank: activations, random states and buffers; None for a worker without a pass. And, if no worker has a
            pass, whether one ``waits`` for another event and may have a pass later.

        Raises:
            UserError: Workers run the tail in different modes, although each runs it for all. Raised on all workers.
        """
        forms, kinds = self.axis.forms(activations, int(self._tail_modules[0].training) + _WAITS * waits)
        form = next((form for form in forms if form is not None), None)
        if form is None:
            return [None] * len(forms), any(kind >= _WAITS for kind in kinds)
        if len({kind % _WAITS for kind in kinds}) > 1:
            fix = "call model.eval() before the loop over session.batches(train=False), model.train() behind it"
            raise UserError(
                "workers of a DataParallelTrunk run it in one mode at a time", "training and evaluation", fix
            )
        values = torch.empty(0, dtype=form.dtype, device=self._device) if activations is None else activations
        random_states = rng_states()
        tensors = [values, *random_states, *self._floats]
        other_shapes = [each.shape for each in tensors[1:]]
        shapes = [[torch.Size([0]) if form is None else form.shape, *other_shapes] for form in forms]
        rows = self.axis.swap(tensors, shapes)
        cut = 1 + len(random_states)
        slots = [
            None if form is None else (row[0], row[1:cut], row[cut:]) for form, row in zip(forms, rows, strict=True)
        ]
        return slots, False

    def _tensor(self, output: Any) -> torch.Tensor:
        if isinstance(whole := as_whole(output), torch.Tensor):
            return whole
        rule = "what holds the divided layers of a DataParallelTrunk returns one tensor"
        raise UserError(rule, type(whole).__name__, "put them into a module of their own")

    def _moved(self) -> list[torch.Tensor]:
        """Copies of the floating-point buffers."""
        return [b.detach().clone() for b in self._floats]

    def _put_buffers(self, values: Sequence[torch.Tensor]) -> None:
        _put(self._floats, values)

    def begin_evaluation(self) -> None:
        super().begin_evaluation()
        self._modes = self._own_modes()

    def stand_in(self, until: Until | None = None, *, ends: bool = False) -> None:
        if not self.evaluates or (until is not None and self.axis.group.size == 1):
            return
        modes = self._own_modes()  # the program may have left its evaluation
        self._set_modes(self._modes)
        try:
            while self.evaluates and self.axis.failed is None and not self.failure_hooks.step_lost():
                if until is not None and until():
                    break
                self.evaluates = False
                made, waited = self._run_for_others(waits=until is not None)
                self.evaluates = made or waited
                if ends and waited and not made:
                    break
        except GroupBroken as error:
            self.failure_hooks.meet(error)
        finally:
            self._set_modes(modes)

    def _own_modes(self) -> list[bool]:
        return [each.training for each in self._tail_modules]

    def _set_modes(self, modes: Sequence[bool]) -> None:
        for each, training in zip(self._tail_modules, modes, strict=True):
            each.training = training

    def _run_for_others(self, *, waits: bool) -> tuple[bool, bool]:
        """Run the tail for the passes of other workers, while this one has none.

        Returns:
            Whether any worker had a pass, and whether any worker waits.
        """
        state, buffers = rng_states(), [b.detach().clone() for b in self.module.buffers()]
        with torch.no_grad(), self.passing():
            rows, waited = self._gathered(None, waits=waits)
            made = [row for row in rows if row is not None]
            for tail_input, random_states, buffer_values in made:
                self._put_buffers(buffer_values)
                restore_rng_states(random_states)
                self._run(tail_input)
        _put(list(self.module.buffers()), buffers)
        restore_rng_states(state)
        return bool(made), waited

    # -- backwards ----------------------------------------------------------------------------------------------------

    def _back(self, loss: torch.Tensor, part: BatchSlice) -> Iterator[BatchSlice]:
        passed, self._passed = self._passed, None
        if passed is None:
            rule = "a DataParallelTrunk learns from what its divided layers returned"
            raise UserError(rule, "no call of the model for this batch", "call model(...) before session.backward")
        together, rank = part.together or (part,), self.axis.group.rank
        moved = self._moved()  # after the whole forward pass: layers behind the tail have changed buffers too
        if part.weight:
            (loss * part.weight).backward()
        if any(p.grad is not None for p in self._inside):
            rule = "the loss has the parameters of divided layers of a DataParallelTrunk through their output alone"
            raise UserError(rule, "another decay", "use the plan without DataParallelTrunk, or weight_decay")
        inside = self._tail_backwards(passed, [each.weight > 0 for each in together])
        input_gradient = passed.tail_inputs[rank].grad
        if part.weight and input_gradient is not None:
            torch.autograd.backward([passed.inputs], [input_gradient])
        outside, buffers = self._from_all(moved)
        last = max((slot for slot, each in enumerate(together) if each.weight), default=-1)
        for slot, each in enumerate(together):
            if each.weight:
                _give(self._inside, inside[slot])
                _give(self._outside, outside[slot])
                self._put_buffers(buffers[slot])
                yield replace(each, ends_step=part.ends_step and slot == last)

    def _tail_backwards(self, passed: _PassedTail, counts: Sequence[bool]) -> list[_Gradients]:
        """Run the tail's backward passes and return the gradients of its parameters, for each slot.

        A slot whose entry in ``counts`` is False gives none. Gradients of ``tail_inputs`` stay on them.
        """
        output = passed.output
        output_gradient = torch.zeros_like(output) if output.grad is None else output.grad
        rows = self.axis.swap([output_gradient], [[each.shape] for each in passed.outputs])
        gradients = []
        for slot, (gradient,) in enumerate(rows):
            if counts[slot] and passed.outputs[slot].requires_grad:
                torch.autograd.backward([passed.outputs[slot]], [gradient])
            gradients.append(_taken(self._inside))
        return gradients

    def _from_all(self, moved: Sequence[torch.Tensor]) -> tuple[list[_Gradients], list[list[torch.Tensor]]]:
        """For each slot, from the worker that has run it: the gradients of all other parameters, and ``moved``."""
        trained = [p for p in self._outside if p.requires_grad]
        own_gradients = [None if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad for p in trained]
        used = torch.tensor([each is not None for each in own_gradients], dtype=torch.uint8)
        _taken(self._outside)
        sent = [
            *moved,
            used,
            *(torch.zeros_like(p) if g is None else g for p, g in zip(trained, own_gradients, strict=True)),
        ]
        size, cut = self.axis.group.size, len(moved)
        rows = self.axis.swap(sent, [[each.shape for each in sent]] * size) if trained or moved else [sent] * size
        gradients = []
        for flags, *values in (row[cut:] for row in rows):
            of = {p: value for p, value, flag in zip(trained, values, flags.tolist(), strict=True) if flag}
            gradients.append([of.get(p) for p in self._outside])
        return gradients, [row[:cut] for row in rows]


@dataclass
class _PassedTail:
    """A training pass that has run the tail and waits for its backward pass.

    Attributes:
        inputs: The output of this worker's trunk.
        output: The tail's output for it, where a new graph begins.
        tail_inputs: For each slot of the pass the tail's input.
        outputs: For each slot the tail's output.
    """

    inputs: torch.Tensor
    output: torch.Tensor
    tail_inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class _NoGraph(torch.autograd.Function):
    """The tail's output outside of training batches. A backward pass from it raises ``UserError``."""

    @staticmethod
    def forward(ctx: Any, activations: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rule = "a DataParallelTrunk has gradients in training batches alone"
        raise UserError(rule, "a backward pass outside of them", "use the plan without DataParallelTrunk")


def _taken(params: Iterable[nn.Parameter]) -> _Gradients:
    """Take the gradients of ``params`` from them."""
    gradients: _Gradients = []
    for p in params:
        gradients.append(p.grad)
        p.grad = None
    return gradients


def _give(params: Iterable[nn.Parameter], gradients: _Gradients) -> None:
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient


def _put(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Set ``buffers`` to ``values``. Autograd does not see it: graphs stay valid."""
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)


class Through(Protocol):
    """A function that applies ``run`` to one worker's ``inputs``, together with the inputs of the other workers."""

    def __call__(self, run: Run, inputs: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Tail:
    """The part of a model that its workers compute together: the smallest one with all divided layers.

    It is the call of ``module``, or the call of its children number ``first`` to ``stop`` (exclusive).
    """

    module: nn.Module
    first: int | None = None
    stop: int = 0

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The modules in the tail."""
        return [self.module] if self.first is None else list(self.module.children())[self.first : self.stop]

    def hand_over(self, through: Through) -> Run:
        """Make calls of the tail go to ``through`` from now on, and return the tail's own function."""
        kind = _Called if self.first is None else _InOrder
        module_class = type(self.module)
        name = f"{module_class.__name__}Together"
        self.module.__class__ = type(
            name, (kind, module_class), {"__doc__": module_class.__doc__, "__module__": module_class.__module__}
        )
        self.module.__dict__["_tail"] = self.first, self.stop
        self.module.__dict__["_through"] = through
        return partial(module_class.forward, self.module) if self.first is None else partial(_in_order, self.parts)


def tail_of(model: nn.Module, parallel_styles: Mapping[str, ParallelStyle]) -> Tail:
    """The smallest part of ``model`` with all layers of ``parallel_styles``.

    Raises:
        UserError: The part is the model itself, which cannot be cut, or it shares parameters with the rest.
    """
    paths = [name.split(".") for name in parallel_styles]
    above: list[str] = []
    for names in zip(*(path[:-1] for path in paths), strict=False):  # the common part of all paths
        if len(set(names)) > 1:
            break
        above.append(names[0])
    owner = model.get_submodule(".".join(above))
    inside = {path[len(above)] for path in paths}
    child = owner.get_submodule(next(iter(inside)))
    if type(owner).forward is nn.Sequential.forward:
        places = [place for place, (name, _) in enumerate(owner.named_children()) if name in inside]
        tail = Tail(owner, places[0], places[-1] + 1)
    elif len(inside) == 1 and _is_called(child):
        tail = Tail(child)
    elif (called := _first_called(model, above)) is not None:
        tail = Tail(called)
    else:
        rule = "the divided layers of a DataParallelTrunk are in one module, or follow each other in one nn.Sequential"
        fix = f"put them into an nn.Sequential of {type(model).__name__}"
        raise UserError(rule, ", ".join(parallel_styles), fix)
    in_tail = {id(part) for part in tail.parts}
    tops = tuple(f"{name}." for name, part in model.named_modules(remove_duplicate=False) if id(part) in in_tail)
    named = list(model.named_parameters(remove_duplicate=False))
    inside_of = {id(p) for name, p in named if name.startswith(tops)}
    for name, p in named:
        if id(p) in inside_of and not name.startswith(tops):
            rule = "the divided layers of a DataParallelTrunk share no parameter with the rest"
            raise UserError(rule, name, "use the plan without DataParallelTrunk")
    return tail


def _is_called(module: nn.Module) -> bool:
    """Whether it has a ``forward``; a ``ModuleList`` has none."""
    return type(module).forward is not nn.Module.forward


def _first_called(model: nn.Module, path: Sequence[str]) -> nn.Module | None:
    """The module at ``path``, or the next one above it that is called; None if only the model itself is called."""
    for length in range(len(path), 0, -1):
        if _is_called(module := model.get_submodule(".".join(path[:length]))):
            return module
    return None


class _HandedOver(nn.Module):
    """Base of modules whose forward pass calls a ``Through``."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        kind, module_class = type(self), type(self).__bases__[1]
        self.__class__ = module_class
        try:
            copied: nn.Module = copy.deepcopy(self, memo)
        finally:
            self.__class__ = kind
        copied.__class__ = kind
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickling()


class _Called(_HandedOver):
    """A module whose call is the tail."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the module's own ``forward``, of one tensor, by ``Through``."""
        if len(inputs) != 1 or named:
            arguments = f"{len(inputs)} and {', '.join(named) or 'none'} by name"
            rule = "what holds the divided layers of a DataParallelTrunk is called with one tensor"
            raise UserError(rule, arguments, "put them into a module of their own")
        return self.__dict__["_through"](super().forward, inputs[0])


class _InOrder(_HandedOver, nn.Sequential):
    """An ``nn.Sequential`` of which some children are the tail."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        """Run the children in order, those of the tail by ``Through``."""
        children, (first, stop) = list(self.children()), self.__dict__["_tail"]
        output = self.__dict__["_through"](partial(_in_order, children[first:stop]), _in_order(children[:first], input))
        return _in_order(children[stop:], output)


def _in_order(children: Sequence[nn.Module], value: Any) -> Any:
    for child in children:
        value = child(value)
    return value
