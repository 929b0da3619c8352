"""Train two other models on other data, with the noise of real sums and bugs of other people.

    python benchmarks/curves/train_others.py --recipe lstm --only rerun

Neither shares anything with `train.py`: `lstm` predicts the next byte of the documentation of
Python (an LSTM, AdamW), `conv` the module of the standard library that some bytes are from
(convolutions, SGD with momentum); both compute in bf16 by autocast. A rerun sums in another order:
it shuffles the samples of each batch, or splits the batch elsewhere. `BUGS` names the issue or the
change that a bug is known from, where it is one of a project. No limit was chosen with `conv` in
view.
"""

from __future__ import annotations

import argparse
import json.encoder
import os
import pydoc_data.topics
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional
from train import NORMS, keep, norm_of, read_keys
from typing_extensions import override

NUM_STEPS, BATCH, LENGTH, CLASSES = 100, 16, 32, 16
RERUNS = 28  # 8 to learn from and 20 to judge
MIDDLE = 50  # step from which on a run was resumed


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A training as it should be; a bug, a rerun and another platform each change some of it.

    Attributes:
        order: Seed of the order in which samples are summed; None for that of the data.
        cut: Sizes of the two microbatches, or None for a random cut by `order`.
        lr_lag: By how many steps the schedule is late.
        lr_restarts: Whether the schedule begins anew in the middle.
        lr_stays: Whether it stands still from the middle on.
        clip: `global`, `none`, `each` parameter by itself, `squared`: by the norm's square.
        decay_everywhere: Whether biases and norms decay too.
        is_coupled: Whether the decay goes through the moments (L2).
        forgets: Whether the state of the optimizer is lost in the middle.
        weaker: Part of the name of parameters whose gradient is halved, and `stronger` doubled.
        partial: The same of parameters whose gradient is that of the first microbatch.
        unstepped: The same of parameters that no step changes.
        loss_scale: A factor of all gradients.
        is_last_dropped: Whether the last microbatch has no gradient.
        keeps_gradients_every: Every so many steps the old gradients are not cleared; 0 for never.
        flush: Smaller elements of a gradient are 0.
        is_mean_of_means: Whether each microbatch is divided by its own number of tokens.
        counts_padding: Whether what is padding is learned, too.
        label_shift: By how many bytes the labels are off.
        drops_until: From this step on there is no dropout.
        is_dropout_unscaled: Whether what remains is not scaled up.
        is_same_order: Whether each epoch has the order of the first.
        is_same_noise: Whether each step has the same augmentation.
        num_twice: How many samples of a batch are there twice.
        norm_eps: Epsilon of all norms.
    """

    seed: int = 1
    lr: float = 4e-3
    order: int | None = None
    cut: tuple[int, int] | None = (8, 8)
    threads: int = 1
    has_mkldnn: bool = True
    in_double: bool = False
    lr_factor: float = 1.0
    lr_lag: int = 0
    warmup: int = 10
    lr_restarts: bool = False
    lr_stays: bool = False
    clip: str = "global"
    clip_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    momentum: float = 0.9
    is_nesterov: bool = False
    dampening: float = 0.0
    decay: float = 0.05
    decay_everywhere: bool = False
    is_coupled: bool = False
    forgets: bool = False
    weaker: str = "-"
    stronger: str = "-"
    partial: str = "-"
    unstepped: str = "-"
    loss_scale: float = 1.0
    is_last_dropped: bool = False
    keeps_gradients_every: int = 0
    flush: float = 0.0
    has_bf16_gradients: bool = False
    has_bf16_weights: bool = False
    is_mean_of_means: bool = False
    counts_padding: bool = False
    label_shift: int = 0
    smoothing: float = 0.0
    temperature: float = 1.0
    drops_until: int = NUM_STEPS + 1
    is_dropout_unscaled: bool = False
    is_same_order: bool = False
    is_same_noise: bool = False
    num_twice: int = 0
    norm_eps: float = 1e-5
    init_factor: float = 1.0
    is_gelu_tanh: bool = False
    leaks_state: bool = False


RECIPES: Mapping[str, Settings] = {
    "lstm": Settings(seed=11, lr=4e-3),
    "lstm-hot": Settings(seed=12, lr=8e-2, cut=None),
    "conv": Settings(seed=13, lr=5e-2),
    "conv-hot": Settings(seed=14, lr=3e-1, cut=None),
    "lstm-params": Settings(seed=15, lr=4e-3),
    "lstm-hot-params": Settings(seed=17, lr=8e-2, cut=None),
    "conv-params": Settings(seed=16, lr=5e-2),
    "conv-hot-params": Settings(seed=18, lr=3e-1, cut=None),
}
HF, MLM, PT = "huggingface/transformers", "NVIDIA/Megatron-LM", "pytorch/pytorch"
# Name, of which model ("" for both), in which issue or change, and what it changes.
BUGS: Sequence[tuple[str, str, str, Mapping[str, object]]] = (
    ("mean of microbatch means", "lstm", f"{HF}#34191", {"is_mean_of_means": True}),
    ("padding is learned", "lstm", f"{HF}#35203", {"counts_padding": True}),
    ("accumulation not divided", "lstm", f"{HF}#37766", {"loss_scale": 2.0}),
    ("clipped by the squared norm", "lstm", "paiml/entrenar#311", {"clip": "squared"}),
    ("clip without effect", "conv", "paiml/aprender#2112", {"clip": "none"}),
    ("each parameter clipped by itself", "lstm", "NVIDIA/OpenSeq2Seq#185", {"clip": "each"}),
    ("clipped at twice the norm", "conv", "InternLM/xtuner#262", {"clip_norm": 2.0}),
    ("clip before unscale", "conv", "", {"clip_norm": 0.25}),
    ("schedule one step late", "lstm", "vllm-project/speculators#900", {"lr_lag": 1}),
    ("schedule one step early", "conv", "victoresque/pytorch-template#68", {"lr_lag": -1}),
    ("warm-up again after a resume", "lstm", "vllm-project/speculators#900", {"lr_restarts": True}),
    ("no decay after a resume", "conv", "EleutherAI/gpt-neox#1029", {"lr_stays": True}),
    ("warm-up of 12", "conv", "tenstorrent/tt-metal#54320", {"warmup": 12}),
    ("lr not scaled with the batch", "", "deepinsight/insightface#2258", {"lr_factor": 0.707}),
    ("lr x1.05", "", "axolotl-ai-cloud/axolotl#1100", {"lr_factor": 1.05}),
    ("norms and biases decay", "lstm", "", {"decay_everywhere": True}),
    ("no weight decay", "conv", "NVIDIA-NeMo/Automodel#3882", {"decay": 0.0}),
    ("decay through the moments", "lstm", "", {"is_coupled": True}),
    ("epsilon 1e-6", "lstm", "", {"eps": 1e-6}),
    ("epsilon 1e-4", "lstm", "", {"eps": 1e-4}),
    ("beta2 0.999", "lstm", "", {"betas": (0.9, 0.999)}),
    ("beta1 0.85", "lstm", "", {"betas": (0.85, 0.99)}),
    ("momentum 0.85", "conv", "", {"momentum": 0.85}),
    ("Nesterov", "conv", "", {"is_nesterov": True}),
    ("dampening", "conv", "", {"dampening": 0.1}),
    ("optimizer state lost", "", "Lightning-AI/pytorch-lightning#4655", {"forgets": True}),
    ("final norm of one rank", "", f"{MLM}#1446", {"partial": "final_norm"}),
    ("embedding of one rank", "lstm", f"{MLM}#844", {"partial": "embedding"}),
    ("embedding x2", "conv", f"{MLM}#844", {"stronger": "embedding"}),
    ("loss x context parallel size", "conv", f"{MLM}#673", {"loss_scale": 2.0}),
    ("one layer halved", "", f"{MLM}#1464", {"weaker": "body.0"}),
    ("one layer of one rank", "conv", f"{MLM}#7452", {"partial": "body.1"}),
    ("biases are not stepped", "", "EleutherAI/gpt-neox#1259", {"unstepped": "bias"}),
    ("norm is not stepped", "lstm", "EleutherAI/gpt-neox#1259", {"unstepped": "final_norm"}),
    ("head is not stepped", "conv", "", {"unstepped": "head"}),
    ("last microbatch lost", "", "OpenNMT/OpenNMT-py#526", {"is_last_dropped": True}),
    ("not cleared each tenth step", "", "", {"keeps_gradients_every": 10}),
    ("gradients below 1e-5 flushed", "", "", {"flush": 1e-5}),
    ("gradients in bf16", "", "", {"has_bf16_gradients": True}),
    ("weights in bf16", "", "", {"has_bf16_weights": True}),
    ("labels one byte on", "lstm", "", {"label_shift": 1}),
    ("smoothing 0.01", "conv", "", {"smoothing": 0.01}),
    ("logits / 1.02", "", "", {"temperature": 1.02}),
    ("no dropout after an evaluation", "lstm", "huggingface/lerobot#3668", {"drops_until": MIDDLE}),
    ("dropout not scaled", "lstm", "", {"is_dropout_unscaled": True}),
    ("each epoch in one order", "conv", "lucidrains/DALLE-pytorch#230", {"is_same_order": True}),
    ("each step the same noise", "conv", f"{PT}#5059", {"is_same_noise": True}),
    ("a sample twice", "", "webdataset/webdataset#172", {"num_twice": 1}),
    ("epsilon of norms 1e-3", "", "", {"norm_eps": 1e-3}),
    ("epsilon of norms 1e-6", "", "", {"norm_eps": 1e-6}),
    ("init x1.05", "", "", {"init_factor": 1.05}),
    ("another seed", "", "Lightning-AI/pytorch-lightning#20412", {"seed": 99}),
    ("GELU by tanh", "conv", "", {"is_gelu_tanh": True}),
    ("state of the last batch", "lstm", "", {"leaks_state": True}),
)


class Lstm(nn.Module):
    """Predicts each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.body = nn.ModuleList([nn.LSTM(32, 64, batch_first=True)])
        self.final_norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 128)
        self.state: tuple[Tensor, Tensor] | None = None

    @override
    def forward(self, data: Tensor, kept: Tensor, settings: Settings) -> Tensor:
        """Return (batch, length, 128) logits."""
        hidden = self.embedding(data) * kept
        state = self.state if settings.leaks_state else None
        if state is not None and state[0].shape[1] != data.shape[0]:
            state = None
        hidden, after = self.body[0](hidden, state)
        self.state = (after[0].detach(), after[1].detach())
        logits: Tensor = self.head(self.final_norm(hidden))
        return logits


