"""Replace tracebacks of invalid `loss` and `finish` methods of client algorithms by one sentence.

The runner differentiates `loss`, and the cohort runner calls it under `vmap`. So `loss` may neither take
gradients itself nor branch in Python on a tensor's value.
"""

from torch import Tensor

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.local.algorithm import Algorithm, Finished, Start
from fedfrozen_app.models.task import Batch, Parameters, Task
from fedfrozen_app.vmap.vmap_escape import NestedGradientError, is_mapped

GRADIENT = "Do not call torch.func.grad inside loss(): return a scalar, and the runner differentiates it."
BRANCH = (
    "Do not branch on a tensor's value inside loss(), nor call .item(): use torch.where, "
    "or set runtime.runner=sequential."
)
# Substrings of torch's error messages.
GRADIENT_MESSAGES = ("called inside a functorch transform", "second time", "derivative for aten::")
GRADIENT_UNDER_VMAP = ("does not require grad",)  # without vmap: a loss that depends on no trained parameter
BRANCH_MESSAGES = ("data-dependent control flow", ".item() on a Tensor", "output dynamic shape")


def checked_loss(method: Algorithm, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
    """The algorithm's loss, or a `UserError` that says what it must not do."""
    with LossErrors(method):
        loss = method.loss(parameters, batch, task, start)
    if loss.ndim:
        raise UserError(
            f"Algorithm {type(method).__name__}: loss() must return a scalar, and returns a tensor of shape "
            f"{tuple(loss.shape)}: take its mean or sum."
        )
    return loss


def checked_losses(
    method: Algorithm, parameters: Parameters, batch: Batch, task: Task, start: Start
) -> tuple[Tensor, Tensor]:
    """The algorithm's loss, and the task's own loss of the trained parameters: the first that the algorithm
    computes, detached. If it computes none, its whole loss is used."""
    noting, found = task.noting()
    loss = checked_loss(method, parameters, batch, noting, start)
    return loss, found[0] if found else loss.detach()


def checked_finish(
    method: Algorithm, start: Start, trained: Parameters, steps: Tensor, rate: float
) -> Finished:
    """What `finish` returns, or a `UserError` if its namespaces are not those that the algorithm declares."""
    with LossErrors(method):
        finished = method.finish(start, trained, steps, rate)
    name = f"Algorithm {type(method).__name__}"
    for kind, returned in (("client_state", finished.client_state), ("to_server", finished.to_server)):
        declared = getattr(method, kind)
        if unknown := sorted(set(returned) - set(declared)):
            raise UserError(
                f"{name}: finish() returns {kind} '{unknown[0]}', which is not declared: add it to {kind}."
            )
    if missing := sorted(set(method.to_server) - set(finished.to_server)):
        raise UserError(
            f"{name}: to_server declares '{missing[0]}', which finish() does not return: return it in "
            "Finished(to_server=...), or leave the declaration out."
        )
    return finished


class LossErrors:
    """Turn errors about a nested gradient, a tensor branch or an undeclared namespace into a sentence."""

    def __init__(self, method: Algorithm) -> None:
        self._method = method

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Raise the sentence for this error, if there is one. For a loop that calls it in every step, `try`
        and this method cost nothing where no error occurs."""
        method = self._method
        if isinstance(error, KeyError):
            key = error.args[0] if error.args else None
            if not isinstance(key, str) or "." in key:  # the name of a parameter
                return
            raise UserError(
                f"Algorithm {type(method).__name__}: it reads '{key}', which is no namespace there: "
                f"from_server declares {_listed(method.from_server)}, "
                f"client_state {_listed(method.client_state)}."
            ) from error
        if isinstance(error, RuntimeError) and not method.is_plain() and (sentence := _sentence(error)):
            raise UserError(f"Algorithm {type(method).__name__}: {sentence}") from error


def _sentence(error: RuntimeError) -> str | None:
    text = str(error)
    messages = (*GRADIENT_MESSAGES, *GRADIENT_UNDER_VMAP) if is_mapped() else GRADIENT_MESSAGES
    if isinstance(error, NestedGradientError) or any(message in text for message in messages):
        return GRADIENT
    return BRANCH if any(message in text for message in BRANCH_MESSAGES) else None


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"
