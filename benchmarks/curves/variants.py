"""What is done to a training: reruns, changes of platform that are none of its faults, and bugs.

A `Variant` is a change to the CPU workload of `tests/functional_tests`: other flags, or a hook into
one of the five places where a training can go wrong. A bug changes what is computed; a platform
change computes the same in another order or by another kernel; a rerun adds to each gradient the
noise of 1e-7 that atomic additions have on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from gpt_data import Batch
from gpt_model import Trained
from torch.nn import functional

Flag = float | int | str | bool
PLAIN, RERUN, PLATFORM, BUG = "plain", "rerun", "platform", "bug"
REPEATS = 28  # 8 to learn from and 20 to judge
LATE = 60  # iteration at which a late bug begins


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train.

    Attributes:
        group: `plain`, `rerun`, `platform` or `bug`.
        family: Of a bug: what it is a bug of.
        flags: Of the training program, over those of the recipe.
        built: Called once with what is trained.
        batches: Replaces the microbatches of an iteration.
        gradients: Called with each iteration's gradients before the optimizer.
        loss: Replaces the token losses of a microbatch.
        updated: Called after each iteration.
        inside: Surrounds the training.
    """

    name: str
    group: str
    family: str = ""
    flags: Mapping[str, Flag] = field(default_factory=dict)
    built: Callable[[Trained], None] | None = None
    batches: Callable[[list[Batch], int], list[Batch]] | None = None
    gradients: Callable[[Trained, int], None] | None = None
    loss: Callable[[torch.Tensor], torch.Tensor] | None = None
    updated: Callable[[Trained, int], None] | None = None
    inside: Callable[[], AbstractContextManager[None]] | None = None


def all_variants() -> tuple[Variant, ...]:
    """Return the recipe as it is, its reruns, the changes of platform and the bugs."""
    reruns = [
        Variant(name=f"rerun {i}", group=RERUN, gradients=_noise(1e-7, i)) for i in range(REPEATS)
    ]
    plain = [Variant(name=name, group=PLAIN) for name in ("as it is", "as it is, again")]
    return (
        *plain,
        *reruns,
        *_platforms(),
        *_flag_bugs(),
        *_data_bugs(),
        *_model_bugs(),
        *_step_bugs(),
    )


def _platforms() -> list[Variant]:
    platform = functools.partial(Variant, group=PLATFORM)
    noise = _noise(1e-7, 100)
    rows = [
        platform(name="microbatches of 1", flags={"micro_batch_size": 1}),
        platform(name="microbatches of 2", flags={"micro_batch_size": 2}),
        platform(name="microbatches of 8", flags={"micro_batch_size": 8}),
        platform(name="two threads", inside=_two_threads),
        platform(name="without mkldnn", inside=_without_mkldnn),
        platform(name="another attention kernel", built=_sdpa),
        platform(name="another GELU kernel", built=_gelu_by_erf),
        platform(name="another order of samples within a batch", batches=_reverse),
        platform(name="sums in another order", gradients=_noise(3e-7, 99)),
    ]
    mixed = [
        dataclasses.replace(row, name=f"{row.name}, and noise", gradients=noise)
        for row in rows
        if row.gradients is None
    ]
    return rows + mixed


def _flag_bugs() -> list[Variant]:
    rows: list[tuple[str, str, dict[str, Flag]]] = [
        ("learning rate", "lr x0.5", {"lr": 0.5}),
        ("learning rate", "lr x0.9", {"lr": 0.9}),
        ("learning rate", "lr x1.1", {"lr": 1.1}),
        ("learning rate", "lr x2", {"lr": 2.0}),
        ("schedule", "no warm-up", {"lr_warmup_iters": 0}),
        ("schedule", "warm-up twice as long", {"lr_warmup_iters": 20}),
        ("schedule", "cosine instead of linear", {"lr_decay_style": "cosine"}),
        ("schedule", "never decays", {"lr_decay_style": "constant"}),
        ("clip", "not clipped", {"clip_grad": 0.0}),
        ("clip", "clipped at half the norm", {"clip_grad": 0.5}),
        ("optimizer", "no weight decay", {"weight_decay": 0.0}),
        ("optimizer", "weight decay x10", {"weight_decay": 1.0}),
        ("optimizer", "beta1 0.8", {"adam_beta1": 0.8}),
        ("optimizer", "beta2 0.95", {"adam_beta2": 0.95}),
        ("optimizer", "epsilon 1e-5", {"adam_eps": 1e-5}),
        ("init", "deviation x1.1", {"init_method_std": 0.022}),
        ("init", "deviation x0.5", {"init_method_std": 0.01}),
        ("init", "another seed", {"seed": 4321}),
        ("dropout", "hidden 0.1", {"hidden_dropout": 0.1}),
        ("dropout", "attention 0.1", {"attention_dropout": 0.1}),
        ("model", "RMSNorm", {"normalization": "RMSNorm"}),
        ("model", "no biases", {"disable_bias_linear": True}),
        ("precision", "the other precision", {"bf16": -1}),
        ("batch", "half as large", {"global_batch_size": 4}),
    ]
    return [Variant(name=n, group=BUG, family=f, flags=flags) for f, n, flags in rows]