class Conv(nn.Module):
    """Predicts the module that bytes are from."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 24)
        self.body = nn.ModuleList([nn.Conv1d(24, 24, 5, padding=2) for _ in range(3)])
        self.norms = nn.ModuleList([nn.GroupNorm(4, 24) for _ in range(3)])
        self.final_norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, CLASSES)

    @override
    def forward(self, data: Tensor, kept: Tensor, settings: Settings) -> Tensor:
        """Return (batch, 1, classes) logits."""
        hidden = (self.embedding(data) * kept).transpose(1, 2)
        how = "tanh" if settings.is_gelu_tanh else "none"
        for layer, norm in zip(self.body, self.norms, strict=True):
            hidden = hidden + functional.gelu(layer(norm(hidden)), approximate=how)
        logits: Tensor = self.head(self.final_norm(hidden.mean(2)))
        return logits.unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples with their labels, what is padding (weight 0), and what dropout keeps."""

    data: Tensor
    labels: Tensor
    weights: Tensor
    kept: Tensor

    def at(self, rows: Tensor) -> Batch:
        """Return some of the samples."""
        return Batch(
            data=self.data[rows],
            labels=self.labels[rows],
            weights=self.weights[rows],
            kept=self.kept[rows],
        )


class Texts:
    """The bytes that both models learn from."""

    def __init__(self, *, is_conv: bool) -> None:
        self.is_conv = is_conv
        if is_conv:
            here = Path(json.encoder.__file__).parents[1]
            files = sorted(here.glob("[a-h]*.py"), key=lambda f: (-f.stat().st_size, f.name))
            self.texts = [_bytes(file.read_bytes()) for file in files[:CLASSES]]
        else:
            topics = pydoc_data.topics.topics
            self.texts = [_bytes(" ".join(topics[name] for name in sorted(topics)).encode())]

    def batch(self, settings: Settings, step: int) -> Batch:
        """Return the batch of a step, which all but bugs of the data make alike."""
        draws = random.Random(1000 * settings.seed + step)
        if self.is_conv:
            return self._of_modules(settings, step, draws)
        starts = [draws.randrange(len(self.texts[0]) - LENGTH - 4) for _ in range(BATCH)]
        starts = [*starts[: BATCH - settings.num_twice], *starts[: settings.num_twice]]
        rows = torch.stack([self.texts[0][s : s + LENGTH + 4] for s in starts])
        shift = 1 + settings.label_shift
        lengths = torch.tensor([draws.randrange(LENGTH // 4, LENGTH + 1) for _ in range(BATCH)])
        is_real = torch.arange(LENGTH) < lengths[:, None]
        weights = torch.ones(BATCH, LENGTH) if settings.counts_padding else is_real.float()
        kept = _dropout(settings, step, (BATCH, LENGTH, 32), 0.1)
        labels = rows[:, shift : shift + LENGTH]
        return Batch(data=rows[:, :LENGTH] * is_real, labels=labels, weights=weights, kept=kept)

    def _of_modules(self, settings: Settings, step: int, draws: random.Random) -> Batch:
        """Take from an epoch of 20 batches, whose order is another in each epoch."""
        epoch, number = divmod(step - 1, 20)
        order = list(range(20 * BATCH))
        random.Random(settings.seed if settings.is_same_order else settings.seed + epoch).shuffle(
            order
        )
        chosen = order[number * BATCH : (number + 1) * BATCH]
        chosen = [*chosen[: BATCH - settings.num_twice], *chosen[: settings.num_twice]]
        labels = torch.tensor([n % CLASSES for n in chosen])
        rows = torch.stack(
            [
                self.texts[n % CLASSES][200 * (n // CLASSES) : 200 * (n // CLASSES) + 2 * LENGTH]
                for n in chosen
            ]
        )
        noise = torch.Generator().manual_seed(
            7 if settings.is_same_noise else draws.randrange(9999)
        )
        rows = torch.where(torch.rand(rows.shape, generator=noise) < 0.05, 0, rows)
        kept = torch.ones(BATCH, 1, 1)
        return Batch(data=rows, labels=labels[:, None], weights=torch.ones(BATCH, 1), kept=kept)


def variants_of(model: str) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """Return group, name and changes of everything that is trained of a recipe."""
    yield "plain", "as it is", {}
    for number in range(RERUNS):
        yield "rerun", f"rerun {number}", {"order": number + 1}
    platforms: dict[str, dict[str, object]] = {
        "two threads": {"threads": 2},
        "without mkldnn": {"has_mkldnn": False},
        "one batch": {"cut": (BATCH, 0)},
        "microbatches of 4 and 12": {"cut": (4, 12)},
        "microbatches of 12 and 4": {"cut": (12, 4)},
        "losses in float64": {"in_double": True},
    }
    for number, (name, changes) in enumerate(platforms.items()):
        yield "platform", name, changes
        if name != "two threads":  # they wait for one another: a minute for 100 steps
            yield "platform", f"{name}, another order", {**changes, "order": 200 + number}
    for number, (name, of, _, change) in enumerate(BUGS):
        if of in ("", model):
            yield "bug", name, {**change, "order": 300 + number}


def main() -> None:
    """Train what the file lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="lstm")
    parser.add_argument("--only", default="", help="variants whose name holds this")
    parser.add_argument("--file", type=Path, default=NORMS)
    options = parser.parse_args()
    known = read_keys(options.file)
    model = options.recipe.partition("-")[0]
    texts = Texts(is_conv=model == "conv")
    for group, name, changes in variants_of(model):
        key = f"{options.recipe}/{group}//{name}"
        if options.only not in name or key in known:
            continue
        start = time.monotonic()
        settings = replace(RECIPES[options.recipe], **changes)  # type: ignore[arg-type] # by name
        curves = train(texts, settings)
        losses = curves["lm loss"]
        keep(options.file, key, curves)
        spent = time.monotonic() - start
        print(f"{spent:5.1f} s  {key}: {losses[0]:.6f} to {losses[-1]:.6f}", file=sys.stderr)


def train(texts: Texts, settings: Settings) -> dict[str, list[float]]:
    """Return the loss and the norms of gradient and parameters of each step."""
    torch.set_num_threads(settings.threads)
    model = _built(settings, is_conv=texts.is_conv)
    optimizer = optimizer_of(model, settings, is_conv=texts.is_conv)
    losses, gradient_norms, parameter_norms = [], [], []
    with torch.backends.mkldnn.flags(enabled=settings.has_mkldnn):
        for step in range(1, NUM_STEPS + 1):
            for group in optimizer.param_groups:
                group["lr"] = lr_at(settings, step)
            if settings.forgets and step == MIDDLE:
                optimizer.state.clear()
            losses.append(gradients(model, texts.batch(settings, step), settings, step))
            gradient_norms.append(clip(model, settings))
            _step(model, optimizer, settings)
            parameter_norms.append(norm_of(model.parameters()))
    return {"lm loss": losses, "grad-norm": gradient_norms, "params-norm": parameter_norms}


def _built(settings: Settings, *, is_conv: bool) -> nn.Module:
    torch.manual_seed(settings.seed)
    model = Conv() if is_conv else Lstm()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.eps = settings.norm_eps
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(settings.init_factor)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    for name, parameter in model.named_parameters():
        if settings.unstepped in name:
            parameter.grad = None
    optimizer.step()
    if settings.has_bf16_weights:
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.bfloat16())


def optimizer_of(model: nn.Module, settings: Settings, *, is_conv: bool) -> torch.optim.Optimizer:
    """Return SGD for convolutions, else AdamW; weights of matrices decay."""
    named = list(model.named_parameters())
    decayed = [p for _, p in named if p.dim() > 1 or settings.decay_everywhere]
    others = [p for _, p in named if not (p.dim() > 1 or settings.decay_everywhere)]
    decay = settings.decay * (0.02 if is_conv else 1.0)
    groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": decay}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    if is_conv:
        return torch.optim.SGD(
            groups,
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.is_nesterov,
            dampening=settings.dampening,
        )
    kind = torch.optim.Adam if settings.is_coupled else torch.optim.AdamW
    return kind(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def lr_at(settings: Settings, step: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a linear decay to a tenth."""
    at = max(1, step - settings.lr_lag)
    if step >= MIDDLE:
        at = MIDDLE if settings.lr_stays else at - MIDDLE * settings.lr_restarts
    warm = min(1.0, max(1, at) / settings.warmup)
    return settings.lr * settings.lr_factor * warm * (1 - 0.9 * at / NUM_STEPS)


def gradients(model: nn.Module, batch: Batch, settings: Settings, step: int) -> float:
    """Compute the gradients of a step; return its loss."""
    order = torch.arange(BATCH)
    cut = settings.cut
    if settings.order is not None:
        draws = torch.Generator().manual_seed(1000 * settings.order + step)
        order = torch.randperm(BATCH, generator=draws)
        if cut is None:
            first = int(torch.randint(2, BATCH - 1, (), generator=draws))
            cut = (first, BATCH - first)
    if not settings.keeps_gradients_every or step % settings.keeps_gradients_every:
        model.zero_grad()
    total = batch.weights.sum()
    microbatches = [rows for rows in torch.split(order, list(cut or (8, 8))) if len(rows)]
    loss = 0.0
    firsts: dict[str, Tensor] = {}
    for number, rows in enumerate(microbatches):
        part = batch.at(rows)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(part.data, part.kept, settings)
        logits = (logits.double() if settings.in_double else logits.float()) / settings.temperature
        each = functional.cross_entropy(
            logits.flatten(0, 1),
            part.labels.flatten(),
            reduction="none",
            label_smoothing=settings.smoothing,
        )
        whole = (each * part.weights.flatten()).sum()
        divisor = total
        if settings.is_mean_of_means:
            divisor = part.weights.sum() * len(microbatches)
        loss += float(whole.detach() / divisor)
        if not (settings.is_last_dropped and number == len(microbatches) - 1):
            torch.autograd.backward(whole / divisor * settings.loss_scale)
        if number == 0 and settings.partial != "-":
            firsts = {
                n: p.grad.clone()
                for n, p in model.named_parameters()
                if settings.partial in n and p.grad is not None
            }
    for name, parameter in model.named_parameters():
        _damage(name, parameter, firsts, settings)
    return loss


def _damage(
    name: str, parameter: nn.Parameter, firsts: Mapping[str, Tensor], settings: Settings
) -> None:
    grad = parameter.grad
    if grad is None:
        return
    if name in firsts:
        grad.copy_(firsts[name])
    if settings.weaker in name:
        grad.mul_(0.5)
    if settings.stronger in name:
        grad.mul_(2.0)
    if settings.flush:
        grad[grad.abs() < settings.flush] = 0.0
    if settings.has_bf16_gradients:
        grad.copy_(grad.bfloat16())


def clip(model: nn.Module, settings: Settings) -> float:
    """Clip the gradients; return their norm before that."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(grads))
    if settings.clip == "each":
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_(parameter, settings.clip_norm)
    elif settings.clip != "none":
        size = norm**2 if settings.clip == "squared" else norm
        factor = min(1.0, settings.clip_norm / (size + 1e-6))
        for grad in grads:
            grad.mul_(factor)
    return norm


def _dropout(settings: Settings, step: int, shape: tuple[int, ...], part: float) -> Tensor:
    """Return what is kept, scaled up; by the seed of the step, so that samples may be reordered."""
    if step >= settings.drops_until:
        return torch.ones(shape)
    draws = torch.Generator().manual_seed(5000 * settings.seed + step)
    kept = (torch.rand(shape, generator=draws) >= part).float()
    return kept if settings.is_dropout_unscaled else kept / (1 - part)


def _bytes(text: bytes) -> Tensor:
    return torch.tensor([byte if byte < 128 else 1 for byte in text])


if __name__ == "__main__":
    main()
