"""Train the CPU workload in every variant and keep what it measured, one line a training.

    python benchmarks/curves/train.py --recipe fp32 --only 'rerun 0'

Meant to be run in parts: a training that the file has is not done again. `curves.json.gz` holds
losses alone; `norms.json.gz` losses and the norms of gradients (and, in recipes trained later, of
parameters) of the recipes in `WITH_NORMS`, and of other models.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/functional_tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gpt_training  # noqa: E402
import torch  # noqa: E402
from gpt_arguments import Arguments  # noqa: E402
from gpt_data import Batch  # noqa: E402
from gpt_distributed import _seed, joined_world  # noqa: E402
from gpt_model import build  # noqa: E402
from train_gpt import silence_what_was_chosen  # noqa: E402
from variants import Flag, Variant, all_variants, main_weights  # noqa: E402

FILE = Path(__file__).with_name("curves.json.gz")
NORMS = Path(__file__).with_name("norms.json.gz")
WITH_NORMS = ("bf16-norms", "bf16-params")
COMMON: Mapping[str, Flag] = {
    "train_iters": 100,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "lr_warmup_iters": 10,
    "weight_decay": 0.1,
}
RECIPES: Mapping[str, Mapping[str, Flag]] = {
    "fp32": {"seed": 1, "lr": 2e-3},
    "bf16": {"seed": 2, "lr": 5e-3, "bf16": True},
    "bf16-hot": {"seed": 3, "lr": 2e-2, "bf16": True},
    "bf16-warm": {"seed": 4, "lr": 1.5e-2, "bf16": True},
    "bf16-unseen": {"seed": 5, "lr": 1.2e-2, "bf16": True},
    "bf16-norms": {"seed": 6, "lr": 5e-3, "bf16": True},
    "bf16-params": {"seed": 7, "lr": 5e-3, "bf16": True},
}


def main() -> None:
    """Train what the file lacks, for as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="fp32")
    parser.add_argument("--only", default="", help="variants whose name holds this")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin none after these")
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    has_norms = options.recipe in WITH_NORMS
    file = options.file or (NORMS if has_norms else FILE)
    known = read_keys(file)
    silence_what_was_chosen()
    torch.set_num_threads(1)
    start = time.monotonic()
    with joined_world(Arguments()) as device:
        for variant in all_variants():
            key = f"{options.recipe}/{variant.group}/{variant.family}/{variant.name}"
            if options.only not in variant.name or key in known:
                continue
            if time.monotonic() - start > options.seconds:
                break
            curves = train_variant(options.recipe, variant, device)
            losses = curves["lm loss"]
            keep(file, key, curves if has_norms else {"lm loss": losses})
            print(f"{time.monotonic() - start:6.1f} s  {key}: {losses[0]:.6f} to {losses[-1]:.6f}")


def read_keys(file: Path) -> set[str]:
    """Return recipe/group/family/name of every training of a file."""
    if not file.exists():
        return set()
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return {key for line in lines for key in json.loads(line)}


def keep(file: Path, key: str, curves: Mapping[str, list[float]]) -> None:
    """Append a training to a file; one of a loss alone as a plain list."""
    shown = {name: [float(f"{value:.7g}") for value in curve] for name, curve in curves.items()}
    kept = shown["lm loss"] if len(shown) == 1 else shown
    with gzip.open(file, "at", encoding="utf-8") as lines:
        lines.write(json.dumps({key: kept}, separators=(",", ":")) + "\n")


def train_variant(recipe: str, variant: Variant, device: torch.device) -> dict[str, list[float]]:
    """Train from the first iteration to the last; return the loss and both norms of each."""
    arguments = arguments_of(recipe, variant.flags)
    _seed(arguments)
    iterations = range(1, arguments.train_iters + 1)
    losses: list[float] = []
    gradient_norms: list[float] = []
    parameter_norms: list[float] = []
    with contextlib.ExitStack() as stack:
        if variant.inside is not None:
            stack.enter_context(variant.inside())
        trained = build(arguments, device)
        trained.model.train()
        finalize = trained.config.finalize_model_grads_func

        def finished(*args: object, **kwargs: object) -> None:
            finalize(*args, **kwargs)
            if variant.gradients is not None:
                variant.gradients(trained, len(losses) + 1)

        trained.config.finalize_model_grads_func = finished
        if variant.built is not None:
            variant.built(trained)
        replace(stack, variant)
        for iteration in iterations:
            step = gpt_training.train_step(arguments, trained, device, iteration)
            losses.append(step.loss)
            gradient_norms.append(step.grad_norm)
            if variant.updated is not None:
                variant.updated(trained, iteration)
            parameter_norms.append(norm_of(main_weights(trained)))
    return {"lm loss": losses, "grad-norm": gradient_norms, "params-norm": parameter_norms}


def norm_of(parameters: Iterable[torch.Tensor]) -> float:
    """Return the L2 norm of all parameters together, as Megatron-LM logs it after a step."""
    return float(torch.nn.utils.get_total_norm([one.detach().float() for one in parameters]))


def arguments_of(recipe: str, flags: Mapping[str, Flag]) -> Arguments:
    """Return the flags of a run: `lr` of a variant is a factor, `bf16` the other of the two."""
    base = {**COMMON, **RECIPES[recipe]}
    changed = {**base, **flags}
    if "lr" in flags:
        changed["lr"] = float(flags["lr"]) * float(base["lr"])
    if "bf16" in flags:
        changed["bf16"] = not base.get("bf16", False)
    return Arguments(**changed)  # type: ignore[arg-type] # by name, as the table has them


def replace(stack: contextlib.ExitStack, variant: Variant) -> None:
    """Put the variant's microbatches and losses in the place of the training program's."""
    microbatches, loss_of = gpt_training.microbatches, gpt_training.loss_of

    def changed_batches(arguments: Arguments, device: torch.device, iteration: int) -> list[Batch]:
        batches = microbatches(arguments, device, iteration)
        return batches if variant.batches is None else variant.batches(batches, iteration)

    def changed_loss(
        arguments: Arguments, iteration: int, token_losses: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        changed = token_losses if variant.loss is None else variant.loss(token_losses)
        return loss_of(arguments, iteration, changed)

    stack.callback(setattr, gpt_training, "microbatches", microbatches)
    stack.callback(setattr, gpt_training, "loss_of", loss_of)
    gpt_training.microbatches = changed_batches
    gpt_training.loss_of = changed_loss


if __name__ == "__main__":
    main()