def _data_bugs() -> list[Variant]:
    def bug(family: str, name: str, change: Callable[[list[Batch], int], list[Batch]]) -> Variant:
        return Variant(name=name, group=BUG, family=family, batches=change)

    seen: dict[str, list[Batch]] = {}

    def stale(batches: list[Batch], iteration: int) -> list[Batch]:
        if iteration % 2 or not seen:
            seen["last"] = batches
        return seen["last"]

    def behind(batches: list[Batch], iteration: int) -> list[Batch]:
        last = seen.get("behind", batches) if iteration > 1 else batches
        seen["behind"] = batches
        return last

    return [
        bug("data order", "every batch twice", stale),
        bug("data order", "one step behind", behind),
        bug("batch", "one sample twice", lambda b, _: [_edit(b[0], _twice), *b[1:]]),
        bug("batch", "a microbatch twice", lambda b, _: [b[0], b[0], *b[2:]]),
        bug("labels", "labels are the tokens", lambda b, _: [_relabel(x) for x in b]),
        bug("position", "off by one", lambda b, _: [_move(x, lambda p: (p + 1) % 64) for x in b]),
        bug("position", "all zero", lambda b, _: [_move(x, torch.zeros_like) for x in b]),
        Variant(name="last token masked", group=BUG, family="loss mask", loss=_without_last),
        Variant(name="half of the tokens", group=BUG, family="loss mask", loss=_first_half),
    ]


def _model_bugs() -> list[Variant]:
    def bug(family: str, name: str, change: Callable[[Trained], None]) -> Variant:
        return Variant(name=name, group=BUG, family=family, built=change)

    return [
        bug("mask", "a layer sees the future", lambda t: _mask(t, 1, None)),
        bug("mask", "a layer sees one token ahead", lambda t: _mask(t, 1, 2)),
        bug("mask", "a layer does not see itself", lambda t: _mask(t, 1, 0)),
        bug("attention", "scale x1.1", lambda t: _scale_attention(t, 1.1)),
        bug("attention", "scale x1.01", lambda t: _scale_attention(t, 1.01)),
        bug("model", "an MLP skipped", _skip_mlp),
        bug("model", "GELU by tanh", _gelu_by_tanh),
        bug("model", "epsilon of a norm 1e-3", _norm_epsilon),
    ]


def _step_bugs() -> list[Variant]:
    def grads(family: str, name: str, change: Callable[[Trained, int], None]) -> Variant:
        return Variant(name=name, group=BUG, family=family, gradients=change)

    def after(family: str, name: str, change: Callable[[Trained, int], None]) -> Variant:
        return Variant(name=name, group=BUG, family=family, updated=change)

    return [
        grads("gradient scale", "x2", lambda t, _: _scale(t, "", 2.0)),
        grads("gradient scale", "x0.1", lambda t, _: _scale(t, "", 0.1)),
        grads("gradient scale", "x2 in one layer", lambda t, _: _scale(t, "layers.1.", 2.0)),
        grads("lost gradient", "of an MLP", lambda t, _: _scale(t, "layers.0.mlp", 0.0)),
        grads("lost gradient", "of an attention", lambda t, _: _scale(t, "layers.1.self", 0.0)),
        grads("lost gradient", "of the positions", lambda t, _: _scale(t, "position", 0.0)),
        grads("lost gradient", "of the norms", lambda t, _: _scale(t, "layernorm", 0.0)),
        grads("stale gradient", "every tenth step twice", _twice_at_tenth()),
        grads("precision", "gradients in bf16", lambda t, _: _round_gradients(t)),
        after("precision", "main weights in bf16", lambda t, _: _round_weights(t)),
        after("optimizer", "state lost at step 60", _forget_state),
        after("schedule", "late lr x1.5", _late_lr),
        grads("late", "late noise of 1e-2", _late_noise),
    ]


def _noise(size: float, seed: int) -> Callable[[Trained, int], None]:
    generator = torch.Generator()

    def add(trained: Trained, iteration: int) -> None:
        generator.manual_seed(1000 * seed + iteration)
        for _, grad in _gradients(trained):
            grad.mul_(1 + size * torch.randn(grad.shape, generator=generator))

    return add


def _gradients(trained: Trained) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in trained.bare.named_parameters():
        yield name, parameter.main_grad


def _scale(trained: Trained, part: str, factor: float) -> None:
    for name, grad in _gradients(trained):
        if part in name:
            grad.mul_(factor)


def _round_gradients(trained: Trained) -> None:
    for _, grad in _gradients(trained):
        grad.copy_(grad.bfloat16())


def _twice_at_tenth() -> Callable[[Trained, int], None]:
    """Add the last iteration's gradient once more, as if it had not been cleared."""
    last: dict[str, torch.Tensor] = {}

    def change(trained: Trained, iteration: int) -> None:
        for name, grad in _gradients(trained):
            now = grad.clone()
            if iteration % 10 == 0:
                grad.add_(last[name])
            last[name] = now

    return change


def _late_noise(trained: Trained, iteration: int) -> None:
    if iteration > LATE:
        _noise(1e-2, 7)(trained, iteration)


def main_weights(trained: Trained) -> Iterator[torch.Tensor]:
    """Yield the weights that the optimizer changes, in fp32."""
    for group in trained.optimizer.param_groups:
        yield from group["params"]


def _round_weights(trained: Trained) -> None:
    for weight in main_weights(trained):
        weight.data.copy_(weight.data.bfloat16())


def _forget_state(trained: Trained, iteration: int) -> None:
    if iteration == LATE:
        parts = getattr(trained.optimizer, "chained_optimizers", [trained.optimizer])
        for state in (s for part in parts for s in part.optimizer.state.values()):
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()


def _late_lr(trained: Trained, iteration: int) -> None:
    if iteration >= LATE:
        for group in trained.optimizer.param_groups:
            group["lr"] *= 1.5


def _edit(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    return dataclasses.replace(batch, tokens=change(batch.tokens), labels=change(batch.labels))


def _twice(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[:1], rows[:1], rows[2:]])


def _relabel(batch: Batch) -> Batch:
    return dataclasses.replace(batch, labels=batch.tokens)


def _move(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    return dataclasses.replace(batch, position_ids=change(batch.position_ids))


def _reverse(batches: list[Batch], _: int) -> list[Batch]:
    return [_edit(batch, lambda rows: rows.flip(0).contiguous()) for batch in reversed(batches)]


def _without_last(losses: torch.Tensor) -> torch.Tensor:
    return losses[:, :-1]


def _first_half(losses: torch.Tensor) -> torch.Tensor:
    return losses[:, : losses.shape[1] // 2]


def _attention(trained: Trained, layer: int) -> torch.nn.Module:
    module: torch.nn.Module = trained.bare.decoder.layers[layer].self_attention.core_attention
    return module


def _mask(trained: Trained, layer: int, diagonal: int | None) -> None:
    """Let a layer see all tokens, or those before the diagonal that is given (1 is right)."""
    softmax = _attention(trained, layer).scale_mask_softmax
    assert isinstance(softmax, torch.nn.Module)
    scale = float(softmax.scale or 1.0)  # type: ignore[arg-type] # megatron-core says number

    def masked(scores: torch.Tensor, *_: object) -> torch.Tensor:
        scores = scores.float() * scale
        if diagonal is not None:
            hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(diagonal)
            scores = scores.masked_fill(hidden, -10000.0)
        return torch.softmax(scores, dim=-1).to(trained.config.params_dtype)

    softmax.forward = masked


def _scale_attention(trained: Trained, factor: float) -> None:
    for layer in range(trained.config.num_layers):
        core = _attention(trained, layer)
        vars(core)["softmax_scale"] *= factor


def _sdpa(trained: Trained) -> None:
    """Compute attention by torch's own kernel."""
    for layer in range(trained.config.num_layers):
        core = _attention(trained, layer)

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
        ) -> torch.Tensor:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # to (b, heads, s, d)
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

        core.forward = attend


def _skip_mlp(trained: Trained) -> None:
    layer = trained.bare.decoder.layers[1].mlp
    layer.forward = lambda hidden, *_, **__: (torch.zeros_like(hidden), None)


def _gelu_by_tanh(trained: Trained) -> None:
    _activation(trained, lambda x: functional.gelu(x, approximate="tanh"))


def _gelu_by_erf(trained: Trained) -> None:
    _activation(trained, lambda x: x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5))))


def _activation(trained: Trained, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for layer in trained.bare.decoder.layers:
        layer.mlp.activation_func = function


def _norm_epsilon(trained: Trained) -> None:
    trained.bare.decoder.layers[0].input_layernorm.eps = 1e-3


@contextlib.contextmanager
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@contextlib.contextmanager
def _without_mkldnn() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield
